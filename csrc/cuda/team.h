// One block of a rank as the Team of protocol.h: block b of a rank meets block b of its peers, and
// block 0 opens a call for all blocks of its rank. Host and device.
//
// A `Block` is what runs it, a block of CUDA threads or, in tests, threads of the host:
//     int thread() const, threads() const;   threads of the block
//     int index() const, count() const;      blocks of this rank in this launch
//     void sync();                           a barrier of the block
//     int lane() const, lanes() const;       threads that work on one block of moments, 1 or 32:
//     float largest(float) const;            a warp, and the maximum over it
//     uint64_t nanoseconds() const;          a clock
//     void pause() const;                    between two looks at something awaited
//     BlockState& state();                   one object, shared by the block
#pragma once

#include <cstddef>

#include "control.h"

namespace pk {

inline constexpr int kMaxThreads = 256;

struct BlockState {
  Verdict verdict;
  device_atomic<std::uint32_t> gave_up;
  double sums[kMaxThreads][2];
};

template <class Block>
class Team {
 public:
  PK_HD Team(Block& block, const Endpoint& endpoint)
      : block_(block), endpoint_(endpoint), ticket_(record(block.index()).ticket) {
    if (thread() == 0) block.state().gave_up.store(0, kRelaxed);
  }

  PK_HD int rank() const { return endpoint_.rank; }
  PK_HD int size() const { return endpoint_.size; }
  PK_HD int thread() const { return block_.thread(); }
  PK_HD int threads() const { return block_.threads(); }
  PK_HD int waiters() const { return block_.threads(); }
  PK_HD void sync() { block_.sync(); }
  PK_HD std::uint32_t ticket() const { return ticket_; }
  PK_HD void advance() { ++ticket_; }
  PK_HD Signal& signal(int rank, std::uint32_t ticket) const {
    return *reinterpret_cast<Signal*>(endpoint_.controls[rank] +
                                      endpoint_.layout.signal(block_.index(), ticket));
  }
  PK_HD void wake(Signal&) const {}
  PK_HD bool ok() const { return block_.state().gave_up.load(kRelaxed) == 0; }
  PK_HD void give_up() { block_.state().gave_up.store(1, kRelaxed); }

  PK_HD bool await(int peer, Signal& signal, std::uint32_t ticket) const {
    return wait([&] { return signal.ticket.load(kAcquire) == ticket; }, peer, 1);
  }

  // Enter a call with all blocks of the rank: after `before`, block 0 opens it and tells the others
  // the verdict. Whether the call is to be done.
  template <class Before>
  PK_HD bool enter(const Entry& entry, Before before) {
    if (block_.index() == 0) {
      Verdict& verdict = block_.state().verdict;
      if (thread() == 0 && broken() != 0) give_up();
      sync();
      bool opened = ok();
      if (opened) before();
      if (opened) opened = open(*this, complete(entry), verdict);
      if (thread() == 0) conclude(opened, entry, verdict);
      sync();
      copy_verdict(control().verdict, verdict);
    }
    return meet() && (block_.index() == 0 || goes_on()) && verdict().outcome == Outcome::done;
  }
  PK_HD bool enter(const Entry& entry) {
    return enter(entry, [] {});
  }

  // What block 0 concluded, in this kernel or an earlier one of the same call, and whether the call
  // is to be done.
  PK_HD bool goes_on() {
    copy_verdict(block_.state().verdict, control().verdict);
    sync();
    return verdict().outcome == Outcome::done;
  }
  // Later kernels of this call do nothing.
  PK_HD void call_off() { control().verdict.outcome = Outcome::fault; }

  // A barrier of the blocks of this rank.
  PK_HD bool meet() {
    sync();
    if (thread() == 0 && block_.count() > 1) {
      Control& own = control();
      const std::uint32_t round = own.round.load(kAcquire);
      if (own.arrived.fetch_add(1, kBoth) + 1 == std::uint32_t(block_.count())) {
        own.arrived.store(0, kRelaxed);
        own.round.store(round + 1, kRelease);
      } else if (!wait([&] { return own.round.load(kAcquire) != round; }, rank(), 2)) {
        give_up();
      }
    }
    sync();
    return ok();
  }

