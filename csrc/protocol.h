// The collectives as the ranks of one host agree on them: gates, headers, verdicts, and the two
// ways data move (in place, and through staging). Host and device; knows no operating system.
//
// Ranks meet at *gates*. Gate number t of a rank is one cache line in shared memory, a Signal: the
// rank writes what it has to say there and then stores t into `ticket` with release order; whoever
// reads t from it with acquire order sees everything that rank wrote before. Two Signals a rank
// suffice (t & 1): a peer reaches gate t+2 only after it has seen everybody at gate t+1, hence
// after everybody is done with gate t. The same argument gives staging its two slots.
//
// A `Team` is what surrounds one rank here:
//     int rank() const, size() const;          the ranks
//     int thread() const, threads() const;     the threads that run this rank's collective
//     void sync();                             a barrier of those threads
//     int waiters() const;                     how many of them wait for peers, thread 0 first
//     uint32_t ticket() const; void advance(); gates passed so far; every thread calls advance
//     Signal& signal(int rank, uint32_t ticket);
//     void wake(Signal&);                      somebody may sleep on this line
//     bool await(int peer, Signal&, uint32_t ticket);   false: the wait was given up
//     bool ok() const; void give_up();         shared by the rank's threads, read after a sync
#pragma once

#include <initializer_list>

#include "schedule.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
namespace pk {
template <class T>
using shared_atomic = cuda::atomic<T, cuda::thread_scope_system>;
inline constexpr auto kRelaxed = cuda::memory_order_relaxed;
inline constexpr auto kAcquire = cuda::memory_order_acquire;
inline constexpr auto kRelease = cuda::memory_order_release;
inline constexpr auto kBoth = cuda::memory_order_acq_rel;
}  // namespace pk
#else
#include <atomic>
namespace pk {
template <class T>
using shared_atomic = std::atomic<T>;
inline constexpr auto kRelaxed = std::memory_order_relaxed;
inline constexpr auto kAcquire = std::memory_order_acquire;
inline constexpr auto kRelease = std::memory_order_release;
inline constexpr auto kBoth = std::memory_order_acq_rel;
}  // namespace pk
#endif

