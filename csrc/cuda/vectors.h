// Loops of a block over memory, sixteen bytes at a time wherever everything is aligned so. Host and
// device. Peer memory changes under a running kernel, so nothing here is const __restrict__: that
// would let the compiler read it past the caches that acquire operations clear.
#pragma once

#include "../scalar.h"
#include "control.h"

#if defined(__CUDACC__)
#define PK_NOINLINE __noinline__
#define PK_INLINE __forceinline__
#define PK_PRAGMA(text) _Pragma(#text)
#define PK_UNROLL(times) PK_PRAGMA(unroll times)
#else
#define PK_NOINLINE
#define PK_INLINE inline
#define PK_UNROLL(times)
#endif

namespace pk {

inline constexpr std::uint64_t kQuadBytes = 16;

#if defined(__CUDACC__)
using Quad = uint4;
using Pair = uint2;
#else
struct alignas(kQuadBytes) [[gnu::may_alias]] Quad {
  std::uint32_t x, y, z, w;
};
struct alignas(8) [[gnu::may_alias]] Pair {
  std::uint32_t x, y;
};
#endif

namespace {  // internal linkage, see dtypes.h

// A pointer into device memory, which addresses that come out of a table do not tell by themselves.
template <class T>
PK_HD inline T* in_global(T* p) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

// Stores that stay whole: the compiler would split one of which another branch stores parts.
PK_HD inline void store_whole(Quad* to, Quad q) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w)
               : "memory");
#else
  *to = q;
#endif
}
PK_HD inline void store_whole(Pair* to, Pair p) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(p.x),
               "r"(p.y)
               : "memory");
#else
  *to = p;
#endif
}
PK_HD inline void store_whole(std::uint32_t* to, std::uint32_t word) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(word) : "memory");
#else
  *to = word;
#endif
}

PK_HD inline bool is_aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % kQuadBytes == 0;
}

// `bytes` from `from` to `to`, in units of T.
template <class T, class Block>
PK_HD inline void copy_units(const Block& block, std::byte* to, const std::byte* from,
                             std::uint64_t bytes) {
  const auto source = in_global(reinterpret_cast<const T*>(from));
  const auto target = in_global(reinterpret_cast<T*>(to));
  const std::uint64_t count = bytes / sizeof(T), stride = std::uint64_t(block.threads());
  std::uint64_t i = std::uint64_t(block.thread());
  constexpr int kTogether = 4;
  for (; i + (kTogether - 1) * stride < count; i += kTogether * stride) {
    T unit[kTogether];
    for (int j = 0; j < kTogether; ++j) unit[j] = source[i + j * stride];
    for (int j = 0; j < kTogether; ++j) target[i + j * stride] = unit[j];
  }
  for (; i < count; i += stride) target[i] = source[i];
}

// Every element is two, four or eight bytes long and lies on a multiple of that.
template <class Block>
PK_HD inline void copy(const Block& block, std::byte* to, const std::byte* from,
                       std::uint64_t bytes) {
  const std::uintptr_t places =
      reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  std::uint64_t done = 0;
  if (places % kQuadBytes == 0) {
    done = bytes / kQuadBytes * kQuadBytes;
    copy_units<Quad>(block, to, from, done);
  } else if (places % sizeof(std::uint32_t) == 0) {
    done = bytes / sizeof(std::uint32_t) * sizeof(std::uint32_t);
    copy_units<std::uint32_t>(block, to, from, done);
  }
  copy_units<std::uint16_t>(block, to + done, from + done, bytes - done);
}

}  // namespace

// One weighted sum of a block, over inputs of the ranks that a verdict names, added in that order
// with fma, rounded once.
struct SumOverRanks {
  Dtype dtype;
  std::uint64_t bytes;
  std::byte* const* in;  // of each rank, at in_offset
  std::uint64_t in_offset;
  const std::byte* own;   // or null: this rank's input, instead
  std::byte* const* out;  // of each rank, at out_offset; or null: outputs are `to`
  std::uint64_t out_offset;
  std::byte* to[2];  // where not null
};

namespace {

template <class T, class A>
struct Summing {
  using L = Scalar<T, A>;
  static constexpr int kWidth = int(kQuadBytes / sizeof(T));

  PK_HD static A step(int k, A c, A x, A sum) { return k == 0 ? c * x : L::fma(c, x, sum); }

