#include "communicator.h"

#include <algorithm>
#include <cstring>

#include "team.h"

namespace pk {
namespace {

// Up to here every rank adds up everything for itself: one gate instead of two, and the spare
// arithmetic costs less than a gate.
constexpr std::uint64_t kOneShotBytes = 16384;

Cut cut_of_flat(const TensorList& list, std::uint64_t element_bytes, int size) {
  return {list.spans().front().bytes, element_bytes, size};
}

// Steps that a staged collective takes; the first shard is the largest. A single rank stages
// nothing.
std::uint64_t chunks_of(const Cut& cut, std::uint64_t chunk_bytes) {
  return cut.size == 1 ? 0 : ceil_div(cut(0).size(), chunk_bytes);
}

// An empty shard may have no address, which memmove must not see.
void copy_bytes(std::byte* to, const std::byte* from, std::uint64_t bytes) {
  if (bytes > 0) std::memmove(to, from, bytes);
}

}  // namespace

// The two ways of a reduction for one thread of one rank.
class Communicator::Reducing {
 public:
  // `scatter`: only this rank's part is made, and goes to `shard` (null where it is empty). Else
  // the result replaces the tensors on every rank.
  Reducing(Communicator& comm, Team& team, const Verdict& verdict, const TensorList& list,
           bool scatter, std::byte* shard, const Cut& cut)
      : comm_(comm),
        team_(team),
        verdict_(verdict),
        list_(list),
        scatter_(scatter),
        shard_(shard),
        cut_(cut),
        chunk_(comm.staging_.chunk_bytes()) {}

  void fill(std::uint64_t chunk, std::uint32_t slot) {
    std::byte* inputs = comm_.staging_.inputs(slab(rank()), slot);
    for (int step = 0; step < size(); ++step) {
      const int owner = comm_.visited(step);
      if (owner == rank()) continue;
      const Range whole = chunk_of(cut_(owner), chunk_, chunk), part = team_.part(whole);
      std::byte* to = inputs + std::uint64_t(owner) * chunk_ + (part.begin - whole.begin);
      list_.each(part,
                 [&](const Piece& p) { std::memcpy(to + p.at, p.span.data + p.offset, p.bytes); });
      comm_.traffic_.staged += part.size();
    }
  }

  void reduce(std::uint64_t chunk, std::uint32_t reading, std::uint32_t filling) {
    const Range whole = chunk_of(cut_(rank()), chunk_, chunk), part = team_.part(whole);
    const std::uint64_t skip = part.begin - whole.begin;
    const std::byte* inputs[kMaxRanks];
    for (int r = 0; r < size(); ++r) {
      inputs[r] = comm_.staging_.inputs(slab(r), reading) + std::uint64_t(rank()) * chunk_ + skip;
    }
    std::byte* results = comm_.staging_.results(slab(rank()), filling) + skip;
    list_.each(part, [&](const Piece& p) {
      std::byte* own = p.span.data + p.offset;
      void* out[] = {scatter_ ? shard_ + (part.begin - cut_(rank()).begin) : own, results + p.at};
      const bool publish = !scatter_ && size() > 1;
      sum(p, [&](int r) { return r == rank() ? own : inputs[r] + p.at; }, out, publish ? 2 : 1);
    });
  }

  void drain(std::uint64_t chunk, std::uint32_t slot) {
    if (scatter_) return;
    for (int step = 0; step < size(); ++step) {
      const int owner = comm_.visited(step);
      if (owner == rank()) continue;
      const Range whole = chunk_of(cut_(owner), chunk_, chunk), part = team_.part(whole);
      const std::byte* from =
          comm_.staging_.results(slab(owner), slot) + (part.begin - whole.begin);
      list_.each(
          part, [&](const Piece& p) { std::memcpy(p.span.data + p.offset, from + p.at, p.bytes); });
      comm_.traffic_.staged += part.size();
    }
  }

  void in_place() {
    const Range part = team_.part(cut_(rank()));
    list_.each(part, [&](const Piece& p) {
      std::byte* own = p.span.data + p.offset;
      const auto at = [&](int r) { return own + (r - rank()) * p.span.stride; };
      void* out[kMaxRanks];
      if (scatter_) {
        out[0] = shard_ + (part.begin - cut_(rank()).begin);
      } else {
        for (int step = 0; step < size(); ++step) out[step] = at(comm_.visited(step));
      }
      sum(p, at, out, scatter_ ? 1 : size());
    });
  }

  // Small lists: everything of everybody lies in one slot, and each rank adds up all of it.
  void fill_one_shot(std::uint32_t slot) {
    std::byte* to = comm_.staging_.inputs(slab(rank()), slot);
    list_.each({0, list_.bytes()},
               [&](const Piece& p) { std::memcpy(to + p.at, p.span.data, p.bytes); });
    comm_.traffic_.staged += list_.bytes();
  }

