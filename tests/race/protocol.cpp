// csrc/protocol.h with one thing at a time taken away, for ThreadSanitizer: what is left then has a
// data race, and has to be reported. On x86 the numbers stay right in most of these variants.
//
//     protocol VARIANT RANKS THREADS ROUNDS
#include "protocol.h"

#include <atomic>
#include <memory>
#include <string>

#include "harness.h"

namespace {

using namespace pk;

struct RelaxedRelease : Ordered {
  static constexpr auto release = kRelaxed;
};
struct RelaxedAcquire : Ordered {
  static constexpr auto acquire = kRelaxed;
};
struct OneSlot : Ordered {  // filled again while peers may still read it: no credit
  static constexpr std::uint32_t slots = 1;
};

// std::barrier keeps waiters of all barriers in one pool, whose atomics would order the ranks here
// and hide their races.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait() {
    const unsigned round = round_.load(kAcquire);
    if (arrived_.fetch_add(1, kBoth) + 1 == count_) {
      arrived_.store(0, kRelaxed);
      round_.store(round + 1, kRelease);
    }
    while (round_.load(kAcquire) == round) std::this_thread::yield();
  }

 private:
  const int count_;
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> round_{0};
};

constexpr int kShard = 64;  // elements of a chunk that one rank owns

// One rank's part of the shared memory.
struct Slab {
  Signal signal[2]{};
  float inputs[2][kMaxRanks][kShard]{};
  float results[2][kShard]{};
};

struct Host {
  explicit Host(int size) : size(size), slabs(new Slab[std::size_t(size)]) {}
  int size;
  std::unique_ptr<Slab[]> slabs;
};

// What the threads of one rank share.
struct RankState {
  explicit RankState(int threads) : barrier(threads) {}
  Barrier barrier;
  std::uint32_t ticket = 0;
  Verdict verdict;
};

template <class Order, bool kSynced>
class Team {
 public:
  Team(Host& host, RankState& state, int rank, int thread, int threads)
      : host_(host), state_(state), rank_(rank), thread_(thread), threads_(threads) {}

  int rank() const { return rank_; }
  int size() const { return host_.size; }
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  void sync() {
    if (kSynced) state_.barrier.wait();
  }
  std::uint32_t ticket() const { return state_.ticket; }
  int waiters() const { return 1; }
  void advance() {
    if (thread_ == 0) ++state_.ticket;
  }
  Signal& signal(int rank, std::uint32_t ticket) { return slab(rank).signal[ticket & 1]; }
  void wake(Signal&) {}
  bool await(int, Signal& signal, std::uint32_t ticket) {
    while (signal.ticket.load(Order::acquire) != ticket) std::this_thread::yield();
    return true;
  }
  bool ok() const { return true; }
  void give_up() {}

  Slab& slab(int rank) { return host_.slabs[std::size_t(rank)]; }
  Verdict& verdict() { return state_.verdict; }

 private:
  Host& host_;
  RankState& state_;
  const int rank_, thread_, threads_;
};

// A sum of whole numbers over a flat tensor, chunk c of owner o at (c * size + o) * kShard.
template <class Team>
class Sum {
 public:
  Sum(Team& team, float* data) : team_(team), data_(data) {}

  void fill(std::uint64_t chunk, std::uint32_t slot) {
    for (int owner = 0; owner < team_.size(); ++owner) {
      for (int i = begin(); i < end(); ++i) {
        team_.slab(team_.rank()).inputs[slot][owner][i] = at(chunk, owner)[i];
      }
    }
  }
  void reduce(std::uint64_t chunk, std::uint32_t reading, std::uint32_t filling) {
    for (int i = begin(); i < end(); ++i) {
      float sum = 0;
      for (int r = 0; r < team_.size(); ++r) {
        sum += team_.slab(r).inputs[reading][team_.rank()][i];
      }
      at(chunk, team_.rank())[i] = team_.slab(team_.rank()).results[filling][i] = sum;
    }
  }
  void drain(std::uint64_t chunk, std::uint32_t slot) {
    for (int owner = 0; owner < team_.size(); ++owner) {
      for (int i = begin(); i < end(); ++i)
        at(chunk, owner)[i] = team_.slab(owner).results[slot][i];
    }
  }

 private:
  int begin() const { return kShard * team_.thread() / team_.threads(); }
  int end() const { return kShard * (team_.thread() + 1) / team_.threads(); }
  float* at(std::uint64_t chunk, int owner) const {
    return data_ + (chunk * std::uint64_t(team_.size()) + std::uint64_t(owner)) * kShard;
  }

  Team& team_;
  float* data_;
};

template <class Order, bool kSynced = true>
void run(int size, int threads, int rounds) {
  constexpr std::uint64_t kChunks = 5;
  Host host(size);
  run_threads(size, [&](int rank) {
    RankState state(threads);
    std::vector<float> data(kChunks * std::uint64_t(size) * kShard, float(rank + 1));
    run_threads(threads, [&](int thread) {
      Team<Order, kSynced> team(host, state, rank, thread, threads);
      for (int round = 0; round < rounds; ++round) {
        Header header;
        header.weight = rank + 1.0;
        if (thread == 0) team.verdict() = {};
        open<Order>(team, header, team.verdict());
        Sum work(team, data.data());
        pipeline<Order>(team, work, kChunks, false);
        team.sync();
        if (thread == 0) {
          if (kSynced) require(data.back() == float(size * (size + 1) / 2), "the sum is right");
          data.assign(data.size(), float(rank + 1));
        }
        team.sync();
      }
    });
  });
}

}  // namespace

int main(int count, char** arguments) {
  require(count == 5, "usage: protocol VARIANT RANKS THREADS ROUNDS");
  const std::string variant = arguments[1];
  const int size = std::atoi(arguments[2]), threads = std::atoi(arguments[3]);
  const int rounds = std::atoi(arguments[4]);
  if (variant == "whole") {
    run<Ordered>(size, threads, rounds);
  } else if (variant == "no-release") {
    run<RelaxedRelease>(size, threads, rounds);
  } else if (variant == "no-acquire") {
    run<RelaxedAcquire>(size, threads, rounds);
  } else if (variant == "no-credit") {
    run<OneSlot>(size, threads, rounds);
  } else if (variant == "no-sync") {
    run<Ordered, false>(size, threads, rounds);
  } else {
    require(false, "VARIANT is whole, no-release, no-acquire, no-credit or no-sync");
  }
}
