// The optimizer's loops, compiled once for each instruction set like kernels_inl.h.
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
    sum = r == 0 ? L::mul(c, x) : L::fma(c, x, sum);
  }
  return sum;
}

template <class P, class G, class A>
struct Stream {  // the pointers of a stretch, typed
  const P* param;
  A* master;
  A* exp_avg;
  A* exp_avg_sq;
  A* max_exp_avg_sq;
};

template <class P, class G, class A, bool amsgrad>
[[gnu::always_inline]] inline void adam_vectors_at(const AdamJob& job,
                                                   const AdamFactors<Lanes<A, A>>& factors,
                                                   const Stream<P, G, A>& s, P* const* out,
                                                   std::size_t at, std::size_t vectors) {
  using L = Lanes<A, A>;
  using LP = Lanes<P, A>;
  constexpr std::size_t kMost = 4;
  typename L::Vector grad[kMost];
  for (std::size_t v = 0; v < vectors; ++v) {
    grad[v] = gradient<Lanes<G, A>, G, A>(job.grad, at + v * L::lanes);
  }
  typename LP::Packed packed[kMost];
  for (std::size_t v = 0; v < vectors; ++v) {
    const std::size_t i = at + v * L::lanes;
    AdamElement<L> e{s.master ? L::load(s.master + i) : LP::load(s.param + i),
                     L::load(s.exp_avg + i),
                     L::load(s.exp_avg_sq + i),
                     {}};
    if (amsgrad) e.max_exp_avg_sq = L::load(s.max_exp_avg_sq + i);
    adam_update<L, amsgrad>(factors, grad[v], e);
    L::store(s.exp_avg + i, L::pack(e.exp_avg));
    L::store(s.exp_avg_sq + i, L::pack(e.exp_avg_sq));
    if (amsgrad) L::store(s.max_exp_avg_sq + i, L::pack(e.max_exp_avg_sq));
    if (s.master) L::store(s.master + i, L::pack(e.param));
    packed[v] = LP::pack(e.param);
  }
  for (int o = 0; o < job.outputs; ++o) {
    for (std::size_t v = 0; v < vectors; ++v) {
      LP::store(out[o] + at + v * L::lanes, packed[v]);
    }
  }
}

// Moments stored as they are computed.
template <class P, class G, class A, bool amsgrad>
void adam_full(const AdamJob& job) {
  using L = Lanes<A, A>;
  const auto factors = AdamFactors<L>::of(job.step, A(0));
  const Stream<P, G, A> s{static_cast<const P*>(job.param), reinterpret_cast<A*>(job.master),
                          static_cast<A*>(job.moments.exp_avg),
                          static_cast<A*>(job.moments.exp_avg_sq),
                          static_cast<A*>(job.moments.max_exp_avg_sq)};
  const auto out = reinterpret_cast<P* const*>(job.out);
  std::size_t at = 0;
  for (; at + 4 * L::lanes <= job.count; at += 4 * L::lanes) {
    adam_vectors_at<P, G, A, amsgrad>(job, factors, s, out, at, 4);
  }
  for (; at + L::lanes <= job.count; at += L::lanes) {
    adam_vectors_at<P, G, A, amsgrad>(job, factors, s, out, at, 1);
  }
  // The tail goes through padded vectors: the same instructions, hence the same bits.
  const std::size_t rest = job.count - at;
  if (rest == 0) return;
  const auto fetch = [&](auto* to, const auto* from) { std::memcpy(to, from, rest * sizeof *to); };
  A grad[L::lanes] = {}, master[L::lanes] = {}, exp_avg[L::lanes] = {}, exp_avg_sq[L::lanes] = {},
    max_exp_avg_sq[L::lanes] = {};
  P param[L::lanes] = {};
  const auto in = reinterpret_cast<const G* const*>(job.grad.in);
  for (int r = 0; r < job.grad.inputs; ++r) {
    G lanes[L::lanes] = {};
    fetch(lanes, in[r] + at);
    using LG = Lanes<G, A>;
    const auto c = LG::set(A(job.grad.coefficient[r]));
    L::store(grad,
             r == 0 ? LG::mul(c, LG::load(lanes)) : LG::fma(c, LG::load(lanes), L::load(grad)));
  }
  const void* grads[] = {grad};
  const double one = 1.0;
  AdamJob last = job;
  last.grad = {sizeof(A) == 8 ? Dtype::f64 : Dtype::f32, false, 1, grads, &one};
  if (s.master) {
    fetch(master, s.master + at);
  } else {
    fetch(param, s.param + at);
  }
  fetch(exp_avg, s.exp_avg + at);
  fetch(exp_avg_sq, s.exp_avg_sq + at);
  if (amsgrad) fetch(max_exp_avg_sq, s.max_exp_avg_sq + at);
  P* const own[] = {param};
  last.outputs = 1;
  adam_vectors_at<P, A, A, amsgrad>(
      last, factors, {param, s.master ? master : nullptr, exp_avg, exp_avg_sq, max_exp_avg_sq}, own,
      0, 1);
  fetch(s.exp_avg + at, exp_avg);
  fetch(s.exp_avg_sq + at, exp_avg_sq);
  if (amsgrad) fetch(s.max_exp_avg_sq + at, max_exp_avg_sq);
  if (s.master) fetch(s.master + at, master);
  for (int o = 0; o < job.outputs; ++o) fetch(out[o] + at, param);
}