  void reduce_one_shot(std::uint32_t slot) {
    list_.each({0, list_.bytes()}, [&](const Piece& p) {
      void* out[] = {p.span.data};
      sum(p, [&](int r) { return comm_.staging_.inputs(slab(r), slot) + p.at; }, out, 1);
    });
  }

 private:
  template <class Where>
  void sum(const Piece& piece, Where where, void* const* out, int outputs) {
    const void* in[kMaxRanks];
    for (int k = 0; k < verdict_.readers; ++k) in[k] = where(verdict_.source[k]);
    const std::uint64_t count = piece.bytes / size_of(piece.span.dtype);
    comm_.kernels_.weighted_sum({piece.span.dtype, verdict_.wide, verdict_.readers, outputs, in,
                                 verdict_.coefficient, out, count});
    comm_.traffic_.read += piece.bytes * std::uint64_t(verdict_.readers);
    comm_.traffic_.written += piece.bytes * std::uint64_t(outputs);
  }

  int rank() const { return team_.rank(); }
  int size() const { return team_.size(); }
  std::byte* slab(int r) const { return comm_.peers_.slab(r); }

  Communicator& comm_;
  Team& team_;
  const Verdict& verdict_;
  const TensorList& list_;
  const bool scatter_;
  std::byte* const shard_;
  const Cut& cut_;
  const std::uint64_t chunk_;
};

Communicator::Communicator(std::shared_ptr<Segment> control, int rank, int size,
                           const std::vector<int>& pids, int cores, std::uint64_t slot_bytes,
                           double timeout_seconds, bool ring)
    : peers_(std::move(control), rank, size, pids, cores, timeout_seconds),
      staging_{slot_bytes, size},
      ring_(ring),
      kernels_(kernels()) {}

std::uint64_t Communicator::control_bytes(int size, std::uint64_t slot_bytes) {
  return Staging{slot_bytes, size}.control_bytes();
}

void Communicator::add_segment(const std::shared_ptr<Segment>& segment, std::uint64_t name) {
  std::size_t kept = 0;  // forget those whose last tensor is gone
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    if (segments_[i].expired()) continue;
    segments_[kept] = segments_[i];
    names_[kept++] = names_[i];
  }
  segments_.resize(kept);
  names_.resize(kept);
  segments_.push_back(segment);
  names_.push_back(name);
}

int Communicator::visited(int step) const { return ring_ ? (rank() + 1 + step) % size() : step; }

template <class Body>
Result Communicator::collective(std::uint64_t bytes, int threads, const Interrupted& stop,
                                Body body) {
  if (peers_.cause() != Outcome::done) return {peers_.cause(), peers_.culprit(), 0.0};
  Meeting meeting{peers_, ticket_, stop};
  Verdict verdict;
  run_team(meeting, useful_threads(bytes, threads), [&](Team& team) { body(team, verdict); });
  if (!meeting.gave_up) return {verdict.outcome, -1, verdict.total};
  for (const auto& weak : segments_) {
    if (const auto segment = weak.lock()) segment->detach();
  }
  return {peers_.cause(), peers_.culprit(), 0.0};
}

Result Communicator::reduce(const TensorList& list, std::byte* shard, const Cut& cut, Header header,
                            int threads, const Interrupted& stop) {
  const std::uint64_t chunks = chunks_of(cut, staging_.chunk_bytes());
  const bool scatter = header.operation == Operation::reduce_scatter;
  const bool one_shot = !scatter && list.bytes() <= min_u64(kOneShotBytes, staging_.slot_bytes);
  header.placement = list.placement();
  const bool staged = header.placement == 0 && !header.fault && size() > 1;

  return collective(list.bytes(), threads, stop, [&](Team& team, Verdict& verdict) {
    Reducing work(*this, team, verdict, list, scatter, shard, cut);
    const auto fill_first = [&] {
      if (one_shot) {
        work.fill_one_shot(filling_slot(team));
      } else if (chunks > 0) {
        work.fill(0, filling_slot(team));
      }
    };
    if (staged) fill_first();
    if (!open(team, header, verdict) || verdict.outcome != Outcome::done) return;
    if (verdict.in_place || size() == 1) {
      const bool nothing = size() == 1 && verdict.readers == 1 && verdict.coefficient[0] == 1.0;
      if (!nothing || scatter) work.in_place();
      gate(team);
      return;
    }
    // Where some tensors lie in shared memory and others not, nobody's first fill counts.
    const bool filled = verdict.all_staged;
    if (!one_shot) {
      pipeline(team, work, chunks, filled);
      return;
    }
    if (!filled) {
      work.fill_one_shot(filling_slot(team));
      if (!gate(team)) return;
    }
    work.reduce_one_shot(reading_slot(team));
  });
}

