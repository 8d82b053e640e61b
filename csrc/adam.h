// One element's AdamW step, and how its moments are stored in fewer bits. Host and device, pure;
// nothing else in the project writes the update.
//
// Formula: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), in the order of
// operations of torch.optim.AdamW; amsgrad: Reddi, Kale and Kumar (2018).
#pragma once

#include <cmath>

#include "dtypes.h"

namespace pk {

// The step of one parameter group at one step count, with everything that depends on the count
// worked out in double.
struct AdamStep {
  double beta1;
  double beta2;
  double decay;               // 1 - lr * weight_decay
  double step_size;           // lr / (1 - beta1^t)
  double inverse_root_bias2;  // 1 / sqrt(1 - beta2^t)
  double eps;
};

// The options of one parameter group.
struct AdamSetting {
  double lr, beta1, beta2, eps, weight_decay;
};

// The step at count t, from 1.
PK_HD inline AdamStep adam_step(const AdamSetting& s, std::uint64_t t) {
  const double count = double(t);
  return {s.beta1,
          s.beta2,
          1.0 - s.lr * s.weight_decay,
          s.lr / (1.0 - std::pow(s.beta1, count)),
          1.0 / std::sqrt(1.0 - std::pow(s.beta2, count)),
          s.eps};
}

// How the moments of an element are stored.
enum class Moments : std::uint8_t {
  full,  // as they are computed: float, or double for a double parameter
  bf16,  // stochastically rounded
  int8,  // blocks of kMomentBlock elements of one parameter share a scale
};

// How the squares of a parameter's gradient count in the norm; parallelkit/optimizer_norm.py has
// the same numbers and says more.
enum class InNorm : std::uint8_t {
  whole,      // the ranks of this group have all of it
  split,      // ranks outside this group have other parts: counted apart
  elsewhere,  // another rank of this group counts the same elements
};

// Also the unit in which parameters are cut into shards, so that no cut divides a block and every
// world size computes the same numbers.
inline constexpr std::uint64_t kMomentBlock = 256;

// The moments of a stretch in their storage; scales of int8, one a block, else null.
struct MomentStorage {
  Moments kind;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad
  float* exp_avg_scale;
  float* exp_avg_sq_scale;
  float* max_exp_avg_sq_scale;
};

namespace {  // internal linkage, see dtypes.h

// `L` is a vector of floats with its arithmetic (csrc/cpu/simd.h), or one number. `L::Bits` and
// `L::Ints` are as many uint32 and int32.
template <class L>
struct AdamFactors {
  using Vector = typename L::Vector;
  Vector beta1, rest1, beta2, rest2, decay, minus_step_size, inverse_root_bias2, eps;

