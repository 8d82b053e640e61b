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

// How the moments of an element are stored.
enum class Moments : std::uint8_t {
  full,  // as they are computed: float, or double for a double parameter
  bf16,  // stochastically rounded
  int8,  // blocks of kMomentBlock elements of one parameter share a scale
};

// Also the unit in which parameters are cut into shards, so that no cut divides a block and every
// world size computes the same numbers.
inline constexpr std::uint64_t kMomentBlock = 256;

namespace {  // internal linkage, see dtypes.h

// `L` is a vector of numbers with its arithmetic (csrc/cpu/simd.h), on a device one number.
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
  e.exp_avg = L::fma(k.rest1, grad, L::mul(k.beta1, e.exp_avg));
  e.exp_avg_sq = L::fma(L::mul(k.rest2, grad), grad, L::mul(k.beta2, e.exp_avg_sq));
  if (amsgrad) e.max_exp_avg_sq = L::max(e.max_exp_avg_sq, e.exp_avg_sq);
  const typename L::Vector root = L::sqrt(amsgrad ? e.max_exp_avg_sq : e.exp_avg_sq);
  const typename L::Vector denominator = L::fma(root, k.inverse_root_bias2, k.eps);
  e.param = L::fma(k.minus_step_size, L::div(e.exp_avg, denominator), L::mul(k.decay, e.param));
}

// --- random bits ------------------------------------------------------------------------------

// A hash of a counter instead of a generator with a state: an element draws the same bits whoever
// owns it. Mixer: Wellons, "Prospecting for Hash Functions" (lowbias32).
PK_HD inline std::uint32_t mix(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// What elements of one block of one parameter draw at one step; `purpose` tells independent draws.
PK_HD inline std::uint32_t block_key(std::uint64_t step, std::uint32_t parameter,
                                     std::uint64_t block, std::uint32_t purpose) {
  std::uint32_t key = mix(std::uint32_t(step) ^ 0x9e3779b9u);
  key = mix(key ^ parameter);
  key = mix(key ^ std::uint32_t(block));
  return mix(key ^ std::uint32_t(block >> 32) ^ (purpose << 24));
}

PK_HD inline std::uint32_t random_bits(std::uint32_t key, std::uint32_t index) {
  return mix(key + index * 0x9e3779b9u);
}

PK_HD inline float unit_float(std::uint32_t bits16) { return float(bits16) * 0x1p-16f; }  // [0, 1)

// --- bfloat16, rounded up with the probability of what is cut off ------------------------------

PK_HD inline bf16 narrow_stochastic(float x, std::uint32_t bits16) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  const std::uint32_t rounded = (bits + (finite ? bits16 : 0u)) >> 16;
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {std::uint16_t(rounded | (nan ? 0x40u : 0u))};
}

// --- int8: the code of a value relative to the largest of its block ----------------------------
//
// exp_avg is sign * (code/127)^2, exp_avg_sq is (code/255)^4: fine near zero, where most values of
// a block lie. Rounded between the two codes around the value so that the mean is the value.

PK_HD inline float decode_exp_avg(std::int8_t code, float scale) {
  const float c = float(code) * (1.0f / 127.0f);
  return scale * (c * (c < 0.0f ? -c : c));
}

PK_HD inline std::int8_t encode_exp_avg(float x, float scale, float random) {
  if (!(scale > 0.0f)) return 0;
  const float size = (x < 0.0f ? -x : x) / scale;  // 0 to 1
  const int code_below = int(std::sqrt(size) * 127.0f);
  const float low = float(code_below < 126 ? code_below : 126);
  const float below = low * low, above = (low + 1.0f) * (low + 1.0f);  // in 1/127^2
  const bool up = random * (above - below) < size * (127.0f * 127.0f) - below;
  const int code = int(low) + int(up);
  return std::int8_t(x < 0.0f ? -code : code);
}

PK_HD inline float decode_exp_avg_sq(std::uint8_t code, float scale) {
  const float c = float(code) * (1.0f / 255.0f), square = c * c;
  return scale * (square * square);
}

// A value above zero keeps at least code 1: zero would make the next step divide by eps alone.
PK_HD inline std::uint8_t encode_exp_avg_sq(float x, float scale, float random) {
  if (!(scale > 0.0f) || !(x > 0.0f)) return 0;
  const float size = x / scale;
  const int code_below = int(std::sqrt(std::sqrt(size)) * 255.0f);
  const float low = float(code_below < 254 ? code_below : 254);
  const float low2 = low * low, high2 = (low + 1.0f) * (low + 1.0f);
  const float below = low2 * low2, above = high2 * high2;
  const bool up = random * (above - below) < size * (65025.0f * 65025.0f) - below;
  const int code = int(low) + int(up);
  return std::uint8_t(code > 0 ? code : 1);
}

}  // namespace
}  // namespace pk
