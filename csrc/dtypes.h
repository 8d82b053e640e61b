// Element types: how a stored number becomes one we can add, and back with one rounding.
// Host and device; the only place that knows the bit layouts of bfloat16 and float16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PK_HD __host__ __device__
#else
#define PK_HD
#endif

namespace pk {

// The codes are shared with Python (ops.py names them by torch dtype).
enum class Dtype : std::uint8_t { f32 = 0, f64 = 1, bf16 = 2, f16 = 3 };

struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

PK_HD constexpr std::size_t size_of(Dtype dtype) {
  return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2;
}

// Internal linkage: the same functions are compiled for several instruction sets (csrc/cpu), and
// the linker must not hand one file's code to another.
namespace {

template <class To, class From>
PK_HD inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// --- widening is exact -----------------------------------------------------------------------

PK_HD inline float widen(float x) { return x; }
PK_HD inline double widen(double x) { return x; }
PK_HD inline float widen(bf16 x) { return bit_cast<float>(std::uint32_t{x.bits} << 16); }

PK_HD inline float widen(f16 x) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  const std::uint32_t sign = std::uint32_t(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const std::uint32_t fraction = x.bits & 0x3ffu;
  if (exponent == 0x1f) {  // infinity, or a NaN made quiet as the hardware does
    const std::uint32_t quiet = fraction ? 0x400000u : 0u;
    return bit_cast<float>(sign | 0x7f800000u | quiet | (fraction << 13));
  }
  if (exponent == 0) {  // zero and subnormals: fraction * 2^-24, exact in float
    const float magnitude = float(fraction) * 0x1p-24f;
    return bit_cast<float>(sign | bit_cast<std::uint32_t>(magnitude));
  }
  return bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
#endif
}

// --- narrowing rounds once, to nearest even --------------------------------------------------

template <class T>
PK_HD inline T narrow(float x);
template <class T>
PK_HD inline T narrow(double x);

template <>
PK_HD inline float narrow<float>(float x) {
  return x;
}
template <>
PK_HD inline float narrow<float>(double x) {
  return float(x);
}
template <>
PK_HD inline double narrow<double>(double x) {
  return x;
}

// The bfloat16 is the upper half of what these return, of a number or of a vector of them. The
// lower half of the addend decides when to round up.
template <class Bits, class Float>
PK_HD inline Bits bf16_bits(Float x, Bits addend) {
  const Bits bits = bit_cast<Bits>(x);
  const Bits quiet = bits | 0x400000u;  // NaN stays one
  return x != x ? quiet : bits + addend;
}
// To nearest even by integer addition: the instructions made for it flush subnormals. A tie goes up
// where the last bit that stays is 1; copied to the lower end, it makes the tie more than one. Not
// for a NaN, unless its lower half is 0: then it stays as it is.
template <class Bits>
PK_HD inline Bits bf16_nearest(Bits bits) {
  return (bits | ((bits >> 16) & 1u)) + 0x7fffu;
}
template <class Bits, class Float>
PK_HD inline Bits bf16_bits(Float x) {
  const Bits bits = bit_cast<Bits>(x);
  return x != x ? bits | 0x400000u : bf16_nearest(bits);
}

template <>
PK_HD inline bf16 narrow<bf16>(float x) {
  return {std::uint16_t(bf16_bits<std::uint32_t>(x) >> 16)};
}

template <>
PK_HD inline f16 narrow<f16>(float x) {
#if defined(__CUDA_ARCH__)
  f16 half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x));
  return half;
#else
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint16_t sign = std::uint16_t((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {std::uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};  // quiet NaN
  }
  if (magnitude >= 0x477ff000u) return {std::uint16_t(sign | 0x7c00u)};  // rounds to infinity
  if (magnitude < 0x38800000u) {
    // Subnormal in float16: adding 0.5 puts the rounding point at bit 0 of the sum.
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return {std::uint16_t(sign | (bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23);
  return {std::uint16_t(sign | (rounded >> 13))};
#endif
}

// A double sum of 16-bit numbers passes through float: the rule of the collectives is
// "the fp32 sum, rounded to nearest even".
template <>
PK_HD inline bf16 narrow<bf16>(double x) {
  return narrow<bf16>(float(x));
}
template <>
PK_HD inline f16 narrow<f16>(double x) {
  return narrow<f16>(float(x));
}

}  // namespace
}  // namespace pk
