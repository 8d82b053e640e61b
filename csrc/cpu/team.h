// One rank's threads while they run one collective: the Team that protocol.h asks for.
#pragma once

#include <dlfcn.h>

#include <thread>
#include <vector>

#include "control.h"

namespace pk {

// A barrier of its own for each collective: threads of different ranks must share no hidden state
// (std::barrier's waiter pool would order them, and hide races from the race tests).
class ThreadBarrier {
 public:
  void wait(int count) {
    if (count == 1) return;
    const std::uint32_t round = round_.load(kAcquire);
    if (arrived_.fetch_add(1, kBoth) + 1 == count) {
      arrived_.store(0, kRelaxed);
      round_.fetch_add(1, kRelease);
      round_.notify_all();
      return;
    }
    round_.wait(round, kAcquire);
  }

 private:
  std::atomic<int> arrived_{0};
  std::atomic<std::uint32_t> round_{0};
};

// What the threads of one rank share during one collective.
struct Meeting {
  const Peers& peers;
  std::uint32_t& ticket;  // the rank's, kept from one collective to the next
  const std::function<bool()>& interrupted;
  ThreadBarrier barrier{};
  bool gave_up = false;
};

class Team {
 public:
  Team(Meeting& meeting, int thread, int threads)
      : meeting_(meeting), thread_(thread), threads_(threads) {}

  int rank() const { return meeting_.peers.rank(); }
  int size() const { return meeting_.peers.size(); }
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  void sync() { meeting_.barrier.wait(threads_); }
  std::uint32_t ticket() const { return meeting_.ticket; }
  int waiters() const { return 1; }
  void advance() {
    if (thread_ == 0) ++meeting_.ticket;
  }
  Signal& signal(int rank, std::uint32_t ticket) const {
    return meeting_.peers.signal(rank, ticket);
  }
  void wake(Signal& signal) const { meeting_.peers.wake(signal); }
  bool await(int peer, Signal& signal, std::uint32_t ticket) const {
    return meeting_.peers.await(peer, signal, ticket, meeting_.interrupted);
  }
  bool ok() const { return !meeting_.gave_up; }
  void give_up() { meeting_.gave_up = true; }

  // This thread's part of a range of bytes.
  Range part(Range whole) const { return share_of(whole, threads_, thread_); }

 private:
  Meeting& meeting_;
  int thread_;
  int threads_;
};

// torch's pool of threads, which any OpenMP runtime in this process lends by these entry points of
// libgomp. Its threads spin for some milliseconds after each operation of torch, and threads of our
// own would have to share their cores.
struct OpenMP {
  void (*parallel)(void (*work)(void*), void* argument, unsigned threads, unsigned flags);
  int (*thread)();
  int (*threads)();

  static const OpenMP& of_process() {
    static const OpenMP found{find<decltype(parallel)>("GOMP_parallel"),
                              find<decltype(thread)>("omp_get_thread_num"),
                              find<decltype(threads)>("omp_get_num_threads")};
    return found;
  }

 private:
  template <class Function>
  static Function find(const char* name) {
    return reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
  }
};

// False on a thread where torch computes nothing: OpenMP would make it a pool of its own.
inline thread_local bool torch_computes_here = true;

// How many of `threads` so many bytes keep busy.
inline int useful_threads(std::uint64_t bytes, int threads) {
  constexpr std::uint64_t kBytesPerThread = 1 << 20;  // one is worth starting for so much
  const std::uint64_t useful = max_u64(1, bytes / kBytesPerThread);
  return int(min_u64(std::uint64_t(threads < 1 ? 1 : threads), useful));
}

// Call run(thread, of) on at most `threads` threads, the caller's among them: on torch's, or else
// on ones that live for this call. Starting one costs some 20 microseconds and only large tensors
// ask for any.
template <class Run>
void run_threads(int threads, Run run) {
  if (threads == 1) return run(0, 1);
  const OpenMP& openmp = OpenMP::of_process();
  if (torch_computes_here && openmp.parallel && openmp.thread && openmp.threads) {
    const std::function<void()> work = [&] { run(openmp.thread(), openmp.threads()); };
    openmp.parallel([](void* call) { (*static_cast<const std::function<void()>*>(call))(); },
                    const_cast<std::function<void()>*>(&work), unsigned(threads), 0);
    return;
  }
  std::vector<std::thread> others;
  others.reserve(std::size_t(threads - 1));
  for (int t = 1; t < threads; ++t) others.emplace_back([&, t] { run(t, threads); });
  run(0, threads);
  for (std::thread& thread : others) thread.join();
}

// Run body(team) on them.
template <class Body>
void run_team(Meeting& meeting, int threads, Body body) {
  run_threads(threads, [&](int thread, int of) {
    Team team(meeting, thread, of);
    body(team);
  });
}

}  // namespace pk
