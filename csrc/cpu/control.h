// What one rank keeps in the shared control segment, and how ranks wait for each other.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "../protocol.h"
#include "process.h"
#include "segment.h"

namespace pk {

inline constexpr std::uint64_t kMailBytes = 16384;

// One rank's slab of the control segment; its staging slots follow.
struct alignas(kLine) Control {
  Signal signal[2];
  // Rank 0's is the group's: 0 while all is well, then `cause << 16 | rank` of the first failure.
  alignas(kLine) shared_atomic<std::uint32_t> broken;
  shared_atomic<std::uint32_t> left;       // not 0: this rank closed the group
  alignas(kLine) std::uint64_t mail_left;  // bytes of the message from this mail on
  std::byte mail[kMailBytes];
};

// The staging area of a rank: two slots of inputs, two of results.
struct Staging {
  std::uint64_t slot_bytes = 0;  // a multiple of a line times the number of ranks
  int size = 1;
  std::uint64_t chunk_bytes() const { return slot_bytes / std::uint64_t(size) / kLine * kLine; }
  std::uint64_t control_bytes() const {
    return sizeof(Control) + 2 * slot_bytes + 2 * chunk_bytes();
  }
  std::byte* inputs(std::byte* slab, std::uint32_t slot) const {
    return slab + sizeof(Control) + slot * slot_bytes;
  }
  std::byte* results(std::byte* slab, std::uint32_t slot) const {
    return slab + sizeof(Control) + 2 * slot_bytes + slot * chunk_bytes();
  }
};

// The other ranks of a group: their signals, whether they live, and why the group broke if it did.
class Peers {
 public:
  // `pids[r]` is the process of rank r; 0 for a rank in this process, which cannot die alone.
  // `cores` is how many the ranks have to themselves all together: with fewer than ranks, waiting
  // gives the core away at once.
  Peers(std::shared_ptr<Segment> control, int rank, int size, const std::vector<int>& pids,
        int cores, double timeout_seconds);
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  Control& control(int rank) const { return *reinterpret_cast<Control*>(slab(rank)); }
  std::byte* slab(int rank) const { return control_->slab(rank); }
  Signal& signal(int rank, std::uint32_t ticket) const { return control(rank).signal[ticket & 1]; }

  void wake(Signal& signal) const;
  // Wait until `peer` reaches gate `ticket`: pause a little, then sleep on its line. False: given
  // up, and the group is broken. `interrupted` is asked now and then (may be empty).
  bool await(int peer, Signal& signal, std::uint32_t ticket,
             const std::function<bool()>& interrupted) const;

  void leave() const;
  void break_group(Outcome cause, int rank) const;
  Outcome cause() const;  // Outcome::done while the group is whole
  int culprit() const;    // the rank that broke it

 private:
  using Clock = std::chrono::steady_clock;
  bool arrived(int peer, std::uint32_t ticket) const;
  void wake_all(int rank) const;
  int lost_peer(std::uint32_t ticket) const;  // dead or gone without reaching the gate; or -1

  std::shared_ptr<Segment> control_;
  int rank_;
  int size_;
  std::vector<Process> processes_;
  Clock::duration timeout_;
  int spins_;
};

}  // namespace pk
