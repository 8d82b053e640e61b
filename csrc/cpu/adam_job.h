// What the optimizer kernels are asked to do: a stretch of one parameter.
#pragma once

#include "../adam.h"

namespace pk {

inline constexpr int kMaxInputs = 64;  // the ranks of a host, see protocol.h

// The gradient of a stretch: coefficient[0]*in[0] + coefficient[1]*in[1] ..., in that order by fma.
struct GradientSum {
  Dtype dtype;
  bool wide;  // add in double although the dtype would be added in float
  int inputs;
  const void* const* in;
  const double* coefficient;
};

struct AdamJob {
  AdamStep step;
  GradientSum grad;
  Dtype dtype;        // of the parameter
  bool stochastic;    // round a bf16 parameter without a master stochastically
  const void* param;  // read where there is no master
  float* master;      // or null
  MomentStorage moments;
  int outputs;
  void* const* out;  // the parameter on every rank
  std::size_t count;
  std::uint64_t block;  // first / kMomentBlock; a stretch begins on a block
  std::uint64_t steps;  // step count and number of the parameter: the key of random bits
  std::uint32_t parameter;
  bool stream;  // write `out`, where it is not read here, past the caches; all begin on a line
};

}  // namespace pk
