// One load that the NVLink switch adds up over all ranks, and one store that it brings to all of
// them (multimem instructions, sm_90 and newer). Only where a step asks for it: the switch adds in
// an order of its own, and no rank's values can be left out or weighted on the way. Compiled and
// reviewed, but never run so far.
#pragma once

#include "vectors.h"

namespace pk {
namespace {  // internal linkage, see dtypes.h

// Four elements at a multicast address, as floats; false where the architecture has no such load.
template <class T>
PK_HD inline bool load_from_all(const std::byte*, T (&)[4]) {
  return false;
}
template <class T>
PK_HD inline bool store_to_all(std::byte*, const T (&)[4]) {
  return false;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <>
__device__ inline bool load_from_all(const std::byte* at, float (&x)[4]) {
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(at)
               : "memory");
  return true;
}
template <>
__device__ inline bool store_to_all(std::byte* at, const float (&x)[4]) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
  return true;
}

// Added in float, rounded to bfloat16 by the switch.
template <>
__device__ inline bool load_from_all(const std::byte* at, bf16 (&x)[4]) {
  std::uint32_t words[2];
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v2.bf16x2 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "l"(at)
               : "memory");
  memcpy(x, words, sizeof x);
  return true;
}
template <>
__device__ inline bool store_to_all(std::byte* at, const bf16 (&x)[4]) {
  std::uint32_t words[2];
  memcpy(words, x, sizeof words);
  asm volatile("multimem.st.relaxed.sys.global.v2.bf16x2 [%0], {%1, %2};" ::"l"(at), "r"(words[0]),
               "r"(words[1])
               : "memory");
  return true;
}

#endif

}  // namespace
}  // namespace pk