  template <class A>
  PK_HD static AdamFactors of(const AdamStep& step, A) {
    return {L::set(A(step.beta1)),
            L::set(A(1.0 - step.beta1)),
            L::set(A(step.beta2)),
            L::set(A(1.0 - step.beta2)),
            L::set(A(step.decay)),
            L::set(A(-step.step_size)),
            L::set(A(step.inverse_root_bias2)),
            L::set(A(step.eps))};
  }
};

template <class L>
struct AdamElement {
  typename L::Vector param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

template <class L, bool amsgrad>
PK_HD inline void adam_update(const AdamFactors<L>& k, typename L::Vector grad, AdamElement<L>& e) {
  e.exp_avg = L::fma(k.rest1, grad, k.beta1 * e.exp_avg);
  e.exp_avg_sq = L::fma(k.rest2 * grad, grad, k.beta2 * e.exp_avg_sq);
  if (amsgrad) {  // the newer square where either is NaN
    e.max_exp_avg_sq = e.max_exp_avg_sq > e.exp_avg_sq ? e.max_exp_avg_sq : e.exp_avg_sq;
  }
  const typename L::Vector root = L::sqrt(amsgrad ? e.max_exp_avg_sq : e.exp_avg_sq);
  const typename L::Vector denominator = L::fma(root, k.inverse_root_bias2, k.eps);
  e.param = L::fma(k.minus_step_size, e.exp_avg / denominator, k.decay * e.param);
}

// --- random bits ------------------------------------------------------------------------------

// A hash of a counter instead of a generator with a state: an element draws the same bits whoever
// owns it. Mixer: Wellons, "Prospecting for Hash Functions" (lowbias32). `Bits` is one uint32 or a
// vector of them.
template <class Bits>
PK_HD inline Bits mix(Bits x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// What elements of one block of one parameter draw their bits with at one step.
PK_HD inline std::uint32_t block_key(std::uint64_t step, std::uint32_t parameter,
                                     std::uint64_t block) {
  std::uint32_t key = mix(std::uint32_t(step) ^ 0x9e3779b9u);
  key = mix(key ^ parameter);
  key = mix(key ^ std::uint32_t(block));
  return mix(key ^ std::uint32_t(block >> 32));
}

// What an element rounds with, 16 bits each. `param` is the sum of the other two mod 2^16: each of
// the three is uniform, and independent of each other one (for a given `exp_avg`, the sum takes
// every value as often as `exp_avg_sq` does), which is all that unbiased rounding needs. The
// largest square rounds with the bits of the square, so that it stays at least that.
template <class Bits>
struct Draw {
  Bits exp_avg, exp_avg_sq, param;
};

// Of the elements `places` after the place `first` of the block.
template <class L>
PK_HD inline Draw<typename L::Bits> draw(std::uint32_t key, std::uint32_t first,
                                         typename L::Bits places) {
  const typename L::Bits bits = mix(places * 0x9e3779b9u + (first * 0x9e3779b9u + key));
  const typename L::Bits lower = bits & 0xffffu, upper = bits >> 16;
  return {lower, upper, (lower + upper) & 0xffffu};
}

// --- int8: the code of a value relative to the largest of its block ----------------------------
//
// exp_avg is sign * (code/127)^2, exp_avg_sq is (code/255)^4: fine near zero, where most values of
// a block lie. Rounded between the two codes around the value so that the mean is the value, with
// `bits16` random. `scale`, of the whole block, is above 0 where anything is to encode.

template <class L>
PK_HD inline typename L::Vector decode_exp_avg(typename L::Ints code, float scale) {
  const typename L::Vector c = L::to_float(code) * (1.0f / 127.0f);
  return L::set(scale) * (c * (c < 0.0f ? -c : c));
}

// The code, a whole number: `low` or one more; `below` and `above` are what those two stand for.
template <class L>
PK_HD inline typename L::Vector choose_code(typename L::Vector low, typename L::Vector below,
                                            typename L::Vector above, typename L::Vector value,
                                            typename L::Bits bits16) {
  const typename L::Vector random = L::to_float(typename L::Ints(bits16)) * 0x1p-16f;  // [0, 1)
  return random * (above - below) < value - below ? low + 1.0f : low;
}

template <class L>
PK_HD inline typename L::Ints encode_exp_avg(typename L::Vector x, float scale,
                                             typename L::Bits bits16) {
  using Vector = typename L::Vector;
  const Vector size = (x < 0.0f ? -x : x) / scale;  // 0 to 1
  const Vector most = L::set(126.0f), floor = L::to_float(L::truncate(L::sqrt(size) * 127.0f));
  const Vector low = floor < most ? floor : most, high = low + 1.0f;
  const Vector code = choose_code<L>(low, low * low, high * high, size * (127.0f * 127.0f), bits16);
  return L::truncate(x < 0.0f ? -code : code);
}

template <class L>
PK_HD inline typename L::Vector decode_exp_avg_sq(typename L::Ints code, float scale) {
  const typename L::Vector c = L::to_float(code) * (1.0f / 255.0f), square = c * c;
  return L::set(scale) * (square * square);
}

// A value above zero keeps at least code 1: zero would make the next step divide by eps alone.
template <class L>
PK_HD inline typename L::Ints encode_exp_avg_sq(typename L::Vector x, float scale,
                                                typename L::Bits bits16) {
  using Vector = typename L::Vector;
  const Vector size = x / scale, one = L::set(1.0f);
  const Vector most = L::set(254.0f),
               floor = L::to_float(L::truncate(L::sqrt(L::sqrt(size)) * 255.0f));
  const Vector low = floor < most ? floor : most, high = low + 1.0f;
  const Vector low2 = low * low, high2 = high * high;
  const Vector code =
      choose_code<L>(low, low2 * low2, high2 * high2, size * (65025.0f * 65025.0f), bits16);
  const Vector kept = code > one ? code : one;
  return L::truncate(x > 0.0f ? kept : Vector{});
}

}  // namespace
}  // namespace pk
