// The optimizer's loops, compiled once for each instruction set like kernels_inl.h.
#pragma once

#include <algorithm>
#include <type_traits>

#include "adam_job.h"
#include "gradient_inl.h"

namespace pk {
namespace {

// A stretch with its pointers typed. P: the parameter, G: gradients, A: as added, M: moments, which
// are A as computed or bf16 stochastically rounded. `stochastic`: so is the parameter, a bf16
// without a master.
template <class P, class G, class A, class M, bool stochastic>
struct Stretch {
  GradientSum grad;
  const P* param;
  A* master;  // or null
  M* exp_avg;
  M* exp_avg_sq;
  M* max_exp_avg_sq;
  P* const* out;
  int outputs;
  bool stream = false;

  static constexpr bool rounds = stochastic || !std::is_same_v<M, A>;
  // Where everything is bf16, and only there, the order of elements in registers is free.
  static constexpr bool even_odd = stochastic && std::is_same_v<G, bf16> && std::is_same_v<M, bf16>;
  template <class T>
  using Two = std::conditional_t<even_odd, EvenOdd, InOrder<T, A>>;
  using Vectors = typename TwoVectors<A>::Vector;
  static constexpr std::size_t lanes = TwoVectors<A>::lanes;
  using L = Lanes<A, A>;
  using Bits = typename L::Bits;

  template <class T>
  static typename Two<T>::Packed rounded(const Vectors& x, Bits first, Bits second) {
    if constexpr (even_odd) {  // no look for a NaN, as in EvenOdd::pack: adding leaves it one
      return Two<T>::upper(bit_cast<Bits>(x.half[0]) + first, bit_cast<Bits>(x.half[1]) + second);
    } else {
      return Two<T>::upper(bf16_bits(x.half[0], first), bf16_bits(x.half[1], second));
    }
  }

  static void keep(M* moment, const Vectors& x, Bits first, Bits second) {
    if constexpr (std::is_same_v<M, A>) {
      Two<M>::store(moment, Two<M>::pack(x));
    } else {
      Two<M>::store(moment, rounded<M>(x, first, second));
    }
  }

  // What `update` will need soon.
  [[gnu::always_inline]] void prefetch(std::size_t at, std::size_t count) const {
    const auto soon = [&](const auto* from) { prefetch_after(from + at, count * lanes); };
    prefetch_gradients<G>(grad, at, count * lanes);
    if (master) {
      soon(master);
    } else {
      soon(param);
    }
    soon(exp_avg);
    soon(exp_avg_sq);
    if (max_exp_avg_sq) soon(max_exp_avg_sq);
  }

  // `count` times two vectors of elements from `at` on, all in the block they are at `place` of.
  template <bool amsgrad>
  [[gnu::always_inline]] void update(const AdamFactors<L>& factors, std::uint32_t key,
                                     std::size_t at, std::size_t place, std::size_t count) const {
    constexpr std::size_t kMost = 2;
    Vectors sum[kMost];
    mean_gradient<Two<G>, G, A>(grad, at, count, sum);
    typename Two<P>::Packed packed[kMost];
    for (std::size_t v = 0; v < count; ++v) {
      const std::size_t i = at + v * lanes;
      Vectors p, m = Two<M>::load(exp_avg + i), s = Two<M>::load(exp_avg_sq + i), most{};
      if constexpr (even_odd) {
        p = Two<P>::load(param + i);
      } else {
        p = master ? InOrder<A, A>::load(master + i) : Two<P>::load(param + i);
      }
      if (amsgrad) most = Two<M>::load(max_exp_avg_sq + i);
      Draw<Bits> drawn[2] = {};
      for (int h = 0; h < 2; ++h) {
        AdamElement<L> e{p.half[h], m.half[h], s.half[h], most.half[h]};
        adam_update<L, amsgrad>(factors, sum[v].half[h], e);
        p.half[h] = e.param, m.half[h] = e.exp_avg;
        s.half[h] = e.exp_avg_sq, most.half[h] = e.max_exp_avg_sq;
        if constexpr (rounds) {
          drawn[h] = draw<L>(key, std::uint32_t(place + v * lanes), Two<P>::places(h));
        }
      }
      keep(exp_avg + i, m, drawn[0].exp_avg, drawn[1].exp_avg);
      keep(exp_avg_sq + i, s, drawn[0].exp_avg_sq, drawn[1].exp_avg_sq);
      if (amsgrad) {
        keep(max_exp_avg_sq + i, most, drawn[0].exp_avg_sq, drawn[1].exp_avg_sq);
      }
      if constexpr (!even_odd) {
        if (master) InOrder<A, A>::store(master + i, InOrder<A, A>::pack(p));
      }
      if constexpr (stochastic) {
        packed[v] = rounded<P>(p, drawn[0].param, drawn[1].param);
      } else {
        packed[v] = Two<P>::pack(p);
      }
    }
    for (int o = 0; o < outputs; ++o) {
      P* const to = out[o] + at;
      if (stream && (master || out[o] != param)) {
        for (std::size_t v = 0; v < count; ++v) Two<P>::stream(to + v * lanes, packed[v]);
      } else {
        for (std::size_t v = 0; v < count; ++v) Two<P>::store(to + v * lanes, packed[v]);
      }
    }
  }

