// The bodies of the kernel table, compiled once for each instruction set with its own flags.
// Everything here has internal linkage, so that no path can borrow another's instructions.
#pragma once

#include "gradient_inl.h"
#include "kernels.h"

namespace pk {
namespace {

template <class L, class T, class A>
[[gnu::always_inline]] inline void sum_block(const WeightedSum& job, const T* const* in,
                                             T* const* out, std::size_t at, std::size_t vectors) {
  constexpr std::size_t kMost = 4;
  typename L::Vector sum[kMost];
  sum_vectors<L, A>(in, job.coefficient, job.inputs, at, vectors, sum);
  typename L::Packed packed[kMost];
  for (std::size_t v = 0; v < vectors; ++v) packed[v] = L::pack(sum[v]);
  for (int o = 0; o < job.outputs; ++o) {
    for (std::size_t v = 0; v < vectors; ++v) L::store(out[o] + at + v * L::lanes, packed[v]);
  }
}

template <class L, class T, class A>
void sum_elements(const WeightedSum& job) {
  const auto in = reinterpret_cast<const T* const*>(job.in);
  const auto out = reinterpret_cast<T* const*>(job.out);
  if (job.inputs == 0) {
    for (int o = 0; o < job.outputs; ++o) std::memset(job.out[o], 0, job.count * sizeof(T));
    return;
  }
  std::size_t at = 0;
  for (; at + 4 * L::lanes <= job.count; at += 4 * L::lanes) {
    sum_block<L, T, A>(job, in, out, at, 4);
  }
  for (; at + L::lanes <= job.count; at += L::lanes) sum_block<L, T, A>(job, in, out, at, 1);
  // The tail goes through a padded vector: the same instructions, hence the same bits.
  if (const std::size_t rest = job.count - at; rest > 0) {
    T lanes[L::lanes] = {};
    typename L::Vector sum = L::set(A(0));
    for (int r = 0; r < job.inputs; ++r) {
      std::memcpy(lanes, in[r] + at, rest * sizeof(T));
      const typename L::Vector c = L::set(A(job.coefficient[r]));
      sum = r == 0 ? c * L::load(lanes) : L::fma(c, L::load(lanes), sum);
    }
    L::store(lanes, L::pack(sum));
    for (int o = 0; o < job.outputs; ++o) std::memcpy(out[o] + at, lanes, rest * sizeof(T));
  }
}

void weighted_sum(const WeightedSum& job) {
  switch (job.dtype) {
    case Dtype::f64:
      return sum_elements<Lanes<double, double>, double, double>(job);
    case Dtype::f32:
      return job.wide ? sum_elements<Scalar<float, double>, float, double>(job)
                      : sum_elements<Lanes<float, float>, float, float>(job);
    case Dtype::bf16:
      return job.wide ? sum_elements<Scalar<bf16, double>, bf16, double>(job)
                      : sum_elements<EvenOdd, bf16, float>(job);
    case Dtype::f16:
      return job.wide ? sum_elements<Scalar<f16, double>, f16, double>(job)
                      : sum_elements<Lanes<f16, float>, f16, float>(job);
  }
}

}  // namespace
}  // namespace pk
