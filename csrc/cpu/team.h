// One rank's threads while they run one collective: the Team that protocol.h asks for.
#pragma once

#include <exception>
#include <thread>
#include <vector>

#include "control.h"

namespace pk {

// A barrier of its own for each collective: threads of different ranks must share no hidden state
// (std::barrier's waiter pool would order them, and hide races from the race tests).
class ThreadBarrier {
 public:
  explicit ThreadBarrier(int count) : count_(count) {}
  void wait() {
    if (count_ == 1) return;
    const std::uint32_t round = round_.load(kAcquire);
    if (arrived_.fetch_add(1, kBoth) + 1 == count_) {
      arrived_.store(0, kRelaxed);
      round_.fetch_add(1, kRelease);
      round_.notify_all();
      return;
    }
    round_.wait(round, kAcquire);
  }

 private:
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<std::uint32_t> round_{0};
};

// What the threads of one rank share during one collective.
struct Meeting {
  const Peers& peers;
  std::uint32_t& ticket;  // the rank's, kept from one collective to the next
  const std::function<bool()>& interrupted;
  ThreadBarrier barrier;
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
  void sync() { meeting_.barrier.wait(); }
  std::uint32_t ticket() const { return meeting_.ticket; }
  void advance() { ++meeting_.ticket; }
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

// Run body(team) on `threads` threads, the caller's among them. Threads live for one collective:
// starting one costs some 20 microseconds and only large tensors ask for any, and so no pool idles
// and a fork finds none.
template <class Body>
void run_team(Meeting& meeting, int threads, Body body) {
  std::vector<std::thread> others;
  others.reserve(std::size_t(threads - 1));
  for (int t = 1; t < threads; ++t) {
    others.emplace_back([&, t] {
      Team team(meeting, t, threads);
      body(team);
    });
  }
  Team team(meeting, 0, threads);
  body(team);
  for (std::thread& thread : others) thread.join();
}

}  // namespace pk
