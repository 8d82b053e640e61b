#include "adam_inl.h"
#include "kernels_inl.h"

namespace pk {
const Kernels kAvx512{"avx512", weighted_sum, adam, sum_of_squares, copy};
}  // namespace pk
