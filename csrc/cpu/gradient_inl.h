// What gradients go through before a step: their way into a bucket, the mean of a stretch, and the
// sum of its squares; compiled like kernels_inl.h.
#pragma once

#include "adam_job.h"
#include "simd.h"

namespace pk {
namespace {

// sum[v] = coefficient[0]*in[0] + coefficient[1]*in[1] ..., in that order by fma, of `vectors`
// vectors from element `at` on.
template <class L, class A, class T>
[[gnu::always_inline]] inline void sum_vectors(const T* const* in, const double* coefficient,
                                               int inputs, std::size_t at, std::size_t vectors,
                                               typename L::Vector* sum) {
  const auto load = [&](int r, std::size_t v) { return L::load(in[r] + at + v * L::lanes); };
  if (inputs == 0) {
    for (std::size_t v = 0; v < vectors; ++v) sum[v] = L::set(A(0));
    return;
  }
  const typename L::Vector first = L::set(A(coefficient[0]));
  for (std::size_t v = 0; v < vectors; ++v) sum[v] = first * load(0, v);
  for (int r = 1; r < inputs; ++r) {
    const typename L::Vector c = L::set(A(coefficient[r]));
    for (std::size_t v = 0; v < vectors; ++v) sum[v] = L::fma(c, load(r, v), sum[v]);
  }
}

template <class L, class G, class A>
[[gnu::always_inline]] inline void mean_gradient(const GradientSum& grad, std::size_t at,
                                                 std::size_t vectors, typename L::Vector* sum) {
  const auto in = reinterpret_cast<const G* const*>(grad.in);
  sum_vectors<L, A>(in, grad.coefficient, grad.inputs, at, vectors, sum);
}

// Ask for what comes 1 KiB after `count` elements: the processor itself follows few streams, and
// not into their next page.
template <class T>
[[gnu::always_inline]] inline void prefetch_after(const T* from, std::size_t count) {
  const auto first = reinterpret_cast<const std::byte*>(from) + 1024;
  for (std::size_t b = 0; b < count * sizeof(T); b += 64) __builtin_prefetch(first + b);
}

template <class G>
[[gnu::always_inline]] inline void prefetch_gradients(const GradientSum& grad, std::size_t at,
                                                      std::size_t count) {
  for (int r = 0; r < grad.inputs; ++r) {
    prefetch_after(static_cast<const G*>(grad.in[r]) + at, count);
  }
}

// In sixteen sums, whatever the lanes of L, so that every instruction set adds alike. The square of
// a float is exact in double.
template <class L, class G, class A>
double squares(const GradientSum& grad, std::size_t count) {
  constexpr std::size_t kSums = 16;
  VectorOf<double, kSums> sums{};
  const auto add = [&](const A* values) {
    VectorOf<A, kSums> vector;
    std::memcpy(&vector, values, sizeof vector);
    const auto wide = __builtin_convertvector(vector, VectorOf<double, kSums>);
    sums += wide * wide;
  };
  constexpr std::size_t kStep = 4 * kSums;
  A values[kStep];
  std::size_t at = 0;
  for (; at + kStep <= count; at += kStep) {
    prefetch_gradients<G>(grad, at, kStep);
    typename L::Vector sum[kStep / L::lanes];
    mean_gradient<L, G, A>(grad, at, kStep / L::lanes, sum);
    std::memcpy(values, sum, sizeof sum);
    for (std::size_t j = 0; j < kStep; j += kSums) add(values + j);
  }
  if (at < count) {
    for (std::size_t j = 0; j < kStep; ++j) {
      values[j] = A(0);
      if (at + j < count) mean_gradient<Scalar<G, A>, G, A>(grad, at + j, 1, values + j);
    }
    for (std::size_t j = 0; j < kStep; j += kSums) add(values + j);
  }
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

// Without their sign, the bits of floating-point numbers order as the numbers do, infinity above
// those and NaN above infinity. As integers the compiler makes vectors of them.
template <class T, class Bits>
double copy_of(const void* from, void* to, std::size_t count, bool stream) {
  const auto in = static_cast<const std::byte*>(from);
  const auto out = static_cast<std::byte*>(to);
  constexpr Bits kMagnitude = Bits(~(Bits(1) << (8 * sizeof(Bits) - 1)));
  std::size_t at = 0;
  Bits most = 0;
  if (stream) {
    constexpr std::size_t kLanes = kVectorBytes / sizeof(Bits);
    VectorOf<Bits, kLanes> largest{};
    for (; at + kLanes <= count; at += kLanes) {
      const auto bits = load_vector<VectorOf<Bits, kLanes>>(in + at * sizeof(Bits));
      stream_vector(out + at * sizeof(Bits), bits);
      const auto size = bits & kMagnitude;
      largest = size > largest ? size : largest;
    }
    end_stream();
    for (std::size_t lane = 0; lane < kLanes; ++lane) most = std::max<Bits>(most, largest[lane]);
  }
  for (; at < count; ++at) {
    Bits bits;
    std::memcpy(&bits, in + at * sizeof bits, sizeof bits);
    std::memcpy(out + at * sizeof bits, &bits, sizeof bits);
    const Bits size = Bits(bits & kMagnitude);
    most = size > most ? size : most;
  }
  const double largest = widen(bit_cast<T>(most));
  return largest == largest ? largest : HUGE_VAL;
}

double copy(Dtype dtype, const void* from, void* to, std::size_t count, bool stream) {
  stream = stream && reinterpret_cast<std::uintptr_t>(to) % kVectorBytes == 0;
  switch (dtype) {
    case Dtype::f64:
      return copy_of<double, std::uint64_t>(from, to, count, stream);
    case Dtype::f32:
      return copy_of<float, std::uint32_t>(from, to, count, stream);
    case Dtype::bf16:
      return copy_of<bf16, std::uint16_t>(from, to, count, stream);
    case Dtype::f16:
      return copy_of<f16, std::uint16_t>(from, to, count, stream);
  }
  return HUGE_VAL;
}

}  // namespace
}  // namespace pk
