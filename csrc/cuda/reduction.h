// All-reduce, reduce-scatter and all-gather as one block of a rank runs them. Host and device.
//
// Every block takes its share of each rank's shard, so only blocks of one number meet; a shard's
// share moves in chunks. Ways, as on the CPU: in place where every rank reaches all tensors; else
// by way of staging slots in control memory, in a pipeline; and "one-shot" for small tensors, where
// each rank adds up everything for itself.
#pragma once

#include "team.h"
#include "vectors.h"

namespace pk {

// A tensor in a list. In segment `segment` it lies at `offset` on every rank; -1: in none.
struct Span {
  std::byte* data;
  std::uint64_t bytes;
  std::uint64_t begin;  // where it starts in the list's stretch, on a line
  std::uint64_t offset;
  int segment;
  Dtype dtype;
};

// A list of tensors as one stretch of bytes: the one in `only`, or those of a table.
struct Spans {
  Span only;
  const Span* table;
  int count;
  std::uint64_t bytes;

  PK_HD const Span& operator[](int i) const { return table ? table[i] : only; }

  // Call visit(span, offset in it, bytes, offset in the range) for every tensor that `range` covers
  // some of.
  template <class Visit>
  PK_HD void each(Range range, Visit visit) const {
    int first = 0, behind = count;  // the last that begins at or before the range
    while (behind - first > 1) {
      const int middle = (first + behind) / 2;
      ((*this)[middle].begin <= range.begin ? first : behind) = middle;
    }
    for (int i = first; i < count && (*this)[i].begin < range.end; ++i) {
      const Span& span = (*this)[i];
      const std::uint64_t begin = max_u64(range.begin, span.begin);
      const std::uint64_t end = min_u64(range.end, span.begin + span.bytes);
      if (begin < end) visit(span, begin - span.begin, end - begin, begin - range.begin);
    }
  }
};

// kMeets: blocks of this call wait for each other, so all must be on the GPU together.
struct ReduceCall {
  static constexpr bool kMeets = true;
  const Endpoint* endpoint;
  Entry entry;
  Spans spans;
  Cut cut;
  bool one_shot;
  bool scatter;
  std::byte* shard;  // where the result of a reduce-scatter goes
};

struct GatherCall {
  static constexpr bool kMeets = true;
  const Endpoint* endpoint;
  Entry entry;
  Spans spans;  // the one whole tensor
  Cut cut;
  const std::byte* shard;
};

template <class Block>
class Reducing {
 public:
  PK_HD Reducing(Team<Block>& team, const ReduceCall& call)
      : team_(team),
        call_(call),
        endpoint_(team.endpoint()),
        chunk_(endpoint_.layout.chunk_bytes()) {}

  PK_HD std::uint64_t chunks() const {  // of the largest share, the same on every rank and block
    return ceil_div(share_of(call_.cut(0), team_.block().count(), 0).size(), chunk_);
  }

  PK_HD void fill(std::uint64_t chunk, std::uint32_t slot) {
    for (int step = 0; step < endpoint_.size; ++step) {
      const int owner = endpoint_.visited(step);
      if (owner == endpoint_.rank) continue;
      std::byte* to = mine(inputs(slot) + std::uint64_t(owner) * chunk_);
      copy_out(chunk_of(team_.part(call_.cut(owner)), chunk_, chunk), to);
    }
  }

  PK_HD void reduce(std::uint64_t chunk, std::uint32_t reading, std::uint32_t filling) {
    const Range shard = call_.cut(endpoint_.rank);
    const Range range = chunk_of(team_.part(shard), chunk_, chunk);
    const std::uint64_t in = inputs(reading) + std::uint64_t(endpoint_.rank) * chunk_;
    const std::uint64_t result = endpoint_.layout.results(team_.block().index(), filling);
    call_.spans.each(
        range, [&](const Span& span, std::uint64_t offset, std::uint64_t bytes, std::uint64_t at) {
          std::byte* own = span.data + offset;
          SumOverRanks job{span.dtype, bytes, endpoint_.controls, in + at, own, nullptr, 0, {}};
          job.to[0] = call_.scatter ? call_.shard + (range.begin - shard.begin) : own;
          job.to[1] = call_.scatter ? nullptr : mine(result + at);
          sum_over_ranks(team_.block(), endpoint_, team_.verdict(), job);
        });
  }

  PK_HD void drain(std::uint64_t chunk, std::uint32_t slot) {
    if (call_.scatter) return;
    for (int step = 0; step < endpoint_.size; ++step) {
      const int owner = endpoint_.visited(step);
      if (owner == endpoint_.rank) continue;
      const Range range = chunk_of(team_.part(call_.cut(owner)), chunk_, chunk);
      const std::byte* from =
          endpoint_.controls[owner] + endpoint_.layout.results(team_.block().index(), slot);
      call_.spans.each(range, [&](const Span& span, std::uint64_t offset, std::uint64_t bytes,
                                  std::uint64_t at) {
        copy(team_.block(), span.data + offset, from + at, bytes);
      });
    }
  }

