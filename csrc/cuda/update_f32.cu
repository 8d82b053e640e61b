#include "kernel.h"
#include "step.h"

namespace pk {

template void start(const Launch<Update<float, float, float>>&, cudaStream_t);
template void start(const Launch<Update<float, float, bf16>>&, cudaStream_t);
template void start(const Launch<Update<float, float, std::int8_t>>&, cudaStream_t);
template void start(const Launch<Update<double, double, double>>&, cudaStream_t);

}  // namespace pk