// --- moments in fewer bits ---------------------------------------------------------------------

enum Draw : std::uint32_t { kDrawMoments = 0, kDrawMax = 1, kDrawParam = 2 };

inline float largest(const float* x, std::size_t n) {
  float most = 0.0f;
  for (std::size_t i = 0; i < n; ++i) {
    const float size = x[i] < 0.0f ? -x[i] : x[i];
    most = size > most ? size : most;
  }
  return most;
}

// One kind of moment of one block between its storage and floats. `second`: of squares, >= 0.
inline void decode(Moments kind, bool second, const void* stored, const float* scales,
                   std::size_t block, std::size_t at, std::size_t n, float* x) {
  if (kind == Moments::full) {
    std::memcpy(x, static_cast<const float*>(stored) + at, n * sizeof(float));
  } else if (kind == Moments::bf16) {
    const auto from = static_cast<const bf16*>(stored) + at;
    for (std::size_t i = 0; i < n; ++i) x[i] = widen(from[i]);
  } else if (second) {
    const auto from = static_cast<const std::uint8_t*>(stored) + at;
    for (std::size_t i = 0; i < n; ++i) x[i] = decode_exp_avg_sq(from[i], scales[block]);
  } else {
    const auto from = static_cast<const std::int8_t*>(stored) + at;
    for (std::size_t i = 0; i < n; ++i) x[i] = decode_exp_avg(from[i], scales[block]);
  }
}

// `shift` chooses which 16 of an element's random bits this moment uses.
inline void encode(Moments kind, bool second, void* stored, float* scales, std::size_t block,
                   std::size_t at, std::size_t n, const float* x, std::uint32_t key, int shift) {
  if (kind == Moments::full) {
    std::memcpy(static_cast<float*>(stored) + at, x, n * sizeof(float));
    return;
  }
  std::uint32_t random[kMomentBlock];
  for (std::size_t i = 0; i < n; ++i) {
    random[i] = (random_bits(key, std::uint32_t(i)) >> shift) & 0xffffu;
  }
  if (kind == Moments::bf16) {
    const auto to = static_cast<bf16*>(stored) + at;
    for (std::size_t i = 0; i < n; ++i) to[i] = narrow_stochastic(x[i], random[i]);
    return;
  }
  const float scale = scales[block] = largest(x, n);
  if (second) {
    const auto to = static_cast<std::uint8_t*>(stored) + at;
    for (std::size_t i = 0; i < n; ++i) {
      to[i] = encode_exp_avg_sq(x[i], scale, unit_float(random[i]));
    }
  } else {
    const auto to = static_cast<std::int8_t*>(stored) + at;
    for (std::size_t i = 0; i < n; ++i) {
      to[i] = encode_exp_avg(x[i], scale, unit_float(random[i]));
    }
  }
}

