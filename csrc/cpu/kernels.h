// The loops over elements, one table an instruction set, chosen once at start.
#pragma once

#include "../dtypes.h"
#include "adam_job.h"

namespace pk {

// One weighted sum: every out[o][i] = round(coefficient[0]*in[0][i] + coefficient[1]*in[1][i] ...),
// added in that order with fma. An output may be one of the inputs. No input: zeros.
struct WeightedSum {
  Dtype dtype;
  bool wide;  // add in double although the dtype would be added in float
  int inputs;
  int outputs;
  const void* const* in;
  const double* coefficient;
  void* const* out;
  std::size_t count;
};

struct Kernels {
  const char* name;
  void (*weighted_sum)(const WeightedSum&);
  void (*adam)(const AdamJob&);
  double (*sum_of_squares)(const GradientSum&, std::size_t count);
  // Copy, past the caches if asked, and the largest magnitude: infinity where not all is finite.
  double (*copy)(Dtype, const void* from, void* to, std::size_t count, bool stream);
};

extern const Kernels kPortable;
extern const Kernels kAvx2;  // this one and the next in builds for x86-64 alone
extern const Kernels kAvx512;

// The best table this processor runs, or the one PARALLELKIT_ISA names ("portable", "avx2",
// "avx512"); throws std::invalid_argument when that one cannot run here.
const Kernels& kernels();

}  // namespace pk
