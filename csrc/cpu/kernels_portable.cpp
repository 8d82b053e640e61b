#include "adam_inl.h"
#include "kernels_inl.h"

namespace pk {
extern const Kernels kPortable;
const Kernels kPortable{"portable", weighted_sum, adam, sum_of_squares};
}  // namespace pk
