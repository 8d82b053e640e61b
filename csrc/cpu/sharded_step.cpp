#include "sharded_step.h"

#include <algorithm>

#include "team.h"

namespace pk {
namespace {

// From here on parameters go past the caches: what a step moves does not stay there until the next
// forward, and lines of a peer need not come here only to be overwritten.
constexpr std::uint64_t kStreamBytes = 32 << 20;

}  // namespace

static_assert(kMaxInputs >= kMaxRanks);

// The ranks' gradients of a stretch, with the factor each one needs.
class ShardedStep::Gradient {
 public:
  Gradient(const StepParameter& p, std::uint64_t first, bool averaged, const Verdict& verdict,
           const Header& header, int rank, bool negate) {
    const std::byte* own = p.grad + first * size_of(p.grad_dtype);
    if (averaged) {
      add(own, header.scale, negate);
      sum.wide = !(header.scale >= 0x1p-100 && header.scale <= 0x1p100);
    } else {
      sum.wide = verdict.wide;
      for (int k = 0; k < verdict.readers; ++k) {
        add(own + (verdict.source[k] - rank) * p.grad_stride, verdict.coefficient[k], negate);
      }
    }
    sum.dtype = p.grad_dtype;
    sum.in = in_;
    sum.coefficient = coefficient_;
  }
  Gradient(const Gradient&) = delete;
  Gradient& operator=(const Gradient&) = delete;

  GradientSum sum{};

 private:
  void add(const std::byte* in, double coefficient, bool negate) {
    in_[sum.inputs] = in;
    coefficient_[sum.inputs++] = negate ? -coefficient : coefficient;
  }
  const void* in_[kMaxInputs];
  double coefficient_[kMaxInputs];
};

std::uint64_t ShardedStep::active_elements() const {
  std::uint64_t sum = 0;
  for (const OwnedPiece& piece : pieces) {
    if (parameters[piece.parameter].grad) sum += piece.count;
  }
  return sum;
}

// Call visit(piece, from, count) for this thread's share of the elements that move, cut on blocks.
template <class Visit>
void ShardedStep::each_part(int thread, int threads, Visit visit) const {
  const Range share = shard_bounds(active_elements(), threads, thread);
  std::uint64_t begin = 0;  // of the piece, counted over all that move
  for (const OwnedPiece& piece : pieces) {
    if (!parameters[piece.parameter].grad) continue;
    const auto cut = [&](std::uint64_t at) {
      const std::uint64_t into = at > begin ? at - begin : 0;
      return min_u64(piece.count, round_up(into, kMomentBlock));
    };
    const std::uint64_t from = cut(share.begin), to = cut(share.end);
    if (from < to) visit(piece, from, to - from);
    begin += piece.count;
  }
}

Result ShardedStep::measure(Communicator& comm, Header header, int threads,
                            const Communicator::Interrupted& stop) {
  header.operation = Operation::gradient_norm;
  header.placement = shared_->placement();
  struct Sums {
    double split = 0.0, whole = 0.0;
  };
  std::vector<Sums> sums(std::size_t(std::max(threads, 1)));
  const auto body = [&](Team& team, Verdict& verdict) {
    if (!open(team, header, verdict) || verdict.outcome != Outcome::done) return;
    Sums mine;  // apart from the other threads' until the end: they would share a cache line
    each_part(team.thread(), team.threads(),
              [&](const OwnedPiece& piece, std::uint64_t from, std::uint64_t count) {
                const StepParameter& p = parameters[piece.parameter];
                if (p.in_norm == InNorm::elsewhere) return;
                const Gradient gradient(p, piece.first + from, averaged_, verdict, header,
                                        team.rank(), false);
                (p.in_norm == InNorm::split ? mine.split : mine.whole) +=
                    kernels().sum_of_squares(gradient.sum, count);
                read_ += count * size_of(p.grad_dtype) * std::uint64_t(gradient.sum.inputs);
              });
    sums[std::size_t(team.thread())] = mine;
  };
  const Result result = comm.run(active_elements() * sizeof(float), threads, stop, body);
  split_squares = squares = 0.0;
  for (const Sums& part : sums) {
    split_squares += part.split;
    squares += part.whole;
  }
  return result;
}

void ShardedStep::update(const OwnedPiece& piece, std::uint64_t from, std::uint64_t count,
                         const Verdict& verdict, const Header& header, int rank, int size,
                         bool stream) {
  const StepParameter& p = parameters[piece.parameter];
  const StepSetting& setting = settings[p.setting];
  const std::uint64_t first = piece.first + from, block = from / kMomentBlock;
  const Gradient gradient(p, first, averaged_, verdict, header, rank, setting.maximize);
  std::byte* own = p.param + first * size_of(p.dtype);
  void* out[kMaxRanks];
  const int outputs = p.param_stride == 0 ? 1 : size;
  for (int r = 0; r < outputs; ++r) {
    out[r] = p.param_stride == 0 ? own : own + (r - rank) * p.param_stride;
    stream = stream && reinterpret_cast<std::uintptr_t>(out[r]) % kLine == 0;
  }

  MomentStorage m = piece.moments;
  const std::uint64_t bytes = m.kind == Moments::int8   ? 1
                              : m.kind == Moments::bf16 ? 2
                              : p.dtype == Dtype::f64   ? 8
                                                        : 4;
  const auto skip = [&](void*& moment, float*& scale) {
    if (moment) moment = static_cast<std::byte*>(moment) + from * bytes;
    if (scale) scale += block;
  };
  skip(m.exp_avg, m.exp_avg_scale);
  skip(m.exp_avg_sq, m.exp_avg_sq_scale);
  skip(m.max_exp_avg_sq, m.max_exp_avg_sq_scale);
  float* master = piece.master ? piece.master + from : nullptr;
  kernels().adam({setting.adam, gradient.sum, p.dtype, p.stochastic && !master, own, master, m,
                  outputs, out, count, first / kMomentBlock, setting.count, piece.number, stream});

  const std::uint64_t moments = bytes * (m.max_exp_avg_sq ? 3 : 2);
  const std::uint64_t value = master ? sizeof(float) : size_of(p.dtype);
  const std::uint64_t inputs = std::uint64_t(gradient.sum.inputs) * size_of(p.grad_dtype);
  read_ += count * (inputs + value + moments);
  written_ +=
      count * (size_of(p.dtype) * std::uint64_t(outputs) + moments + (master ? sizeof(float) : 0));
}

Result ShardedStep::run(Communicator& comm, Header header, int threads,
                        const Communicator::Interrupted& stop) {
  header.operation = Operation::sharded_step;
  header.placement = shared_->placement();
  const std::uint64_t bytes = active_elements() * 4 * sizeof(float);
  const auto body = [&](Team& team, Verdict& verdict) {
    if (!open(team, header, verdict) || verdict.outcome != Outcome::done) return;
    each_part(team.thread(), team.threads(),
              [&](const OwnedPiece& piece, std::uint64_t from, std::uint64_t count) {
                update(piece, from, count, verdict, header, team.rank(), team.size(),
                       bytes >= kStreamBytes);
              });
    gate(team);  // parameters are whole, and nobody reads gradients any more
  };
  return comm.run(bytes, threads, stop, body);
}

}  // namespace pk
