#include "kernel.h"
#include "norm.h"
#include "step.h"

namespace pk {

template void start(const Launch<NormCall>&, cudaStream_t);
template int blocks_per_multiprocessor<NormCall>();
template void start(const Launch<OpenStep>&, cudaStream_t);
template void start(const Launch<CloseStep>&, cudaStream_t);

}  // namespace pk