  // The last elements, fewer than two vectors, through padded ones: the same instructions, hence
  // the same bits.
  template <bool amsgrad>
  void update_rest(const AdamFactors<L>& factors, std::uint32_t key, std::size_t at,
                   std::size_t count) const {
    const auto copy = [&](auto* to, const auto* from) {
      if (to && from) std::memcpy(to, from, count * sizeof *to);
    };
    const auto from = [&](auto* pointer) { return pointer ? pointer + at : nullptr; };
    A masters[lanes] = {};
    G grads[kMaxInputs][lanes];  // of `inputs` ranks
    M first[lanes] = {}, second[lanes] = {}, most[lanes] = {};
    P params[lanes] = {};
    const void* in[kMaxInputs];
    for (int r = 0; r < grad.inputs; ++r) {
      std::fill_n(grads[r], lanes, G{});
      copy(grads[r], static_cast<const G*>(grad.in[r]) + at);
      in[r] = grads[r];
    }
    copy(masters, from(master));
    if (!master) copy(params, from(param));
    copy(first, from(exp_avg));
    copy(second, from(exp_avg_sq));
    copy(most, from(max_exp_avg_sq));

    GradientSum padded = grad;
    padded.in = in;
    P* const own[] = {params};
    const Stretch rest{padded, params, master ? masters : nullptr,
                       first,  second, max_exp_avg_sq ? most : nullptr,
                       own,    1};
    rest.template update<amsgrad>(factors, key, 0, at % kMomentBlock, 1);

    copy(from(master), masters);
    copy(from(exp_avg), first);
    copy(from(exp_avg_sq), second);
    copy(from(max_exp_avg_sq), most);
    for (int o = 0; o < outputs; ++o) copy(out[o] + at, params);
  }
};

template <class P, class G, class A, class M, bool amsgrad, bool stochastic>
void update_stretch(const AdamJob& job) {
  using S = Stretch<P, G, A, M, stochastic>;
  const S stretch{job.grad,
                  static_cast<const P*>(job.param),
                  reinterpret_cast<A*>(job.master),
                  static_cast<M*>(job.moments.exp_avg),
                  static_cast<M*>(job.moments.exp_avg_sq),
                  static_cast<M*>(job.moments.max_exp_avg_sq),
                  reinterpret_cast<P* const*>(job.out),
                  job.outputs,
                  job.stream};
  const auto factors = AdamFactors<typename S::L>::of(job.step, A(0));
  for (std::size_t begin = 0, block = 0; begin < job.count; begin += kMomentBlock, ++block) {
    const std::size_t end = std::min<std::size_t>(begin + kMomentBlock, job.count);
    const std::uint32_t key =
        S::rounds ? block_key(job.steps, job.parameter, job.block + block) : 0;
    std::size_t at = begin;
    const auto update = [&](std::size_t count) {
      stretch.prefetch(at, count);
      stretch.template update<amsgrad>(factors, key, at, at - begin, count);
      at += count * S::lanes;
    };
    while (at + 2 * S::lanes <= end) update(2);
    while (at + S::lanes <= end) update(1);
    if (at < end) stretch.template update_rest<amsgrad>(factors, key, at, end - at);
  }
}

template <class P, class G, class A, class M>
void update_moments(const AdamJob& job) {
  const bool amsgrad = job.moments.max_exp_avg_sq != nullptr;
  if constexpr (std::is_same_v<P, bf16>) {
    if (job.stochastic) {
      return amsgrad ? update_stretch<P, G, A, M, true, true>(job)
                     : update_stretch<P, G, A, M, false, true>(job);
    }
  }
  return amsgrad ? update_stretch<P, G, A, M, true, false>(job)
                 : update_stretch<P, G, A, M, false, false>(job);
}

template <class P, class G>
void update_typed(const AdamJob& job) {
  return job.moments.kind == Moments::bf16 ? update_moments<P, G, float, bf16>(job)
                                           : update_moments<P, G, float, float>(job);
}

// --- moments of eight bits, and sums in double: block by block through floats in the cache ------

using BlockOfFloats = float[kMomentBlock];

template <class Code, class Decode>
void decode_block(const Code* codes, std::size_t n, BlockOfFloats& x, Decode decode) {
  using L = Lanes<float, float>;
  Code padded[kMomentBlock] = {};
  std::memcpy(padded, codes, n * sizeof(Code));
  for (std::size_t i = 0; i < kMomentBlock; i += L::lanes) {
    L::store(x + i, decode(L::load_ints(padded + i)));
  }
}

template <class Code, class Encode>
void encode_block(const BlockOfFloats& x, std::size_t n, Code* codes, Encode encode) {
  using L = Lanes<float, float>;
  Code padded[kMomentBlock];
  for (std::size_t i = 0; i < kMomentBlock; i += L::lanes) {
    L::store_ints(padded + i, encode(L::load(x + i), std::uint32_t(i)));
  }
  std::memcpy(codes, padded, n * sizeof(Code));
}

// Of the first n, and makes the rest zeros.
inline float largest(BlockOfFloats& x, std::size_t n) {
  using L = Lanes<float, float>;
  std::fill(x + n, x + kMomentBlock, 0.0f);
  L::Vector most = L::set(0.0f);
  for (std::size_t i = 0; i < kMomentBlock; i += L::lanes) {
    const L::Vector v = L::load(x + i), size = v < 0.0f ? -v : v;
    most = size > most ? size : most;
  }
  float lanes[L::lanes];
  L::store(lanes, most);
  return *std::max_element(lanes, lanes + L::lanes);
}

// The moments of one block of eight-bit codes as floats.
class DecodedBlock {
 public:
  DecodedBlock(const MomentStorage& m, std::size_t block, std::size_t n)
      : m_(m), block_(block), n_(n) {
    using L = Lanes<float, float>;
    const auto second = [&](const void* codes, const float* scales, BlockOfFloats& x) {
      decode_block(static_cast<const std::uint8_t*>(codes) + block * kMomentBlock, n, x,
                   [&](L::Ints code) { return decode_exp_avg_sq<L>(code, scales[block]); });
    };
    decode_block(static_cast<const std::int8_t*>(m.exp_avg) + block * kMomentBlock, n, exp_avg_,
                 [&](L::Ints code) { return decode_exp_avg<L>(code, m.exp_avg_scale[block]); });
    second(m.exp_avg_sq, m.exp_avg_sq_scale, exp_avg_sq_);
    if (m.max_exp_avg_sq) second(m.max_exp_avg_sq, m.max_exp_avg_sq_scale, max_exp_avg_sq_);
  }

