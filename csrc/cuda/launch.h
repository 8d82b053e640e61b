// Kernels as the host starts them: one grid whose blocks are dealt out to the ranks of this process
// that share the GPU, usually one.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace pk {

inline constexpr int kMaxVirtualRanks = 8;  // as many calls fit among a kernel's parameters

template <class Call>
struct Launch {
  int ranks;
  int blocks;  // of each rank
  Call calls[kMaxVirtualRanks];
};

// Defined and instantiated beside the kernels, for ReduceCall, GatherCall, NormCall and StepCall.
template <class Call>
void start(const Launch<Call>& launch, cudaStream_t stream);
template <class Call>
int blocks_per_multiprocessor();

// Write `bytes` of the host to the device, in order with the stream. They travel as parameters of
// kernels: nothing of the host is read later, and a captured graph writes the same again.
void write_table(void* to, const void* from, std::size_t bytes, cudaStream_t stream);

inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that is reported shall not be found again by the next call
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")");
}

// This device for the calls that follow, until the end of the scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace pk