Result Communicator::all_reduce(const TensorList& list, Header header, int threads,
                                const Interrupted& stop) {
  header.operation = Operation::all_reduce;
  return reduce(list, nullptr, {list.bytes(), kLine, size()}, header, threads, stop);
}

Result Communicator::reduce_scatter(const TensorList& list, std::byte* shard,
                                    std::uint64_t element_bytes, Header header, int threads,
                                    const Interrupted& stop) {
  header.operation = Operation::reduce_scatter;
  const Cut cut = cut_of_flat(list, element_bytes, size());
  return reduce(list, shard, cut, header, threads, stop);
}

Result Communicator::all_gather(const TensorList& list, const std::byte* shard,
                                std::uint64_t element_bytes, Header header, int threads,
                                const Interrupted& stop) {
  header.operation = Operation::all_gather;
  header.placement = list.placement();
  const Cut cut = cut_of_flat(list, element_bytes, size());
  const std::uint64_t chunk = staging_.slot_bytes;
  const std::uint64_t chunks = chunks_of(cut, chunk);

  return collective(list.bytes(), threads, stop, [&](Team& team, Verdict& verdict) {
    if (!open(team, header, verdict) || verdict.outcome != Outcome::done) return;
    std::byte* whole = list.spans().front().data;
    const Range mine = cut(rank());
    if (verdict.in_place || size() == 1) {  // write the own shard to everybody's tensor
      const Range part = team.part(mine);
      for (int step = 0; step < size(); ++step) {
        const std::ptrdiff_t away = (visited(step) - rank()) * list.spans().front().stride;
        copy_bytes(whole + part.begin + away, shard + (part.begin - mine.begin), part.size());
        traffic_.written += part.size();
      }
      traffic_.read += part.size();
      gate(team);
      return;
    }
    for (std::uint64_t step = 0; step < chunks; ++step) {
      const Range own = chunk_of(mine, chunk, step), part = team.part(own);
      std::byte* slot = staging_.inputs(peers_.slab(rank()), filling_slot(team));
      copy_bytes(slot + (part.begin - own.begin), shard + (part.begin - mine.begin), part.size());
      copy_bytes(whole + part.begin, shard + (part.begin - mine.begin), part.size());
      traffic_.staged += part.size();
      if (!gate(team)) return;
      for (int next = 0; next < size(); ++next) {
        const int owner = visited(next);
        if (owner == rank()) continue;
        const Range theirs = chunk_of(cut(owner), chunk, step), take = team.part(theirs);
        const std::byte* from = staging_.inputs(peers_.slab(owner), reading_slot(team));
        copy_bytes(whole + take.begin, from + (take.begin - theirs.begin), take.size());
        traffic_.staged += take.size();
      }
    }
  });
}

Result Communicator::explained(const std::function<Result(const Interrupted&)>& collective,
                               const std::string& told) {
  const Interrupted never;
  Result result = collective(never);
  if (result.outcome == Outcome::layouts) result = collective(never);  // peers come in row-major
  if (!is_refusal(result.outcome)) return result;
  std::vector<std::string> heard;
  const Result exchanged = exchange(told, 0, heard, never);
  if (exchanged.outcome != Outcome::done) return exchanged;
  result.heard = std::move(heard);
  return result;
}

Result Communicator::run(std::uint64_t bytes, int threads, const Interrupted& stop,
                         const std::function<void(Team&, Verdict&)>& body) {
  return collective(bytes, threads, stop, body);
}

Result Communicator::barrier(const Interrupted& stop) {
  Header header;
  header.operation = Operation::barrier;
  return collective(0, 1, stop, [&](Team& team, Verdict& verdict) { open(team, header, verdict); });
}

Result Communicator::exchange(const std::string& message, std::uint64_t subject,
                              std::vector<std::string>& messages, const Interrupted& stop) {
  Header header;
  header.operation = Operation::exchange;
  header.signature = subject;
  messages.assign(std::size_t(size()), {});
  return collective(0, 1, stop, [&](Team& team, Verdict& verdict) {
    bool more = true;
    for (std::uint64_t sent = 0; more; sent += kMailBytes) {
      Control& mine = peers_.control(rank());
      mine.mail_left = sent < message.size() ? message.size() - sent : 0;
      std::memcpy(mine.mail, message.data() + (message.size() - mine.mail_left),
                  min_u64(kMailBytes, mine.mail_left));
      if (sent == 0 ? !open(team, header, verdict) : !gate(team)) return;
      if (verdict.outcome != Outcome::done) return;
      more = false;
      for (int r = 0; r < size(); ++r) {
        const Control& theirs = peers_.control(r);
        messages[std::size_t(r)].append(reinterpret_cast<const char*>(theirs.mail),
                                        min_u64(kMailBytes, theirs.mail_left));
        more = more || theirs.mail_left > kMailBytes;
      }
      if (!gate(team)) return;  // everybody has read the mail
    }
  });
}

}  // namespace pk