namespace pk {

enum class Operation : std::uint32_t {
  barrier,
  exchange,
  all_reduce,
  reduce_scatter,
  all_gather,
  gradient_norm,
  sharded_step,
};

enum class Reduction : std::uint32_t {
  mean,   // sum of w_i s_i x_i over sum of w_i
  sum,    // sum of s_i x_i over sum of w_i
  total,  // sum of s_i x_i
};

// What a rank says when it enters a collective.
struct Header {
  Operation operation = Operation::barrier;
  Reduction reduction = Reduction::mean;
  std::uint64_t signature = 0;  // hash of count, shapes and dtypes
  std::uint64_t layout = 0;     // hash of the order of elements in memory
  std::uint64_t placement = 0;  // hash of the places in shared memory; 0: not all of it is there
  double weight = 1.0;          // items that this rank's values stand for
  double scale = 1.0;           // a factor its values still need
  std::uint64_t fault = 0;      // not 0: this rank's caller gave something it must refuse
};

// Header::placement: FNV-1a, word by word, over (segment, offset) of each tensor; never 0.
class PlacementHash {
 public:
  void add(std::uint64_t segment, std::uint64_t offset) {
    for (const std::uint64_t word : {segment, offset}) hash_ = (hash_ ^ word) * 0x100000001b3u;
  }
  std::uint64_t value() const { return hash_ ? hash_ : 1; }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325u;
};

struct alignas(kLine) Signal {
  shared_atomic<std::uint32_t> ticket;
  shared_atomic<std::uint32_t> sleepers;
  Header header;
};
static_assert(sizeof(Signal) == kLine, "a signal is one cache line");

// The memory orders and slots, as a type so that the race tests can take one away.
struct Ordered {
  static constexpr auto release = kRelease;
  static constexpr auto acquire = kAcquire;
  static constexpr std::uint32_t slots = 2;
};

// Announce the next gate and wait for every peer there. All threads of the rank call it; what any
// of them wrote before is visible to every thread of every rank after.
template <class Order = Ordered, class Team>
PK_HD bool gate(Team& team) {
  team.sync();
  if (team.thread() < team.waiters()) {
    const std::uint32_t ticket = team.ticket() + 1;
    if (team.thread() == 0) {
      Signal& mine = team.signal(team.rank(), ticket);
      mine.ticket.store(ticket, Order::release);
      team.wake(mine);
    }
    for (int step = 1 + team.thread(); step < team.size(); step += team.waiters()) {
      const int peer = (team.rank() + step) % team.size();
      Signal& theirs = team.signal(peer, ticket);
      if (theirs.ticket.load(Order::acquire) != ticket && !team.await(peer, theirs, ticket)) {
        team.give_up();
        break;
      }
    }
  }
  team.advance();
  team.sync();
  return team.ok();
}

// Which of its two slots a rank fills before its next gate.
template <class Order = Ordered, class Team>
PK_HD std::uint32_t filling_slot(const Team& team) {
  return (team.ticket() + 1) % Order::slots;
}
// Which slot became readable with the last gate.
template <class Order = Ordered, class Team>
PK_HD std::uint32_t reading_slot(const Team& team) {
  return team.ticket() % Order::slots;
}

enum class Outcome : int {
  done = 0,
  mismatch,     // the headers disagree
  bad_weight,   // a weight, or their sum, is negative or not finite
  fault,        // some rank's caller must be refused
  layouts,      // same shapes, other order in memory: copy to contiguous and call again
  peer_lost,    // a peer is gone
  timeout,      // a peer did not come in time
  interrupted,  // the user pressed Ctrl-C here
};
inline constexpr const char* kOutcomeNames[] = {
    "done", "mismatch", "bad_weight", "fault", "layouts", "peer_lost", "timeout", "interrupted"};
static_assert(sizeof kOutcomeNames / sizeof *kOutcomeNames == int(Outcome::interrupted) + 1);

// All ranks conclude it alike, nothing was changed and the group stays usable.
PK_HD inline bool is_refusal(Outcome outcome) {
  return outcome == Outcome::mismatch || outcome == Outcome::bad_weight ||
         outcome == Outcome::fault;
}

inline constexpr int kMaxRanks = 64;

// What all ranks conclude from the same headers, before anything is written.
struct Verdict {
  Outcome outcome = Outcome::done;
  bool in_place = false;   // everybody's tensors lie at the same places of shared memory
  bool all_staged = true;  // nobody's do
  bool wide = false;       // a coefficient is too small or large for float: add in double
  double total = 0.0;      // sum of the weights
  int readers = 0;         // ranks whose values count
  int source[kMaxRanks];   // those ranks, ascending: the order of summation
  double coefficient[kMaxRanks];
  Header heard[kMaxRanks];  // what it was concluded from
};

PK_HD inline bool is_weight(double w) { return w >= 0.0 && w <= 1.7976931348623157e308; }

// Sum with the lost low part carried along (Neumaier 1974): exact for any counts of items.
PK_HD inline double sum_of_weights(const Header* headers, int size) {
  double sum = 0.0, lost = 0.0;
  for (int r = 0; r < size; ++r) {
    const double w = headers[r].weight, next = sum + w;
    lost += sum >= w ? (sum - next) + w : (w - next) + sum;
    sum = next;
  }
  return sum + lost;
}

// Conclude from verdict.heard; sets everything else of the verdict.
PK_HD inline void decide(int size, Verdict& verdict) {
  const Header* headers = verdict.heard;
  const Header& first = headers[0];
  verdict.outcome = Outcome::done;
  verdict.in_place = verdict.wide = false;
  verdict.all_staged = true;
  verdict.total = 0.0;
  verdict.readers = 0;
  bool same_place = first.placement != 0;
  for (int r = 0; r < size; ++r) {
    const Header& h = headers[r];
    if (h.operation != first.operation) verdict.outcome = Outcome::mismatch;
    if (h.placement != first.placement) same_place = false;
    if (h.placement != 0) verdict.all_staged = false;
  }
  for (int r = 0; r < size && verdict.outcome == Outcome::done; ++r) {
    if (headers[r].fault) verdict.outcome = Outcome::fault;
  }
  for (int r = 0; r < size && verdict.outcome == Outcome::done; ++r) {
    if (!is_weight(headers[r].weight)) verdict.outcome = Outcome::bad_weight;
  }
  for (int r = 0; r < size && verdict.outcome == Outcome::done; ++r) {
    const Header& h = headers[r];
    if (h.signature != first.signature || h.reduction != first.reduction) {
      verdict.outcome = Outcome::mismatch;
    }
  }
  for (int r = 0; r < size && verdict.outcome == Outcome::done; ++r) {
    if (headers[r].layout != first.layout) verdict.outcome = Outcome::layouts;
  }
  if (verdict.outcome != Outcome::done) return;
  verdict.in_place = same_place;

  verdict.total = sum_of_weights(headers, size);
  if (!is_weight(verdict.total)) {
    verdict.outcome = Outcome::bad_weight;
    return;
  }
  for (int r = 0; r < size; ++r) {
    const double w = headers[r].weight;
    if (w == 0.0 && first.reduction != Reduction::total) continue;  // never read
    const double c = first.reduction == Reduction::mean  ? headers[r].scale * (w / verdict.total)
                     : first.reduction == Reduction::sum ? headers[r].scale / verdict.total
                                                         : headers[r].scale;
    if (!(c >= 0x1p-100 && c <= 0x1p100)) verdict.wide = true;
    verdict.source[verdict.readers] = r;
    verdict.coefficient[verdict.readers++] = c;
  }
}

// Enter a collective: say `header`, hear everybody's, conclude the same as everybody.
template <class Order = Ordered, class Team>
PK_HD bool open(Team& team, const Header& header, Verdict& verdict) {
  if (team.thread() == 0) team.signal(team.rank(), team.ticket() + 1).header = header;
  if (!gate<Order>(team)) return false;
  if (team.thread() < team.waiters()) {
    for (int r = team.thread(); r < team.size(); r += team.waiters()) {
      verdict.heard[r] = team.signal(r, team.ticket()).header;
    }
  }
  if (team.waiters() > 1) team.sync();
  if (team.thread() == 0) decide(team.size(), verdict);
  team.sync();  // the verdict is one object of all threads
  return true;
}

// The staged way of one collective, `chunks` steps long. Between two gates each rank fills a slot
// with chunk s, adds up chunk s-1 and fetches chunk s-2, so one gate a chunk is enough:
//     fill(s)    copy this rank's part of chunk s into its slot, for the owners to read
//     reduce(s)  add up this rank's shard of chunk s; leave the result in its slot
//     drain(s)   copy the results of chunk s from their owners' slots
// The opening gate has already published fill(0) when `filled` is set.
template <class Order = Ordered, class Team, class Work>
PK_HD bool pipeline(Team& team, Work& work, std::uint64_t chunks, bool filled) {
  for (std::uint64_t step = filled ? 1 : 0; step < chunks + 2; ++step) {
    if (step < chunks) work.fill(step, filling_slot<Order>(team));
    if (step >= 1 && step <= chunks) {
      work.reduce(step - 1, reading_slot<Order>(team), filling_slot<Order>(team));
    }
    if (step >= 2) work.drain(step - 2, reading_slot<Order>(team));
    if (step <= chunks && !gate<Order>(team)) return false;
  }
  return true;
}

}  // namespace pk
