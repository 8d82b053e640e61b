// One number at a time with the interface of the vectors of csrc/cpu/simd.h: the portable path of
// the CPU, and what a thread of a GPU does. Host and device.
#pragma once

#include <cmath>

#include "dtypes.h"

namespace pk {
namespace {  // internal linkage, see dtypes.h

template <class T, class A>
struct Scalar {
  static constexpr std::size_t lanes = 1;
  using Vector = A;
  using Bits = std::uint32_t;
  using Ints = std::int32_t;
  using Packed = T;
  PK_HD static Vector set(A x) { return x; }
  PK_HD static Vector fma(Vector a, Vector b, Vector c) { return std::fma(a, b, c); }
  PK_HD static Vector sqrt(Vector a) { return std::sqrt(a); }
  PK_HD static Vector to_float(Ints i) { return Vector(i); }
  PK_HD static Ints truncate(Vector v) { return Ints(v); }
  PK_HD static Bits places() { return 0; }
  template <class Code>
  PK_HD static Ints load_ints(const Code* p) {
    return Ints(*p);
  }
  template <class Code>
  PK_HD static void store_ints(Code* p, Ints v) {
    *p = Code(v);
  }
  PK_HD static Vector load(const T* p) { return A(widen(*p)); }
  PK_HD static Packed pack(Vector v) { return narrow<T>(v); }
  PK_HD static Packed upper(Bits bits) { return {std::uint16_t(bits >> 16)}; }  // of a bfloat16
  PK_HD static void store(T* p, Packed v) { *p = v; }
};

}  // namespace
}  // namespace pk
