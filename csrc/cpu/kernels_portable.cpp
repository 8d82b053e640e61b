#include "kernels_inl.h"

namespace pk {
extern const Kernels kPortable;
const Kernels kPortable{"portable", weighted_sum};
}  // namespace pk
