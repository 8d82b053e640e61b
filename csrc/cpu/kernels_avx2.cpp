#include "adam_inl.h"
#include "kernels_inl.h"

namespace pk {
const Kernels kAvx2{"avx2", weighted_sum, adam, sum_of_squares, copy};
}  // namespace pk
