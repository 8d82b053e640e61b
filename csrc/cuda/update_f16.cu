#include "kernel.h"
#include "step.h"

namespace pk {

template void start(const Launch<Update<f16, f16, float>>&, cudaStream_t);
template void start(const Launch<Update<f16, f16, bf16>>&, cudaStream_t);
template void start(const Launch<Update<f16, f16, std::int8_t>>&, cudaStream_t);
template void start(const Launch<Update<f16, float, float>>&, cudaStream_t);
template void start(const Launch<Update<f16, float, bf16>>&, cudaStream_t);
template void start(const Launch<Update<f16, float, std::int8_t>>&, cudaStream_t);

}  // namespace pk