  MomentStorage floats() {
    return {Moments::full, exp_avg_, exp_avg_sq_, m_.max_exp_avg_sq ? max_exp_avg_sq_ : nullptr,
            nullptr,       nullptr,  nullptr};
  }

  void encode(std::uint32_t key) {
    using L = Lanes<float, float>;
    const auto drawn = [&](std::uint32_t place) { return draw<L>(key, place, L::places()); };
    const auto second = [&](BlockOfFloats& x, void* codes, float* scales) {
      const float scale = scales[block_] = largest(x, n_);
      encode_block(x, n_, static_cast<std::uint8_t*>(codes) + block_ * kMomentBlock,
                   [&](L::Vector v, std::uint32_t place) {
                     return encode_exp_avg_sq<L>(v, scale, drawn(place).exp_avg_sq);
                   });
    };
    const float scale = m_.exp_avg_scale[block_] = largest(exp_avg_, n_);
    encode_block(exp_avg_, n_, static_cast<std::int8_t*>(m_.exp_avg) + block_ * kMomentBlock,
                 [&](L::Vector v, std::uint32_t place) {
                   return encode_exp_avg<L>(v, scale, drawn(place).exp_avg);
                 });
    second(exp_avg_sq_, m_.exp_avg_sq, m_.exp_avg_sq_scale);
    if (m_.max_exp_avg_sq) second(max_exp_avg_sq_, m_.max_exp_avg_sq, m_.max_exp_avg_sq_scale);
  }

