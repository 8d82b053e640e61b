// Several ranks of one process on one GPU: threads that meet on the host, whose calls become one
// launch, so that blocks which wait for each other are on the GPU together.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

#include "work.h"

namespace pk {

class VirtualRanks {
 public:
  explicit VirtualRanks(int size);
  ~VirtualRanks();
  VirtualRanks(const VirtualRanks&) = delete;
  VirtualRanks& operator=(const VirtualRanks&) = delete;

  int size() const { return size_; }

  // Wait for every rank's call and start them; each rank's stream goes on after the launch.
  // mismatch: the calls differ; timeout: a rank did not come, and none will be waited for again.
  Outcome submit(int rank, const Work& work, cudaStream_t stream, double timeout_seconds);

 private:
  struct Rank {
    const Work* work;
    cudaStream_t stream;
    cudaEvent_t ready;
  };
  Outcome start();

  const int size_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  Rank ranks_[kMaxVirtualRanks] = {};
  cudaEvent_t done_ = nullptr;
  int arrived_ = 0;
  std::uint64_t round_ = 0;
  Outcome outcome_ = Outcome::done;  // of the last round
  std::exception_ptr error_;         // of the last round
  bool broken_ = false;
};

}  // namespace pk