  // The last act of every call.
  PK_HD void leave() {
    if (thread() == 0) record(block_.index()).ticket = ticket_;
  }

  PK_HD const Verdict& verdict() const { return block_.state().verdict; }
  PK_HD Block& block() const { return block_; }
  PK_HD const Endpoint& endpoint() const { return endpoint_; }
  PK_HD Control& control() const { return control(rank()); }
  PK_HD Control& control(int rank) const {
    return *reinterpret_cast<Control*>(endpoint_.controls[rank]);
  }
  PK_HD BlockRecord& record(int block) const {  // of one of this rank's blocks
    return *reinterpret_cast<BlockRecord*>(endpoint_.controls[rank()] +
                                           endpoint_.layout.record(block));
  }
  // This block's part of a range of bytes.
  PK_HD Range part(Range whole) const { return share_of(whole, block_.count(), block_.index()); }

 private:
  // Look until `come()`, or the group is broken, or `patience` timeouts have passed.
  template <class Come>
  PK_HD bool wait(Come come, int peer, std::uint64_t patience) const {
    const std::uint64_t start = block_.nanoseconds();
    for (std::uint32_t looks = 1;; ++looks) {
      if (come()) return true;
      if (looks % 64 == 0) {
        if (hopeless()) return false;
        if (block_.nanoseconds() - start > patience * endpoint_.timeout_nanoseconds) {
          break_group(std::uint32_t(Outcome::timeout) << 16 | std::uint32_t(peer));
          return false;
        }
      }
      block_.pause();
    }
  }

  PK_HD std::uint32_t broken() const { return control().broken.load(kRelaxed); }

  // Whether this rank, a peer or the host has broken the group; for those who wait.
  PK_HD bool hopeless() const {
    const std::uint32_t abort = endpoint_.host->abort.load(kRelaxed);
    if (abort != 0) break_group(abort);
    const std::uint32_t cause = broken();
    if (cause != 0) endpoint_.host->broken.store(cause, kRelaxed);
    return cause != 0;
  }

  PK_HD void break_group(std::uint32_t cause) const {
    std::uint32_t whole = 0;
    if (!control().broken.compare_exchange_strong(whole, cause, kBoth, kRelaxed)) cause = whole;
    endpoint_.host->broken.store(cause, kRelaxed);
    for (int r = 0; r < size(); ++r) {
      if (control(r).broken.load(kRelaxed) == 0) control(r).broken.store(cause, kRelaxed);
    }
  }

  PK_HD Header complete(const Entry& entry) const {
    Header header = entry.header;
    if (entry.weight_at) header.weight = *entry.weight_at;
    return header;
  }

  // All of it but what was heard.
  PK_HD void copy_verdict(Verdict& to, const Verdict& from) const {
    const int count = int(offsetof(Verdict, heard) / sizeof(std::uint32_t));
    for (int i = thread(); i < count; i += threads()) {
      reinterpret_cast<std::uint32_t*>(&to)[i] = reinterpret_cast<const std::uint32_t*>(&from)[i];
    }
  }

  PK_HD void conclude(bool opened, const Entry& entry, Verdict& verdict) const {
    if (!opened) {
      verdict.outcome = Outcome::peer_lost;  // or another cause: the host is told which
      endpoint_.host->broken.store(broken(), kRelaxed);
    } else if (verdict.outcome != Outcome::done) {
      const std::uint32_t count = ++control().refusals;
      endpoint_.host->refused.store(count << 8 | std::uint32_t(verdict.outcome), kRelaxed);
    } else if (entry.total_at) {
      *entry.total_at = verdict.total;
    }
  }

  Block& block_;
  const Endpoint& endpoint_;
  std::uint32_t ticket_;
};

}  // namespace pk
