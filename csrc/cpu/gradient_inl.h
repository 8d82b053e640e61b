// The mean gradient of a stretch, and the sum of its squares; compiled like kernels_inl.h.
#pragma once

#include "adam_job.h"
#include "simd.h"

namespace pk {
namespace {

template <class L, class G, class A>
[[gnu::always_inline]] inline typename L::Vector gradient(const GradientSum& grad, std::size_t at) {
  const auto in = reinterpret_cast<const G* const*>(grad.in);
  typename L::Vector sum = L::set(A(0));
  for (int r = 0; r < grad.inputs; ++r) {
    const typename L::Vector c = L::set(A(grad.coefficient[r])), x = L::load(in[r] + at);
    sum = r == 0 ? c * x : L::fma(c, x, sum);
  }
  return sum;
}

// In sixteen sums, whatever the lanes of L, so that every instruction set adds alike. The square of
// a float is exact in double.
template <class L, class G, class A>
double squares(const GradientSum& grad, std::size_t count) {
  constexpr std::size_t kSums = 16;
  VectorOf<double, kSums> sums{};
  A values[kSums];
  const auto add = [&] {
    VectorOf<A, kSums> vector;
    std::memcpy(&vector, values, sizeof vector);
    const auto wide = __builtin_convertvector(vector, VectorOf<double, kSums>);
    sums += wide * wide;
  };
  std::size_t at = 0;
  for (; at + kSums <= count; at += kSums) {
    for (std::size_t j = 0; j < kSums; j += L::lanes) {
      const typename L::Vector sum = gradient<L, G, A>(grad, at + j);
      std::memcpy(values + j, &sum, sizeof sum);
    }
    add();
  }
  for (std::size_t j = 0; j < kSums; ++j) {
    values[j] = at + j < count ? gradient<Scalar<G, A>, G, A>(grad, at + j) : A(0);
  }
  add();
  double total = 0.0;
  for (std::size_t j = 0; j < kSums; ++j) total += sums[j];
  return total;
}

double sum_of_squares(const GradientSum& grad, std::size_t count) {
  switch (grad.dtype) {
    case Dtype::f64:
      return squares<Lanes<double, double>, double, double>(grad, count);
    case Dtype::f32:
      return grad.wide ? squares<Scalar<float, double>, float, double>(grad, count)
                       : squares<Lanes<float, float>, float, float>(grad, count);
    case Dtype::bf16:
      return grad.wide ? squares<Scalar<bf16, double>, bf16, double>(grad, count)
                       : squares<Lanes<bf16, float>, bf16, float>(grad, count);
    case Dtype::f16:
      return grad.wide ? squares<Scalar<f16, double>, f16, double>(grad, count)
                       : squares<Lanes<f16, float>, f16, float>(grad, count);
  }
  return 0.0;
}

}  // namespace
}  // namespace pk