 private:
  const MomentStorage& m_;
  std::size_t block_, n_;
  BlockOfFloats exp_avg_, exp_avg_sq_, max_exp_avg_sq_;
};

// The moments of a stretch that begins `at` elements later.
inline MomentStorage skip(const MomentStorage& m, std::size_t at) {
  const std::size_t bytes = m.kind == Moments::bf16 ? sizeof(bf16) : sizeof(float);
  const auto later = [&](void* moment) -> void* {
    return moment ? static_cast<std::byte*>(moment) + at * bytes : nullptr;
  };
  return {m.kind,  later(m.exp_avg), later(m.exp_avg_sq), later(m.max_exp_avg_sq), nullptr,
          nullptr, nullptr};
}

template <class P, class G>
void update_blocks(const AdamJob& job) {
  for (std::size_t at = 0, block = 0; at < job.count; at += kMomentBlock, ++block) {
    AdamJob one = job;
    one.count = std::min<std::size_t>(job.count - at, kMomentBlock);
    one.block = job.block + block;
    one.param = static_cast<const P*>(job.param) + at;
    one.master = job.master ? job.master + at : nullptr;
    const void* in[kMaxInputs];
    for (int r = 0; r < job.grad.inputs; ++r) in[r] = static_cast<const G*>(job.grad.in[r]) + at;
    one.grad.in = in;
    void* out[kMaxInputs];
    for (int o = 0; o < job.outputs; ++o) out[o] = static_cast<P*>(job.out[o]) + at;
    one.out = out;

    const auto step = [&] {
      if (!job.grad.wide) return update_typed<P, G>(one);
      BlockOfFloats sum;
      for (std::size_t i = 0; i < one.count; ++i) {
        double wide;
        mean_gradient<Scalar<G, double>, G, double>(one.grad, i, 1, &wide);
        sum[i] = float(wide);
      }
      const void* const summed[] = {sum};
      const double unit = 1.0;
      one.grad = {Dtype::f32, false, 1, summed, &unit};
      update_typed<P, float>(one);
    };
    if (job.moments.kind == Moments::int8) {
      DecodedBlock moments(job.moments, block, one.count);
      one.moments = moments.floats();
      step();
      moments.encode(block_key(job.steps, job.parameter, one.block));
    } else {
      one.moments = skip(job.moments, at);
      step();
    }
  }
}

template <class P, class G>
void adam_of(const AdamJob& job) {
  const bool blocks = job.moments.kind == Moments::int8 || job.grad.wide;
  return blocks ? update_blocks<P, G>(job) : update_typed<P, G>(job);
}

void adam_of_dtype(const AdamJob& job) {
  const bool same = job.grad.dtype == job.dtype;
  switch (job.dtype) {
    case Dtype::f64:
      return update_moments<double, double, double, double>(job);
    case Dtype::f32:
      return adam_of<float, float>(job);
    case Dtype::bf16:
      return same ? adam_of<bf16, bf16>(job) : adam_of<bf16, float>(job);
    case Dtype::f16:
      return same ? adam_of<f16, f16>(job) : adam_of<f16, float>(job);
  }
}

void adam(const AdamJob& job) {
  adam_of_dtype(job);
  if (job.stream) end_stream();
}

}  // namespace
}  // namespace pk
