#include "control.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace pk {
namespace {

// How long a rank that has a core to itself polls before it sleeps, about 30 microseconds: the
// price of going to sleep and being woken.
constexpr int kSpins = 1000;
constexpr long kSliceNanoseconds = 20'000'000;  // how often a sleeper looks after the living

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex(shared_atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* wait) {
  static_assert(sizeof word == sizeof(std::uint32_t));
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, wait, nullptr, 0);
}

}  // namespace

Peers::Peers(std::shared_ptr<Segment> control, int rank, int size, const std::vector<int>& pids,
             int cores, double timeout_seconds)
    : control_(std::move(control)),
      rank_(rank),
      size_(size),
      timeout_(std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(timeout_seconds))),
      spins_(size <= cores ? kSpins : 0) {
  for (int r = 0; r < size; ++r) {
    processes_.emplace_back(r != rank && r < int(pids.size()) ? pids[r] : 0);
  }
}

void Peers::wake(Signal& signal) const {
  // A read-modify-write on both sides: either we see the sleeper, or it sees our ticket.
  if (signal.sleepers.fetch_add(0, kBoth) != 0) futex(signal.ticket, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Peers::arrived(int peer, std::uint32_t ticket) const {
  return signal(peer, ticket).ticket.load(kAcquire) == ticket;
}

int Peers::lost_peer(std::uint32_t ticket) const {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || arrived(r, ticket)) continue;
    const bool gone = control(r).left.load(kAcquire) != 0 || processes_[std::size_t(r)].gone();
    if (gone && !arrived(r, ticket)) return r;  // its last act may have been to arrive
  }
  return -1;
}

bool Peers::await(int peer, Signal& signal, std::uint32_t ticket,
                  const std::function<bool()>& interrupted) const {
  for (int i = 0; i < spins_; ++i) {
    pause();
    if (signal.ticket.load(kAcquire) == ticket) return true;
  }
  const Clock::time_point deadline = Clock::now() + timeout_;
  const timespec slice{0, kSliceNanoseconds};
  for (;;) {
    signal.sleepers.fetch_add(1, kBoth);
    const std::uint32_t seen = signal.ticket.load(kAcquire);
    if (seen != ticket && cause() == Outcome::done) futex(signal.ticket, FUTEX_WAIT, seen, &slice);
    signal.sleepers.fetch_sub(1, kBoth);

    if (signal.ticket.load(kAcquire) == ticket) return true;
    if (cause() != Outcome::done) return false;
    if (const int lost = lost_peer(ticket); lost >= 0) {
      break_group(Outcome::peer_lost, lost);
      return false;
    }
    if (interrupted && interrupted()) {
      break_group(Outcome::interrupted, rank_);
      return false;
    }
    if (Clock::now() >= deadline) {
      break_group(Outcome::timeout, peer);
      return false;
    }
  }
}

void Peers::break_group(Outcome cause, int rank) const {
  std::uint32_t whole = 0;
  control(0).broken.compare_exchange_strong(whole, std::uint32_t(cause) << 16 | std::uint32_t(rank),
                                            kBoth, kAcquire);
  for (int r = 0; r < size_; ++r) wake_all(r);
}

void Peers::leave() const {
  control(rank_).left.store(1, kRelease);
  wake_all(rank_);
}

void Peers::wake_all(int rank) const {
  for (Signal& signal : control(rank).signal) futex(signal.ticket, FUTEX_WAKE, INT_MAX, nullptr);
}

Outcome Peers::cause() const { return Outcome(control(0).broken.load(kAcquire) >> 16); }

int Peers::culprit() const { return int(control(0).broken.load(kAcquire) & 0xffffu); }

}  // namespace pk