// Block by block through floats in the first-level cache, each block as adam_full does it.
template <class P, class G, bool amsgrad>
void adam_blocks(const AdamJob& job) {
  float grad[kMomentBlock], param[kMomentBlock], exp_avg[kMomentBlock], exp_avg_sq[kMomentBlock],
      max_exp_avg_sq[kMomentBlock];
  P rounded[kMomentBlock];
  const MomentStorage& m = job.moments;
  for (std::size_t at = 0, block = 0; at < job.count; at += kMomentBlock, ++block) {
    const std::size_t left = job.count - at, n = left < kMomentBlock ? left : kMomentBlock;
    const auto key = [&](Draw purpose) {
      return block_key(job.steps, job.parameter, job.block + block, purpose);
    };
    decode(m.kind, false, m.exp_avg, m.exp_avg_scale, block, at, n, exp_avg);
    decode(m.kind, true, m.exp_avg_sq, m.exp_avg_sq_scale, block, at, n, exp_avg_sq);
    if (amsgrad) {
      decode(m.kind, true, m.max_exp_avg_sq, m.max_exp_avg_sq_scale, block, at, n, max_exp_avg_sq);
    }
    const void* in[kMaxInputs];
    for (int r = 0; r < job.grad.inputs; ++r) in[r] = static_cast<const G*>(job.grad.in[r]) + at;
    void* out[kMaxInputs];
    for (int o = 0; o < job.outputs; ++o) out[o] = static_cast<P*>(job.out[o]) + at;

    AdamJob one = job;
    one.grad.in = in;
    one.out = out;
    one.count = n;
    one.moments = {Moments::full, exp_avg, exp_avg_sq, max_exp_avg_sq, nullptr, nullptr, nullptr};
    one.master = job.master ? job.master + at : nullptr;
    one.param = static_cast<const P*>(job.param) + at;
    void* const own[] = {rounded};
    if (job.stochastic) {  // a block of masters that live for this step alone
      for (std::size_t i = 0; i < n; ++i) param[i] = widen(static_cast<const P*>(one.param)[i]);
      one.master = param;
      one.out = own;
      one.outputs = 1;
    }
    const double unit = 1.0;
    const void* const summed[] = {grad};
    if (job.grad.wide) {
      for (std::size_t i = 0; i < n; ++i) {
        grad[i] = float(gradient<Scalar<G, double>, G, double>(one.grad, i));
      }
      one.grad = {Dtype::f32, false, 1, summed, &unit};
      adam_full<P, float, float, amsgrad>(one);
    } else {
      adam_full<P, G, float, amsgrad>(one);
    }
    if constexpr (sizeof(P) == 2) {
      if (job.stochastic) {
        const std::uint32_t draw = key(kDrawParam);
        for (std::size_t i = 0; i < n; ++i) {
          const std::uint32_t random = random_bits(draw, std::uint32_t(i)) & 0xffffu;
          rounded[i].bits = narrow_stochastic(param[i], random).bits;
        }
        for (int o = 0; o < job.outputs; ++o) std::memcpy(out[o], rounded, n * sizeof(P));
      }
    }
    const std::uint32_t draw = key(kDrawMoments);
    encode(m.kind, false, m.exp_avg, m.exp_avg_scale, block, at, n, exp_avg, draw, 0);
    encode(m.kind, true, m.exp_avg_sq, m.exp_avg_sq_scale, block, at, n, exp_avg_sq, draw, 16);
    if (amsgrad) {
      encode(m.kind, true, m.max_exp_avg_sq, m.max_exp_avg_sq_scale, block, at, n, max_exp_avg_sq,
             key(kDrawMax), 0);
    }
  }
}

template <class P, class G>
void adam_typed(const AdamJob& job) {
  const bool amsgrad = job.moments.max_exp_avg_sq != nullptr;
  if (job.moments.kind != Moments::full || job.stochastic || job.grad.wide) {
    return amsgrad ? adam_blocks<P, G, true>(job) : adam_blocks<P, G, false>(job);
  }
  return amsgrad ? adam_full<P, G, float, true>(job) : adam_full<P, G, float, false>(job);
}

void adam(const AdamJob& job) {
  const bool same = job.grad.dtype == job.dtype;
  switch (job.dtype) {
    case Dtype::f64:
      return job.moments.max_exp_avg_sq ? adam_full<double, double, double, true>(job)
                                        : adam_full<double, double, double, false>(job);
    case Dtype::f32:
      return adam_typed<float, float>(job);
    case Dtype::bf16:
      return same ? adam_typed<bf16, bf16>(job) : adam_typed<bf16, float>(job);
    case Dtype::f16:
      return same ? adam_typed<f16, f16>(job) : adam_typed<f16, float>(job);
  }
}

// --- the norm ----------------------------------------------------------------------------------

// In sixteen sums, whatever the width of a vector, so that every instruction set adds alike. The
// square of a float is exact in double.
template <class L, class G, class A>
double squares(const GradientSum& grad, std::size_t count) {
  constexpr std::size_t kSums = 16;
  double sums[kSums] = {};
  A values[kSums];
  const auto add = [&] {
    for (std::size_t j = 0; j < kSums; ++j) sums[j] += double(values[j]) * double(values[j]);
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
  for (const double sum : sums) total += sum;
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
