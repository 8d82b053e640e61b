#include "kernels_inl.h"

namespace pk {
extern const Kernels kAvx512;
const Kernels kAvx512{"avx512", weighted_sum};
}  // namespace pk
