// One vector of numbers, for the instruction set this file is compiled for: load widens exactly to
// the accumulator, pack rounds once, store writes. `Lanes<T, A>`: T as stored, A as added.
// The same fma chain on every path; the compiler may not contract (-ffp-contract=off).
#pragma once

#include <cmath>

#include "../dtypes.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about its own _mm512_undefined_*() wherever an intrinsic is inlined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#endif

namespace pk {
namespace {  // internal linkage, see dtypes.h

// Portable: one lane.
template <class T, class A>
struct Scalar {
  static constexpr std::size_t lanes = 1;
  using Vector = A;
  using Packed = T;
  static Vector set(A x) { return x; }
  static Vector load(const T* p) { return A(widen(*p)); }
  static Vector mul(Vector a, Vector b) { return a * b; }
  static Vector fma(Vector a, Vector b, Vector c) { return std::fma(a, b, c); }
  static Vector div(Vector a, Vector b) { return a / b; }
  static Vector sqrt(Vector a) { return std::sqrt(a); }
  static Vector max(Vector a, Vector b) { return a > b ? a : b; }  // b where either is NaN
  static Packed pack(Vector v) { return narrow<T>(v); }
  static void store(T* p, Packed v) { *p = v; }
};

#if defined(__AVX512F__)

struct Float16Lanes {
  static constexpr std::size_t lanes = 16;
  using Vector = __m512;
  static Vector set(float x) { return _mm512_set1_ps(x); }
  static Vector mul(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  static Vector div(Vector a, Vector b) { return _mm512_div_ps(a, b); }
  static Vector sqrt(Vector a) { return _mm512_sqrt_ps(a); }
  static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }
};

template <class T, class A>
struct Lanes;

template <>
struct Lanes<float, float> : Float16Lanes {
  using Packed = __m512;
  static Vector load(const float* p) { return _mm512_loadu_ps(p); }
  static Packed pack(Vector v) { return v; }
  static void store(float* p, Packed v) { _mm512_storeu_ps(p, v); }
};

template <>
struct Lanes<double, double> {
  static constexpr std::size_t lanes = 8;
  using Vector = __m512d;
  using Packed = __m512d;
  static Vector set(double x) { return _mm512_set1_pd(x); }
  static Vector load(const double* p) { return _mm512_loadu_pd(p); }
  static Vector mul(Vector a, Vector b) { return _mm512_mul_pd(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_pd(a, b, c); }
  static Vector div(Vector a, Vector b) { return _mm512_div_pd(a, b); }
  static Vector sqrt(Vector a) { return _mm512_sqrt_pd(a); }
  static Vector max(Vector a, Vector b) { return _mm512_max_pd(a, b); }
  static Packed pack(Vector v) { return v; }
  static void store(double* p, Packed v) { _mm512_storeu_pd(p, v); }
};

template <>
struct Lanes<bf16, float> : Float16Lanes {
  using Packed = __m256i;
  static Vector load(const bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  // To nearest even by integer addition; vcvtneps2bf16 would flush subnormals.
  static Packed pack(Vector v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i carry = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, carry), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
  }
  static void store(bf16* p, Packed v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
};

template <>
struct Lanes<f16, float> : Float16Lanes {
  using Packed = __m256i;
  static Vector load(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static Packed pack(Vector v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
  static void store(f16* p, Packed v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
};

// bfloat16 two by two, for sums: the 16-bit words at even and at odd places become a vector each,
// without the shuffles that widening in order costs.
struct Bf16Pairs {
  static constexpr std::size_t lanes = 32;
  struct Vector {
    __m512 even, odd;
  };
  using Packed = __m512i;
  static Vector set(float x) { return {_mm512_set1_ps(x), _mm512_set1_ps(x)}; }
  static Vector mul(Vector a, Vector b) {
    return {_mm512_mul_ps(a.even, b.even), _mm512_mul_ps(a.odd, b.odd)};
  }
  static Vector fma(Vector a, Vector b, Vector c) {
    return {_mm512_fmadd_ps(a.even, b.even, c.even), _mm512_fmadd_ps(a.odd, b.odd, c.odd)};
  }
  static Vector load(const bf16* p) {
    const __m512i bits = _mm512_loadu_si512(p);
    const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(bits, high))};
  }
  static Packed pack(Vector v) {
    const __m512i even = _mm512_srli_epi32(rounded(v.even), 16);
    return _mm512_mask_blend_epi16(0xaaaaaaaau, even, rounded(v.odd));
  }
  static void store(bf16* p, Packed v) { _mm512_storeu_si512(p, v); }

 private:
  static __m512i rounded(__m512 v) {  // the upper half of each word is the bfloat16
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x400000));
  }
};

#elif defined(__AVX2__)

struct Float8Lanes {
  static constexpr std::size_t lanes = 8;
  using Vector = __m256;
  static Vector set(float x) { return _mm256_set1_ps(x); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  static Vector div(Vector a, Vector b) { return _mm256_div_ps(a, b); }
  static Vector sqrt(Vector a) { return _mm256_sqrt_ps(a); }
  static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }
};

template <class T, class A>
struct Lanes;

template <>
struct Lanes<float, float> : Float8Lanes {
  using Packed = __m256;
  static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  static Packed pack(Vector v) { return v; }
  static void store(float* p, Packed v) { _mm256_storeu_ps(p, v); }
};

template <>
struct Lanes<double, double> {
  static constexpr std::size_t lanes = 4;
  using Vector = __m256d;
  using Packed = __m256d;
  static Vector set(double x) { return _mm256_set1_pd(x); }
  static Vector load(const double* p) { return _mm256_loadu_pd(p); }
  static Vector mul(Vector a, Vector b) { return _mm256_mul_pd(a, b); }
  static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_pd(a, b, c); }
  static Vector div(Vector a, Vector b) { return _mm256_div_pd(a, b); }
  static Vector sqrt(Vector a) { return _mm256_sqrt_pd(a); }
  static Vector max(Vector a, Vector b) { return _mm256_max_pd(a, b); }
  static Packed pack(Vector v) { return v; }
  static void store(double* p, Packed v) { _mm256_storeu_pd(p, v); }
};

template <>
struct Lanes<bf16, float> : Float8Lanes {
  using Packed = __m128i;
  static Vector load(const bf16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Packed pack(Vector v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i carry = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, carry), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, nan);
    const __m256i packed = _mm256_packus_epi32(chosen, chosen);  // within each 128-bit half
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
  static void store(bf16* p, Packed v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }
};

template <>
struct Lanes<f16, float> : Float8Lanes {
  using Packed = __m128i;
  static Vector load(const f16* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Packed pack(Vector v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
  static void store(f16* p, Packed v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }
};

struct Bf16Pairs {
  static constexpr std::size_t lanes = 16;
  struct Vector {
    __m256 even, odd;
  };
  using Packed = __m256i;
  static Vector set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vector mul(Vector a, Vector b) {
    return {_mm256_mul_ps(a.even, b.even), _mm256_mul_ps(a.odd, b.odd)};
  }
  static Vector fma(Vector a, Vector b, Vector c) {
    return {_mm256_fmadd_ps(a.even, b.even, c.even), _mm256_fmadd_ps(a.odd, b.odd, c.odd)};
  }
  static Vector load(const bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(bits, high))};
  }
  static Packed pack(Vector v) {
    const __m256i even = _mm256_srli_epi32(rounded(v.even), 16);
    return _mm256_blend_epi16(even, rounded(v.odd), 0xaa);
  }
  static void store(bf16* p, Packed v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }

 private:
  static __m256i rounded(__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(sum, quiet, nan);
  }
};

#else

template <class T, class A>
using Lanes = Scalar<T, A>;
using Bf16Pairs = Scalar<bf16, float>;

#endif

}  // namespace
}  // namespace pk
