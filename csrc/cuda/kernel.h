// A block of CUDA threads as the Block of team.h, and the one kernel that runs any call.
#pragma once

#include <cuda_runtime.h>

#include "launch.h"
#include "team.h"

namespace pk {

class DeviceBlock {
 public:
  static constexpr int kLanes = 32;

  __device__ DeviceBlock(BlockState& state, int blocks)
      : state_(state), index_(int(blockIdx.x) % blocks), count_(blocks) {}

  __device__ int thread() const { return int(threadIdx.x); }
  __device__ static constexpr int threads() { return kMaxThreads; }
  __device__ int index() const { return index_; }
  __device__ int count() const { return count_; }
  __device__ void sync() const { __syncthreads(); }
  __device__ int lane() const { return thread() % kLanes; }
  __device__ int warp() const { return thread() / kLanes; }
  __device__ static constexpr int warps() { return kMaxThreads / kLanes; }
  // Of numbers at least 0, whose bits are in the same order as they.
  __device__ float largest(float x) const {
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
  }
  __device__ std::uint64_t nanoseconds() const {
    std::uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
  }
  __device__ void pause() const { __nanosleep(20); }
  __device__ BlockState& state() const { return state_; }

 private:
  BlockState& state_;
  int index_, count_;
};

// At most 128 registers a thread, so that two blocks fit on a multiprocessor.
template <class Call>
__global__ void __launch_bounds__(kMaxThreads, 2)
    run_calls(const __grid_constant__ Launch<Call> launch) {
  __shared__ alignas(16) unsigned char state[sizeof(BlockState)];  // atomics have constructors
  DeviceBlock block(*reinterpret_cast<BlockState*>(state), launch.blocks);
  run(block, launch.calls[int(blockIdx.x) / launch.blocks]);
}

template <class Call>
void start(const Launch<Call>& launch, cudaStream_t stream) {
  cudaLaunchAttribute cooperative{};  // all blocks are on the GPU together, or it is an error
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(launch.ranks * launch.blocks));
  config.blockDim = dim3(kMaxThreads);
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = Call::kMeets ? 1 : 0;
  check(cudaLaunchKernelEx(&config, run_calls<Call>, launch), "cudaLaunchKernelEx");
}

template <class Call>
int blocks_per_multiprocessor() {
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, run_calls<Call>, kMaxThreads, 0),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

}  // namespace pk
