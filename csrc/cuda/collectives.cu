#include "kernel.h"
#include "reduction.h"

namespace pk {

template void start(const Launch<ReduceCall>&, cudaStream_t);
template int blocks_per_multiprocessor<ReduceCall>();
template void start(const Launch<GatherCall>&, cudaStream_t);
template int blocks_per_multiprocessor<GatherCall>();

}  // namespace pk
