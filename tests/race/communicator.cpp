// The product's own communicator with threads of one process as ranks, for ThreadSanitizer: it sees
// every access that no gate orders, also where x86 forgives it. Every result is checked as well.
//
//     communicator RANKS THREADS ROUNDS
#include "cpu/communicator.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "harness.h"

namespace {

using namespace pk;

constexpr std::uint64_t kSlotBytes = 32768;  // small, so that staging takes many steps
const Communicator::Interrupted kNever;

float value(int rank, std::size_t i) { return float((rank + 1) * int(i % 64 + 1)); }

struct Ranks {
  int size, threads, rounds;
  int cores;  // fewer than ranks: waiting goes to sleep at once
  std::shared_ptr<Segment> control, arena;
  std::uint64_t arena_bytes;

  double weight(int rank) const { return rank == 1 ? 0.0 : rank + 1.0; }
  double expected(std::size_t i) const {
    double sum = 0.0, total = 0.0;
    for (int r = 0; r < size; ++r) {
      sum += weight(r) * value(r, i);
      total += weight(r);
    }
    return sum / total;
  }
  void check(const float* x, std::size_t begin, std::size_t count, const char* claim) const {
    for (std::size_t k = 0; k < count; k += 17) {
      const double exact = expected(begin + k);
      require(std::abs(double(x[k]) - exact) <= 1e-6 * std::abs(exact), claim);
    }
  }
};

class Rank {
 public:
  Rank(const Ranks& all, int rank, bool ring)
      : all_(all),
        rank_(rank),
        comm_(all.control, rank, all.size, {}, all.cores, kSlotBytes, 60.0, ring) {
    comm_.add_segment(all.arena, 0);
  }

  void run() {
    const std::size_t large = all_.arena_bytes / sizeof(float);
    for (int round = 0; round < all_.rounds; ++round) {
      for (const std::size_t count : {std::size_t(1), std::size_t(1003), std::size_t(40001)}) {
        all_reduce(private_memory(count), count);
        all_reduce(shared_memory(), count);
        mixed(count);
        scatter_and_gather(private_memory(count), count);
        scatter_and_gather(shared_memory(), count);
      }
      all_reduce(private_memory(large), large);  // enough for several threads a rank
      all_reduce(shared_memory(), large);
      scatter_and_gather(private_memory(large), large);
      if (all_.size > 1) refused();
      exchange(round % 2 ? 40000 : 5);
      require(comm_.barrier(kNever).outcome == Outcome::done, "a barrier ends");
    }
  }

 private:
  float* private_memory(std::size_t count) {
    private_.resize(count);
    return private_.data();
  }
  float* shared_memory() const { return reinterpret_cast<float*>(all_.arena->slab(rank_)); }

  Header header() const {
    Header header;
    header.weight = all_.weight(rank_);
    return header;
  }
  TensorList list(float* data, std::size_t count) const {
    TensorList list;
    list.add(reinterpret_cast<std::byte*>(data), count * sizeof(float), Dtype::f32);
    comm_.locate(list);
    return list;
  }
  void set(float* data, std::size_t count) const {
    for (std::size_t i = 0; i < count; ++i) data[i] = value(rank_, i);
  }

  void all_reduce(float* data, std::size_t count) {
    set(data, count);
    const Result result = comm_.all_reduce(list(data, count), header(), all_.threads, kNever);
    require(result.outcome == Outcome::done, "an all-reduce ends");
    all_.check(data, 0, count, "an all-reduce is the weighted mean");
  }

  // Rank 0's tensor lies in shared memory, the others' do not: everybody stages.
  void mixed(std::size_t count) {
    all_reduce(rank_ == 0 ? shared_memory() : private_memory(count), count);
  }

  void scatter_and_gather(float* data, std::size_t count) {
    set(data, count);
    const Range mine = shard_bounds(count, all_.size, rank_);
    std::vector<float> shard(mine.size());
    auto* bytes = reinterpret_cast<std::byte*>(shard.data());
    const TensorList whole = list(data, count);
    Result result = comm_.reduce_scatter(whole, bytes, 4, header(), all_.threads, kNever);
    require(result.outcome == Outcome::done, "a reduce-scatter ends");
    all_.check(shard.data(), mine.begin, shard.size(), "a shard is part of the weighted mean");
    result = comm_.all_gather(whole, bytes, 4, header(), all_.threads, kNever);
    require(result.outcome == Outcome::done, "an all-gather ends");
    all_.check(data, 0, count, "an all-gather returns every shard");
  }

  // A verdict against a collective leaves the slots of both parities usable.
  void refused() {
    float* data = private_memory(5000);
    set(data, 5000);
    Header odd = header();
    odd.signature = std::uint64_t(rank_ == 0);
    const Result result = comm_.all_reduce(list(data, 5000), odd, all_.threads, kNever);
    require(result.outcome == Outcome::mismatch, "ranks that disagree are told");
    require(data[4999] == value(rank_, 4999), "a refused all-reduce changes nothing");
    const std::string told(1, char('a' + rank_));
    const Result explained = comm_.explained(
        [&](const Communicator::Interrupted& stop) {
          return comm_.all_reduce(list(data, 5000), odd, all_.threads, stop);
        },
        told);
    require(explained.outcome == Outcome::mismatch, "ranks that disagree are told");
    for (int r = 0; r < all_.size; ++r) {
      require(explained.heard[std::size_t(r)] == std::string(1, char('a' + r)), "and told why");
    }
  }

  void exchange(std::size_t length) {
    std::vector<std::string> messages;
    const std::string mine(length + std::size_t(rank_), char('a' + rank_));
    comm_.exchange(mine, 0, messages, kNever);
    for (int r = 0; r < all_.size; ++r) {
      require(messages[std::size_t(r)] == std::string(length + std::size_t(r), char('a' + r)),
              "an exchange returns every message");
    }
  }

  const Ranks& all_;
  const int rank_;
  Communicator comm_;
  std::vector<float> private_;
};

}  // namespace

int main(int count, char** arguments) {
  require(count == 4, "usage: communicator RANKS THREADS ROUNDS");
  Ranks all{};
  all.size = std::atoi(arguments[1]);
  all.threads = std::atoi(arguments[2]);
  all.rounds = std::atoi(arguments[3]);
  all.arena_bytes = std::max<std::uint64_t>(1 << 18, std::uint64_t(all.threads) << 20);
  for (const bool ring : {false, true}) {
    all.cores = ring ? 1 : all.size;
    all.control = Segment::local(all.size, Communicator::control_bytes(all.size, kSlotBytes));
    all.arena = Segment::local(all.size, all.arena_bytes);
    run_threads(all.size, [&](int rank) { Rank(all, rank, ring).run(); });
  }
}
