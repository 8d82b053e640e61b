// Vectors of numbers for the instruction set this file is compiled for, in the compiler's own
// vector types: `+ - * /`, comparisons and `?:` work on all lanes as on one number. `Lanes<T, A>`:
// T as stored, A as added; load widens exactly to A, pack rounds once, store writes. The same fma
// chain on every path; the compiler may not contract (-ffp-contract=off).
#pragma once

#include "../scalar.h"

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

template <class T, std::size_t n>
struct VectorType {
  typedef T type __attribute__((vector_size(sizeof(T) * n)));
};
template <class T, std::size_t n>
using VectorOf = typename VectorType<T, n>::type;

// At any address.
template <class V>
inline V load_vector(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

#if defined(__AVX512F__) || defined(__AVX2__)

// What the compiler's vector types lack.
#if defined(__AVX512F__)
inline constexpr std::size_t kVectorBytes = 64;
inline __m512 fused(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512d fused(__m512d a, __m512d b, __m512d c) { return _mm512_fmadd_pd(a, b, c); }
inline __m512 root(__m512 a) { return _mm512_sqrt_ps(a); }
inline __m512d root(__m512d a) { return _mm512_sqrt_pd(a); }
using Integers = __m512i;
using Words = __m256i;  // 16 bits each
inline __m512 from_half(Words words) { return _mm512_cvtph_ps(words); }
inline Words to_half(__m512 v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline Integers widen_words(Words words) { return _mm512_cvtepu16_epi32(words); }
inline Words upper_words(Integers v) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)); }
#else
inline constexpr std::size_t kVectorBytes = 32;
inline __m256 fused(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256d fused(__m256d a, __m256d b, __m256d c) { return _mm256_fmadd_pd(a, b, c); }
inline __m256 root(__m256 a) { return _mm256_sqrt_ps(a); }
inline __m256d root(__m256d a) { return _mm256_sqrt_pd(a); }
using Integers = __m256i;
using Words = __m128i;
inline __m256 from_half(Words words) { return _mm256_cvtph_ps(words); }
inline Words to_half(__m256 v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline Integers widen_words(Words words) { return _mm256_cvtepu16_epi32(words); }
inline Words upper_words(Integers v) {
  const __m256i high = _mm256_srli_epi32(v, 16);
  const __m256i packed = _mm256_packus_epi32(high, high);  // within each 128-bit half
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
#endif

// Past the caches, to a multiple of the vector's size: what is to be overwritten is not read first.
// `end_stream` comes before anybody is told of it.
template <class V>
inline void stream_vector(void* to, V v) {
  if constexpr (sizeof v == 16) {
    _mm_stream_si128(static_cast<__m128i*>(to), bit_cast<__m128i>(v));
  } else if constexpr (sizeof v == 32) {
    _mm256_stream_si256(static_cast<__m256i*>(to), bit_cast<__m256i>(v));
  } else {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(to), bit_cast<__m512i>(v));
#else
    static_assert(sizeof v < 64, "AVX2 has no such store");
#endif
  }
}
inline void end_stream() { _mm_sfence(); }

template <class A>
struct Arithmetic {
  static constexpr std::size_t lanes = kVectorBytes / sizeof(A);
  using Vector = VectorOf<A, lanes>;
  using Bits = VectorOf<std::uint32_t, lanes>;
  using Ints = VectorOf<std::int32_t, lanes>;
  static Vector set(A x) { return x - Vector{}; }  // -0 stays -0
  static Vector fma(Vector a, Vector b, Vector c) { return fused(a, b, c); }
  static Vector sqrt(Vector a) { return root(a); }
  static Vector to_float(Ints i) { return __builtin_convertvector(i, Vector); }
  static Ints truncate(Vector v) { return __builtin_convertvector(v, Ints); }
  static Bits places() {  // 0, 1, 2, ...
    Bits at;
    for (std::size_t i = 0; i < lanes; ++i) at[i] = std::uint32_t(i);
    return at;
  }
  template <class Code>
  static Ints load_ints(const Code* p) {
    return __builtin_convertvector((load_vector<VectorOf<Code, lanes>>(p)), Ints);
  }
  template <class Code>
  static void store_ints(Code* p, Ints v) {
    const auto codes = __builtin_convertvector(v, VectorOf<Code, lanes>);
    std::memcpy(p, &codes, sizeof codes);
  }
};

template <class T, class A>
struct Lanes;

template <class A>
struct Lanes<A, A> : Arithmetic<A> {
  using typename Arithmetic<A>::Vector;
  using Packed = Vector;
  static Vector load(const A* p) { return load_vector<Vector>(p); }
  static Packed pack(Vector v) { return v; }
  static void store(A* p, Packed v) { std::memcpy(p, &v, sizeof v); }
};

template <>
struct Lanes<bf16, float> : Arithmetic<float> {
  using Packed = Words;
  static Vector load(const bf16* p) {
    return bit_cast<Vector>(Bits(widen_words(load_vector<Words>(p))) << 16);
  }
  static Packed pack(Vector v) { return upper(bf16_bits<Bits>(v)); }
  static Packed upper(Bits bits) { return upper_words(Integers(bits)); }
  static void store(bf16* p, Packed v) { std::memcpy(p, &v, sizeof v); }
};

template <>
struct Lanes<f16, float> : Arithmetic<float> {
  using Packed = Words;
  static Vector load(const f16* p) { return from_half(load_vector<Packed>(p)); }
  static Packed pack(Vector v) { return to_half(v); }
  static void store(f16* p, Packed v) { std::memcpy(p, &v, sizeof v); }
};

#else

inline constexpr std::size_t kVectorBytes = 16;

template <class T, class A>
using Lanes = Scalar<T, A>;

template <class V>
inline void stream_vector(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}
inline void end_stream() {}

#endif

// --- two vectors at a time, with the interface of one -------------------------------------------

template <class A>
struct TwoVectors {
  using Half = Lanes<A, A>;
  static constexpr std::size_t lanes = 2 * Half::lanes;
  struct Vector {
    typename Half::Vector half[2];
    Vector operator*(Vector b) const { return {half[0] * b.half[0], half[1] * b.half[1]}; }
  };
  static Vector set(A x) { return {Half::set(x), Half::set(x)}; }
  static Vector fma(Vector a, Vector b, Vector c) {
    return {Half::fma(a.half[0], b.half[0], c.half[0]), Half::fma(a.half[1], b.half[1], c.half[1])};
  }
};

template <class T, class A>
struct InOrder : TwoVectors<A> {
  using L = Lanes<T, A>;
  using typename TwoVectors<A>::Vector;
  struct Packed {
    typename L::Packed half[2];
  };
  static Vector load(const T* p) { return {L::load(p), L::load(p + L::lanes)}; }
  static Packed pack(Vector v) { return {L::pack(v.half[0]), L::pack(v.half[1])}; }
  static Packed upper(typename L::Bits first, typename L::Bits second) {
    return {L::upper(first), L::upper(second)};
  }
  static void store(T* p, Packed v) {
    L::store(p, v.half[0]);
    L::store(p + L::lanes, v.half[1]);
  }
  static void stream(T* p, Packed v) {
    stream_vector(p, v.half[0]);
    stream_vector(p + L::lanes, v.half[1]);
  }
  static typename L::Bits places(int half) { return L::places() + std::uint32_t(half * L::lanes); }
};

#if defined(__AVX2__)
// The elements at even and those at odd places: bfloat16 widens and narrows so without the shuffles
// that it costs in order.
struct EvenOdd : TwoVectors<float> {
  using L = Lanes<bf16, float>;
  using Packed = L::Bits;
  static Vector load(const bf16* p) {
    const Packed words = load_vector<Packed>(p);
    return {bit_cast<Half::Vector>(words << 16), bit_cast<Half::Vector>(words & 0xffff0000u)};
  }
  // Of sums of bfloat16: a NaN among them is quiet and its lower half is 0, for it comes from a
  // bfloat16 or from the processor, so that rounding need not look for any.
  static Packed pack(Vector v) {
    return upper(bf16_nearest(bit_cast<Packed>(v.half[0])),
                 bf16_nearest(bit_cast<Packed>(v.half[1])));
  }
  static Packed upper(Packed even, Packed odd) { return (even >> 16) | (odd & 0xffff0000u); }
  static void store(bf16* p, Packed v) { std::memcpy(p, &v, sizeof v); }
  static void stream(bf16* p, Packed v) { stream_vector(p, v); }
  static Packed places(int half) { return L::places() * 2 + std::uint32_t(half); }
};
#else
using EvenOdd = InOrder<bf16, float>;
#endif

}  // namespace
}  // namespace pk