  PK_HD static void step(int k, A c, const Quad& quad, A (&sum)[kWidth]) {
    T x[kWidth];
    memcpy(x, &quad, sizeof x);
    for (int i = 0; i < kWidth; ++i) sum[i] = step(k, c, A(widen(x[i])), sum[i]);
  }

  PK_HD static Quad pack(const A (&sum)[kWidth]) {
    T x[kWidth];
    for (int i = 0; i < kWidth; ++i) x[i] = L::pack(sum[i]);
    Quad quad;
    memcpy(&quad, x, sizeof quad);
    return quad;
  }
};

// Call visit(pointer) for each output.
template <class Visit>
PK_HD inline void each_output(const Endpoint& endpoint, const SumOverRanks& job, Visit visit) {
  if (job.out) {
    for (int step = 0; step < endpoint.size; ++step) {
      visit(job.out[endpoint.visited(step)] + job.out_offset);
    }
  } else {
    if (job.to[0]) visit(job.to[0]);
    if (job.to[1]) visit(job.to[1]);
  }
}

template <class T, class A, class Block>
PK_HD void sum_elements(const Block& block, const Endpoint& endpoint, const Verdict& verdict,
                        const SumOverRanks& job) {
  using S = Summing<T, A>;
  const auto input = [&](int k) {
    const int r = verdict.source[k];
    return job.own && r == endpoint.rank ? job.own : job.in[r] + job.in_offset;
  };
  const bool aligned = (job.in_offset | job.out_offset) % kQuadBytes == 0 && is_aligned(job.own) &&
                       is_aligned(job.to[0]) && is_aligned(job.to[1]);
  const std::uint64_t stride = std::uint64_t(block.threads()),
                      first = std::uint64_t(block.thread());
  const std::uint64_t quads = aligned ? job.bytes / kQuadBytes : 0;
  for (std::uint64_t q = first; q < quads;
       q += 2 * stride) {  // two at a time: more loads on the way
    const bool both = q + stride < quads;
    A sum[2][S::kWidth] = {};
    PK_UNROLL(2)
    for (int k = 0; k < verdict.readers; ++k) {
      const Quad* in = in_global(reinterpret_cast<const Quad*>(input(k)));
      const A c = A(verdict.coefficient[k]);
      const Quad x = in[q], y = in[both ? q + stride : q];
      S::step(k, c, x, sum[0]);
      S::step(k, c, y, sum[1]);
    }
    const Quad x = S::pack(sum[0]), y = S::pack(sum[1]);
    each_output(endpoint, job, [&](std::byte* to) {
      Quad* out = in_global(reinterpret_cast<Quad*>(to));
      out[q] = x;
      if (both) out[q + stride] = y;
    });
  }
  const std::uint64_t count = job.bytes / sizeof(T);
  for (std::uint64_t i = quads * S::kWidth + first; i < count; i += stride) {
    A sum = A(0);
    for (int k = 0; k < verdict.readers; ++k) {
      const A x = A(widen(in_global(reinterpret_cast<const T*>(input(k)))[i]));
      sum = S::step(k, A(verdict.coefficient[k]), x, sum);
    }
    const T rounded = S::L::pack(sum);
    each_output(endpoint, job,
                [&](std::byte* to) { in_global(reinterpret_cast<T*>(to))[i] = rounded; });
  }
}

template <class Block>
PK_HD PK_NOINLINE void sum_over_ranks(const Block& block, const Endpoint& endpoint,
                                      const Verdict& verdict, SumOverRanks job) {
  switch (job.dtype) {
    case Dtype::f64:
      return sum_elements<double, double>(block, endpoint, verdict, job);
    case Dtype::f32:
      return verdict.wide ? sum_elements<float, double>(block, endpoint, verdict, job)
                          : sum_elements<float, float>(block, endpoint, verdict, job);
    case Dtype::bf16:
      return verdict.wide ? sum_elements<bf16, double>(block, endpoint, verdict, job)
                          : sum_elements<bf16, float>(block, endpoint, verdict, job);
    case Dtype::f16:
      return verdict.wide ? sum_elements<f16, double>(block, endpoint, verdict, job)
                          : sum_elements<f16, float>(block, endpoint, verdict, job);
  }
}

}  // namespace
}  // namespace pk
