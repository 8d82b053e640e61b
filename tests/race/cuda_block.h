// The kernels of csrc/cuda on the host: threads in place of blocks of CUDA threads, ranks as groups
// of blocks that share no more than the control memory, each with a stream of calls.
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>

#include "cuda/norm.h"
#include "cuda/reduction.h"
#include "cuda/step.h"
#include "harness.h"

namespace pk {

// std::barrier would order the ranks by its hidden pool of waiters, and hide their races.
class HostBarrier {
 public:
  explicit HostBarrier(int count) : count_(count) {}
  void wait() {
    const unsigned round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
    }
    while (round_.load(std::memory_order_acquire) == round) std::this_thread::yield();
  }

 private:
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

struct SharedByBlock {
  explicit SharedByBlock(int threads) : barrier(threads) {}
  HostBarrier barrier;
  BlockState state{};
};

class HostBlock {
 public:
  static constexpr int kLanes = 1;

  HostBlock(SharedByBlock& shared, int thread, int threads, int index, int count)
      : shared_(shared), thread_(thread), threads_(threads), index_(index), count_(count) {}

  int thread() const { return thread_; }
  int threads() const { return threads_; }
  int index() const { return index_; }
  int count() const { return count_; }
  void sync() const { shared_.barrier.wait(); }
  int lane() const { return 0; }
  int warp() const { return thread_; }
  int warps() const { return threads_; }
  float largest(float x) const { return x; }
  std::uint64_t nanoseconds() const {
    return std::uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  void pause() const { std::this_thread::yield(); }
  BlockState& state() const { return shared_.state; }

 private:
  SharedByBlock& shared_;
  int thread_, threads_, index_, count_;
};

// Zeroed memory on a line.
struct Zeroed {
  explicit Zeroed(std::uint64_t bytes)
      : data(static_cast<std::byte*>(std::aligned_alloc(kLine, round_up(bytes, kLine))),
             std::free) {
    std::memset(data.get(), 0, round_up(bytes, kLine));
  }
  std::unique_ptr<std::byte, void (*)(void*)> data;
};

// Ranks with their control memory, and what each is to run. Kernels of a rank follow one another as
// on a stream; nothing but what they do themselves orders one rank after another.
class Gpus {
 public:
  Gpus(int size, int threads, int blocks, bool ring, double timeout_seconds)
      : size_(size), threads_(threads), blocks_(blocks), streams_(std::size_t(size)) {
    const Layout layout{size, blocks};
    for (int r = 0; r < size; ++r) {
      controls_.emplace_back(layout.bytes());
      words_.emplace_back(sizeof(HostWords));
      endpoints_.emplace_back(sizeof(Endpoint) + 256 * std::size_t(size) * sizeof(std::byte*));
    }
    for (int r = 0; r < size; ++r) {
      Endpoint& e = *reinterpret_cast<Endpoint*>(endpoints_[std::size_t(r)].data.get());
      e.rank = r;
      e.size = size;
      e.layout = layout;
      e.ring = ring;
      e.timeout_nanoseconds = std::uint64_t(timeout_seconds * 1e9);
      e.host = &words(r);
      for (int p = 0; p < size; ++p) e.controls[p] = controls_[std::size_t(p)].data.get();
    }
  }

  int size() const { return size_; }
  int blocks() const { return blocks_; }
  Endpoint& endpoint(int rank) {
    return *reinterpret_cast<Endpoint*>(endpoints_[std::size_t(rank)].data.get());
  }
  HostWords& words(int rank) {
    return *reinterpret_cast<HostWords*>(words_[std::size_t(rank)].data.get());
  }
  // Memory that every rank reaches; returns the number of the segment.
  int segment(const std::vector<std::byte*>& addresses) {
    for (int r = 0; r < size_; ++r) {
      std::memcpy(endpoint(r).segments + segments_ * size_, addresses.data(),
                  addresses.size() * sizeof(std::byte*));
    }
    return segments_++;
  }

  // Enqueue a call on one rank.
  template <class Call>
  void call(int rank, const Call& call, int blocks) {
    enqueue(rank, blocks, [call](HostBlock& block) { run(block, call); });
  }
  // Enqueue what comes after it on that rank's stream.
  void then(int rank, std::function<void()> work) {
    enqueue(rank, 1, [work](HostBlock& block) {
      if (block.thread() == 0) work();
    });
  }

  // Run what was enqueued, all ranks at once.
  void finish() {
    run_threads(size_, [&](int rank) {
      HostBarrier stream(threads_ * blocks_);  // the end of each kernel of this rank
      std::vector<std::unique_ptr<SharedByBlock>> shared;
      for (int b = 0; b < blocks_; ++b) shared.push_back(std::make_unique<SharedByBlock>(threads_));
      run_threads(threads_ * blocks_, [&](int worker) {
        const int index = worker / threads_, thread = worker % threads_;
        const auto& kernels = streams_[std::size_t(rank)];
        for (const auto& [count, kernel] : kernels) {
          HostBlock block(*shared[std::size_t(index)], thread, threads_, index, count);
          if (index < count) kernel(block);
          stream.wait();
        }
      });
    });
    for (auto& stream : streams_) stream.clear();
  }

 private:
  using Kernel = std::function<void(HostBlock&)>;
  void enqueue(int rank, int blocks, Kernel kernel) {
    streams_[std::size_t(rank)].emplace_back(blocks, std::move(kernel));
  }

  int size_, threads_, blocks_;
  std::vector<Zeroed> controls_, words_, endpoints_;
  std::vector<std::vector<std::pair<int, Kernel>>> streams_;  // blocks, and what each of them does
  int segments_ = 0;
};

}  // namespace pk