  PK_HD void in_place() {
    const Range shard = call_.cut(endpoint_.rank), range = team_.part(shard);
    const bool alone = endpoint_.size == 1;
    call_.spans.each(
        range, [&](const Span& span, std::uint64_t offset, std::uint64_t bytes, std::uint64_t) {
          std::byte* own = span.data + offset;
          const auto where = endpoint_.segments + std::int64_t(span.segment) * endpoint_.size;
          const std::uint64_t at = alone ? 0 : span.offset + offset;
          SumOverRanks job{span.dtype, bytes, where, at, alone ? own : nullptr, nullptr, 0, {}};
          if (call_.scatter) {
            job.to[0] = call_.shard + (range.begin - shard.begin);
          } else if (alone) {
            job.to[0] = own;
          } else {
            job.out = where;
            job.out_offset = at;
          }
          sum_over_ranks(team_.block(), endpoint_, team_.verdict(), job);
        });
  }

  // One-shot: this block's share of everything lies in one slot.
  PK_HD void fill_one_shot(std::uint32_t slot) {
    copy_out(team_.part({0, call_.spans.bytes}), mine(inputs(slot)));
  }
  PK_HD void reduce_one_shot(std::uint32_t slot) {
    const std::uint64_t in = inputs(slot);
    call_.spans.each(
        team_.part({0, call_.spans.bytes}),
        [&](const Span& span, std::uint64_t offset, std::uint64_t bytes, std::uint64_t at) {
          std::byte* own = span.data + offset;
          sum_over_ranks(team_.block(), endpoint_, team_.verdict(),
                         {span.dtype, bytes, endpoint_.controls, in + at, own, nullptr, 0, {own}});
        });
  }

 private:
  PK_HD std::uint64_t inputs(std::uint32_t slot) const {
    return endpoint_.layout.inputs(team_.block().index(), slot);
  }
  PK_HD std::byte* mine(std::uint64_t offset) const {
    return endpoint_.controls[endpoint_.rank] + offset;
  }
  PK_HD void copy_out(Range range, std::byte* to) {
    call_.spans.each(
        range, [&](const Span& span, std::uint64_t offset, std::uint64_t bytes, std::uint64_t at) {
          copy(team_.block(), to + at, span.data + offset, bytes);
        });
  }

  Team<Block>& team_;
  const ReduceCall& call_;
  const Endpoint& endpoint_;
  const std::uint64_t chunk_;
};

// The bodies of the kernels.

template <class Block>
PK_HD PK_INLINE void run(Block& block, const ReduceCall& call) {
  Team<Block> team(block, *call.endpoint);
  Reducing<Block> work(team, call);
  // A single block fills its slot before it opens the call: one gate instead of two.
  const bool one_gate = call.one_shot && block.count() == 1;
  const bool go = team.enter(call.entry, [&] {
    if (one_gate) work.fill_one_shot(filling_slot(team));
  });
  if (go) {
    if (call.one_shot) {
      if (!one_gate) work.fill_one_shot(filling_slot(team));
      if (one_gate || gate(team)) work.reduce_one_shot(reading_slot(team));
    } else if (team.verdict().in_place || team.size() == 1) {
      work.in_place();
      gate(team);
    } else {
      pipeline(team, work, work.chunks(), false);
    }
  }
  team.leave();
}

template <class Block>
PK_HD void gather(Team<Block>& team, const GatherCall& call) {
  const Endpoint& endpoint = team.endpoint();
  const Span& whole = call.spans[0];
  const Range shard = call.cut(endpoint.rank), range = team.part(shard);
  if (team.verdict().in_place || endpoint.size == 1) {  // the own shard to everybody's tensor
    for (int step = 0; step < endpoint.size; ++step) {
      std::byte* to = whole.data;
      if (endpoint.size > 1) {
        to = endpoint.segments[whole.segment * endpoint.size + endpoint.visited(step)] +
             whole.offset;
      }
      copy(team.block(), to + range.begin, call.shard + (range.begin - shard.begin), range.size());
    }
    gate(team);
    return;
  }
  const std::uint64_t slot = endpoint.layout.slot_bytes();
  const std::uint64_t largest = share_of(call.cut(0), team.block().count(), 0).size();
  for (std::uint64_t chunk = 0; chunk * slot < largest; ++chunk) {
    const Range own = chunk_of(range, slot, chunk);
    const auto inputs = [&](std::uint32_t number) {
      return endpoint.layout.inputs(team.block().index(), number);
    };
    const std::byte* from = call.shard + (own.begin - shard.begin);
    copy(team.block(), endpoint.controls[endpoint.rank] + inputs(filling_slot(team)), from,
         own.size());
    copy(team.block(), whole.data + own.begin, from, own.size());
    if (!gate(team)) return;
    for (int step = 0; step < endpoint.size; ++step) {
      const int owner = endpoint.visited(step);
      if (owner == endpoint.rank) continue;
      const Range theirs = chunk_of(team.part(call.cut(owner)), slot, chunk);
      copy(team.block(), whole.data + theirs.begin,
           endpoint.controls[owner] + inputs(reading_slot(team)), theirs.size());
    }
  }
}

template <class Block>
PK_HD PK_INLINE void run(Block& block, const GatherCall& call) {
  Team<Block> team(block, *call.endpoint);
  if (team.enter(call.entry)) gather(team, call);
  team.leave();
}

}  // namespace pk
