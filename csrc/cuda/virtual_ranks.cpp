#include "virtual_ranks.h"

#include <chrono>

namespace pk {

VirtualRanks::VirtualRanks(int size) : size_(size) {
  if (size < 1 || size > kMaxVirtualRanks) {
    throw std::invalid_argument("VirtualRanks: size must be 1 to " +
                                std::to_string(kMaxVirtualRanks) + ", got " + std::to_string(size));
  }
}

VirtualRanks::~VirtualRanks() {
  for (Rank& rank : ranks_) {
    if (rank.ready) cudaEventDestroy(rank.ready);
  }
  if (done_) cudaEventDestroy(done_);
}

Outcome VirtualRanks::submit(int rank, const Work& work, cudaStream_t stream,
                             double timeout_seconds) {
  std::unique_lock lock(mutex_);
  if (broken_) return Outcome::timeout;
  Rank& mine = ranks_[rank];
  mine.work = &work;
  mine.stream = stream;
  const auto create = [](cudaEvent_t& event) {
    if (event) return;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  };
  create(mine.ready);
  create(done_);
  check(cudaEventRecord(mine.ready, stream), "cudaEventRecord");
  const std::uint64_t round = round_;
  if (++arrived_ == size_) {
    arrived_ = 0;
    ++round_;
    error_ = nullptr;
    try {
      outcome_ = start();
    } catch (...) {
      error_ = std::current_exception();
    }
    all_here_.notify_all();
  } else {
    const auto patience = std::chrono::duration<double>(timeout_seconds);
    if (!all_here_.wait_for(lock, patience, [&] { return round_ != round || broken_; })) {
      broken_ = true;
      all_here_.notify_all();
    }
    if (round_ == round) return Outcome::timeout;
  }
  if (error_) std::rethrow_exception(error_);
  return outcome_;
}

// On the stream of rank 0.
Outcome VirtualRanks::start() {
  const cudaStream_t stream = ranks_[0].stream;
  const Work* works[kMaxVirtualRanks];
  for (int r = 0; r < size_; ++r) {
    works[r] = ranks_[r].work;
    check(cudaStreamWaitEvent(stream, ranks_[r].ready), "cudaStreamWaitEvent");
  }
  if (!start_all(works, size_, stream)) return Outcome::mismatch;
  check(cudaEventRecord(done_, stream), "cudaEventRecord");
  for (int r = 1; r < size_; ++r) {
    check(cudaStreamWaitEvent(ranks_[r].stream, done_), "cudaStreamWaitEvent");
  }
  return Outcome::done;
}

}  // namespace pk
