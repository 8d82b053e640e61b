#include "adam_inl.h"
#include "kernels_inl.h"

namespace pk {
const Kernels kPortable{"portable", weighted_sum, adam, sum_of_squares, copy};
}  // namespace pk
