// The optimizer's pass as one block of a rank runs it: the mean gradient of owned elements, its
// norm, and AdamW with the new parameters written to every rank. Host and device.
//
// A step is three kernels: one block a rank opens it and works out what all need (OpenStep), any
// number of blocks update pieces of one kind (Update), and one block a rank closes it (CloseStep).
// Blocks of the second wait for nobody.
//
// A warp works on one block of moments at a time (kMomentBlock elements, the unit of int8 scales),
// each lane on groups of four elements, so that loads of float are 16 bytes wide and adjacent.
#pragma once

#include "../adam.h"
#include "multicast.h"
#include "team.h"

namespace pk {

// A parameter as one step sees it. In a segment it, or its gradient, lies at one offset on every
// rank; segment -1: only this rank's counts.
struct ParameterRow {
  float* steps;  // how often it was stepped; null: it does not move
  AdamSetting setting;
  std::byte* param;
  std::byte* grad;
  std::byte* all_params;  // multicast addresses of both, or null: not asked for
  std::byte* all_grads;
  std::uint64_t param_offset;
  std::uint64_t grad_offset;
  int param_segment;
  int grad_segment;
  Dtype dtype;
  Dtype grad_dtype;
  bool stochastic;  // without a master, bf16: round stochastically
  bool split;
  bool maximize;
  bool aligned;  // every address of it and of its state is a multiple of 16
};

// What this rank owns of a parameter that moves.
struct PieceRow {
  std::uint32_t parameter;
  std::uint32_t number;  // of the parameter at any world size, the key of random bits
  std::uint64_t first;
  std::uint64_t count;
  std::uint64_t unit;  // number of its first block of moments among all that move
  float* master;       // or null
  MomentStorage moments;
};

// A parameter's step as block 0 works it out for all.
struct AdamPlan {
  AdamStep step;
  std::uint64_t count;
};

// The pieces of one kind, or of all.
struct Pieces {
  const ParameterRow* parameters;
  const PieceRow* rows;
  int count;
  std::uint64_t first_unit;
  std::uint64_t units;
  bool averaged;  // gradients are the mean already: read the own ones alone
};

struct NormCall {
  static constexpr bool kMeets = true;
  const Endpoint* endpoint;
  Entry entry;
  Pieces pieces;
  double* squares_at;  // [2]: of parameters that are not split, and of those that are
};

struct OpenStep {
  static constexpr bool kMeets = true;
  const Endpoint* endpoint;
  Entry entry;
  const ParameterRow* parameters;
  AdamPlan* plans;  // one a parameter
  int parameter_count;
  const double* squares_at;  // or null: the norm is not known
  double max_norm;           // 0: do not clip
  bool skip_nonfinite;
  double* report_at;  // or null; [3]: norm, whether it was skipped, total weight
};

// P, G: dtypes of parameter and gradient. S: how moments are stored: as they are computed (float,
// or double for double), bf16, or std::int8_t for int8.
template <class P, class G, class S>
struct Update {
  static constexpr bool kMeets = false;
  const Endpoint* endpoint;
  Pieces pieces;
  const AdamPlan* plans;
};

struct CloseStep {
  static constexpr bool kMeets = true;
  const Endpoint* endpoint;
};

namespace {  // internal linkage, see dtypes.h

inline constexpr int kGroup = 4;

// What a lane moves at once: four elements of two or four bytes, two of eight, four codes.
template <int bytes>
struct Words;
template <>
struct Words<4> {
  using Type = std::uint32_t;
};
template <>
struct Words<8> {
  using Type = Pair;
};
template <>
struct Words<16> {
  using Type = Quad;
};

// Four elements of which `count` exist; whole words where all do and the memory is aligned.
template <class T>
PK_HD inline void load_group(const T* from, int count, bool aligned, T (&x)[kGroup]) {
  constexpr int kParts = sizeof(T) == 8 ? 2 : 1;
  using Word = typename Words<kGroup * sizeof(T) / kParts>::Type;
  from = in_global(from);
  if (aligned && count == kGroup) {
    Word words[kParts];
    for (int i = 0; i < kParts; ++i) words[i] = reinterpret_cast<const Word*>(from)[i];
    memcpy(x, words, sizeof x);
  } else {
    for (int i = 0; i < kGroup; ++i) x[i] = i < count ? from[i] : T{};
  }
}

template <class T>
PK_HD inline void store_group(T* to, int count, bool aligned, const T (&x)[kGroup]) {
  constexpr int kParts = sizeof(T) == 8 ? 2 : 1;
  using Word = typename Words<kGroup * sizeof(T) / kParts>::Type;
  to = in_global(to);
  if (aligned && count == kGroup) {
    Word words[kParts];
    memcpy(words, x, sizeof x);
    for (int i = 0; i < kParts; ++i) store_whole(reinterpret_cast<Word*>(to) + i, words[i]);
  } else {
    for (int i = 0; i < kGroup; ++i) {
      if (i < count) to[i] = x[i];
    }
  }
}

template <class T, class A>
PK_HD inline void load_group(const void* base, std::uint64_t at, int count, bool aligned,
                             A (&x)[kGroup]) {
  T stored[kGroup];
  load_group(static_cast<const T*>(base) + at, count, aligned, stored);
  for (int i = 0; i < kGroup; ++i) x[i] = A(widen(stored[i]));
}

// Of one block of moments, `n` of the groups that one lane has.
template <class Block, int n>
struct Unit {
  static constexpr int kGroups = n;
  static constexpr int kAll = int(kMomentBlock) / kGroup / Block::kLanes;

  std::uint64_t number;  // of the block in its piece
  std::uint64_t at;      // its first element in the piece
  int size;              // elements that exist
  int lane;
  int first;  // group
  bool aligned;

  PK_HD Unit(const Block& block, const PieceRow& piece, std::uint64_t unit, int first, bool aligned)
      : number(unit - piece.unit),
        at(number * kMomentBlock),
        size(int(min_u64(kMomentBlock, piece.count - at))),
        lane(block.lane()),
        first(first),
        aligned(aligned) {}
  template <int m>
  PK_HD Unit(const Unit<Block, m>& all, int first)  // a part of it
      : number(all.number),
        at(all.at),
        size(all.size),
        lane(all.lane),
        first(all.first + first),
        aligned(all.aligned) {}

  PK_HD int index(int group) const { return ((first + group) * Block::kLanes + lane) * kGroup; }
  PK_HD int count(int group) const {
    const int left = size - index(group);
    return left < 0 ? 0 : left < kGroup ? left : kGroup;
  }
};

// Where a rank's own values stand among those that count, -1: nowhere.
PK_HD inline int own_input(const Verdict& verdict, int rank) {
  for (int k = 0; k < verdict.readers; ++k) {
    if (verdict.source[k] == rank) return k;
  }
  return -1;
}

// The mean gradient: the inputs that count, in the order of ranks.
template <class G, class A, class Block, int n>
PK_HD inline void load_gradient(const Team<Block>& team, const Pieces& pieces,
                                const ParameterRow& row, std::uint64_t first,
                                const Unit<Block, n>& unit, A (&grad)[n][kGroup]) {
  using L = Scalar<A, A>;
  const Verdict& verdict = team.verdict();
  const Endpoint& endpoint = team.endpoint();
  const bool alone = pieces.averaged || row.grad_segment < 0;
  const int begin = alone ? own_input(verdict, endpoint.rank) : 0;
  const int end = alone ? begin + 1 : verdict.readers;
  for (int g = 0; g < n; ++g) {
    for (int i = 0; i < kGroup; ++i) grad[g][i] = A(0);
  }
  if (begin < 0) return;
  PK_UNROLL(2)
  for (int k = begin; k < end; ++k) {
    const std::byte* base = row.grad;
    if (!alone) {
      base =
          endpoint.segments[row.grad_segment * endpoint.size + verdict.source[k]] + row.grad_offset;
    }
    const A c = A(row.maximize ? -verdict.coefficient[k] : verdict.coefficient[k]);
    for (int g = 0; g < n; ++g) {
      A x[kGroup];
      load_group<G>(base, first + unit.at + unit.index(g), unit.count(g), unit.aligned, x);
      for (int i = 0; i < kGroup; ++i) {
        grad[g][i] = k == begin ? c * x[i] : L::fma(c, x[i], grad[g][i]);
      }
    }
  }
}

// Whether the values of all ranks count alike, so that a sum without weights will do.
PK_HD inline bool all_count_alike(const Verdict& verdict, int size) {
  bool alike = verdict.readers == size && !verdict.wide;
  for (int k = 1; k < verdict.readers && alike; ++k) {
    alike = verdict.coefficient[k] == verdict.coefficient[0];
  }
  return alike;
}

// As load_gradient, added up by the switch; false where that cannot be.
template <class G, class A, class Block, int n>
PK_HD inline bool load_gradient_of_all(const Verdict& verdict, const ParameterRow& row,
                                       std::uint64_t first, const Unit<Block, n>& unit,
                                       A (&grad)[n][kGroup]) {
  if (!row.all_grads || !unit.aligned || unit.size < int(kMomentBlock)) return false;
  const A c = A(row.maximize ? -verdict.coefficient[0] : verdict.coefficient[0]);
  for (int g = 0; g < n; ++g) {
    G sum[kGroup];
    if (!load_from_all(row.all_grads + (first + unit.at + unit.index(g)) * sizeof(G), sum)) {
      return false;
    }
    for (int i = 0; i < kGroup; ++i) grad[g][i] = c * A(widen(sum[i]));
  }
  return true;
}

// As load_gradient, in double where a coefficient asks for it.
template <class G, class A, class Block, int n>
PK_HD inline void mean_gradient(const Team<Block>& team, const Pieces& pieces,
                                const ParameterRow& row, std::uint64_t first,
                                const Unit<Block, n>& unit, A (&grad)[n][kGroup]) {
  if constexpr (sizeof(A) == sizeof(float)) {
    for (int g = 0; g < n && team.verdict().wide; ++g) {
      double sum[1][kGroup];
      load_gradient<G>(team, pieces, row, first, Unit<Block, 1>(unit, g), sum);
      for (int i = 0; i < kGroup; ++i) grad[g][i] = A(sum[0][i]);
    }
    if (team.verdict().wide) return;
  }
  load_gradient<G>(team, pieces, row, first, unit, grad);
}

// Call visit(piece, row, from, to) for this block's share of the units, piece by piece.
template <class Block, class Visit>
PK_HD inline void each_piece(const Block& block, const Pieces& pieces, Visit visit) {
  Range share = shard_bounds(pieces.units, block.count(), block.index());
  if (share.size() == 0) return;
  share = {share.begin + pieces.first_unit, share.end + pieces.first_unit};
  int first = 0, behind = pieces.count;  // the last that begins at or before the share
  while (behind - first > 1) {
    const int middle = (first + behind) / 2;
    (pieces.rows[middle].unit <= share.begin ? first : behind) = middle;
  }
  for (int i = first; i < pieces.count; ++i) {
    const PieceRow& piece = pieces.rows[i];
    const std::uint64_t from = max_u64(share.begin, piece.unit);
    const std::uint64_t to = min_u64(share.end, piece.unit + ceil_div(piece.count, kMomentBlock));
    if (from >= to) return;
    visit(piece, pieces.parameters[piece.parameter], from, to);
  }
}

// --- the norm ----------------------------------------------------------------------------------

template <class G, class A, class Block>
PK_HD inline double sum_of_squares(Team<Block>& team, const Pieces& pieces, const PieceRow& piece,
                                   const ParameterRow& row, std::uint64_t from, std::uint64_t to) {
  constexpr int kAll = Unit<Block, 1>::kAll;
  const Block& block = team.block();
  double sum = 0.0;
  for (std::uint64_t u = from + block.warp(); u < to; u += block.warps()) {
    const Unit<Block, kAll> unit(block, piece, u, 0, row.aligned);
    A grad[kAll][kGroup];
    load_gradient<G>(team, pieces, row, piece.first, unit, grad);
    for (int g = 0; g < kAll; ++g) {
      for (int i = 0; i < kGroup; ++i) sum += double(grad[g][i]) * double(grad[g][i]);
    }
  }
  return sum;
}

template <class Block>
PK_HD inline void measure(Team<Block>& team, const Pieces& pieces) {
  double (&mine)[2] = team.block().state().sums[team.thread()];
  mine[0] = mine[1] = 0.0;
  const bool wide = team.verdict().wide;
  each_piece(
      team.block(), pieces,
      [&](const PieceRow& piece, const ParameterRow& row, std::uint64_t from, std::uint64_t to) {
        const auto sum = [&]<class G>() {
          return wide ? sum_of_squares<G, double>(team, pieces, piece, row, from, to)
                      : sum_of_squares<G, float>(team, pieces, piece, row, from, to);
        };
        double& whole = mine[row.split];
        switch (row.grad_dtype) {
          case Dtype::f64:
            whole += sum_of_squares<double, double>(team, pieces, piece, row, from, to);
            break;
          case Dtype::f32:
            whole += sum.template operator()<float>();
            break;
          case Dtype::bf16:
            whole += sum.template operator()<bf16>();
            break;
          case Dtype::f16:
            whole += sum.template operator()<f16>();
            break;
        }
      });
}

// state.sums[0] becomes the sum over the first `count` entries, in an order of their number alone.
template <class Block>
PK_HD inline void add_up(Block& block, int count) {
  double (*sums)[2] = block.state().sums;
  for (int half; count > 1; count = half) {
    half = (count + 1) / 2;
    block.sync();
    if (block.thread() + half < count) {
      for (int i = 0; i < 2; ++i) sums[block.thread()][i] += sums[block.thread() + half][i];
    }
  }
  block.sync();
}

}  // namespace

template <class Block>
PK_HD PK_INLINE void run(Block& block, const NormCall& call) {
  Team<Block> team(block, *call.endpoint);
  double (*sums)[2] = block.state().sums;
  const int thread = block.thread();
  if (team.enter(call.entry)) {
    measure(team, call.pieces);
    add_up(block, block.threads());
    if (thread == 0) {
      for (int i = 0; i < 2; ++i) team.record(block.index()).squares[i] = sums[0][i];
    }
    if (team.meet() && block.index() == 0) {
      for (int i = 0; i < 2; ++i) {
        sums[thread][i] = 0.0;
        for (int b = thread; b < block.count(); b += block.threads()) {
          sums[thread][i] += team.record(b).squares[i];
        }
      }
      add_up(block, block.threads());
      if (thread == 0) {
        for (int i = 0; i < 2; ++i) team.control().squares[i] = sums[0][i];
      }
      const bool all_there = gate(team);
      for (int i = thread; i < 2 && all_there; i += block.threads()) {
        double total = 0.0;
        for (int r = 0; r < team.size(); ++r) total += team.control(r).squares[i];
        call.squares_at[i] = total;
      }
    }
  }
  team.leave();
}

// --- the step ----------------------------------------------------------------------------------

namespace {

// One moment in its storage, `second` of squares. `S` is how it is stored: float, double or bf16,
// or std::int8_t for codes.
template <class S, class A, class Block, int n>
PK_HD inline void load_moment(bool second, const void* stored, const float* scales,
                              const Unit<Block, n>& unit, A (&x)[n][kGroup]) {
  using L = Scalar<A, A>;
  for (int g = 0; g < n; ++g) {
    S value[kGroup];
    load_group(static_cast<const S*>(stored) + unit.at + unit.index(g), unit.count(g), unit.aligned,
               value);
    if constexpr (sizeof(S) == 1) {
      const float scale = scales[unit.number];
      for (int i = 0; i < kGroup; ++i) {
        x[g][i] = second ? decode_exp_avg_sq<L>(std::uint8_t(value[i]), scale)
                         : decode_exp_avg<L>(value[i], scale);
      }
    } else {
      for (int i = 0; i < kGroup; ++i) x[g][i] = A(widen(value[i]));
    }
  }
}

// `shift` chooses which 16 of an element's random bits this moment uses.
template <class S, class A, class Block, int n>
PK_HD inline void store_moment(const Block& block, bool second, void* stored, float* scales,
                               const Unit<Block, n>& unit, std::uint32_t key, int shift,
                               const A (&x)[n][kGroup]) {
  using L = Scalar<A, A>;
  float scale = 0.0f;
  if constexpr (sizeof(S) == 1) {
    for (int g = 0; g < n; ++g) {
      for (int i = 0; i < kGroup; ++i) {
        const float size = x[g][i] < 0.0f ? -x[g][i] : x[g][i];
        scale = i < unit.count(g) && size > scale ? size : scale;
      }
    }
    scale = block.largest(scale);  // every lane has read the old one before
    if (unit.lane == 0) scales[unit.number] = scale;
  }
  for (int g = 0; g < n; ++g) {
    S value[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      if constexpr (sizeof(S) >= 4) {
        value[i] = x[g][i];
        continue;
      } else {
        const std::uint32_t bits =
            random_bits<L>(key, std::uint32_t(unit.index(g) + i)) >> shift & 0xffffu;
        if constexpr (sizeof(S) == 2) {
          value[i] = Scalar<bf16, float>::upper(bf16_bits(x[g][i], bits));
        } else {
          value[i] = S(second ? encode_exp_avg_sq<L>(x[g][i], scale, bits)
                              : encode_exp_avg<L>(x[g][i], scale, bits));
        }
      }
    }
    store_group(static_cast<S*>(stored) + unit.at + unit.index(g), unit.count(g), unit.aligned,
                value);
  }
}

template <class P, class G, class S, class A, class Block, int n>
PK_HD inline void update_unit(Team<Block>& team, const Pieces& pieces, const PieceRow& piece,
                              const ParameterRow& row, const AdamFactors<Scalar<A, A>>& factors,
                              std::uint64_t steps, bool alike, const Unit<Block, n>& unit) {
  const Endpoint& endpoint = team.endpoint();
  const MomentStorage& m = piece.moments;
  const bool amsgrad = m.max_exp_avg_sq != nullptr;

  A param[n][kGroup], exp_avg[n][kGroup], exp_avg_sq[n][kGroup], max_exp_avg_sq[n][kGroup],
      grad[n][kGroup];
  for (int g = 0; g < n; ++g) {
    const std::uint64_t at = unit.at + unit.index(g);
    if (piece.master) {
      load_group<float>(piece.master, at, unit.count(g), unit.aligned, param[g]);
    } else {
      load_group<P>(row.param, piece.first + at, unit.count(g), unit.aligned, param[g]);
    }
  }
  load_moment<S>(false, m.exp_avg, m.exp_avg_scale, unit, exp_avg);
  load_moment<S>(true, m.exp_avg_sq, m.exp_avg_sq_scale, unit, exp_avg_sq);
  if (amsgrad) {
    load_moment<S>(true, m.max_exp_avg_sq, m.max_exp_avg_sq_scale, unit, max_exp_avg_sq);
  }
  if (!alike || !load_gradient_of_all<G>(team.verdict(), row, piece.first, unit, grad)) {
    mean_gradient<G>(team, pieces, row, piece.first, unit, grad);
  }

  for (int g = 0; g < n; ++g) {
    for (int i = 0; i < kGroup; ++i) {
      AdamElement<Scalar<A, A>> e{param[g][i], exp_avg[g][i], exp_avg_sq[g][i], A(0)};
      if (amsgrad) {
        e.max_exp_avg_sq = max_exp_avg_sq[g][i];
        adam_update<Scalar<A, A>, true>(factors, grad[g][i], e);
        max_exp_avg_sq[g][i] = e.max_exp_avg_sq;
      } else {
        adam_update<Scalar<A, A>, false>(factors, grad[g][i], e);
      }
      param[g][i] = e.param;
      exp_avg[g][i] = e.exp_avg;
      exp_avg_sq[g][i] = e.exp_avg_sq;
    }
  }

  const auto key = [&](Draw purpose) {
    const std::uint64_t block = piece.first / kMomentBlock + unit.number;
    return block_key(steps, piece.number, block, purpose);
  };
  const int outputs = row.param_segment < 0 ? 1 : endpoint.size;
  for (int g = 0; g < n; ++g) {
    const std::uint64_t at = unit.at + unit.index(g);
    const int count = unit.count(g);
    P rounded[kGroup];
    for (int i = 0; i < kGroup; ++i) rounded[i] = narrow<P>(param[g][i]);
    if constexpr (sizeof(P) == 2) {
      if (row.stochastic) {
        for (int i = 0; i < kGroup; ++i) {
          const std::uint32_t place = std::uint32_t(unit.index(g) + i);
          const std::uint32_t bits = random_bits<Scalar<A, A>>(key(kDrawParam), place) & 0xffffu;
          rounded[i].bits = std::uint16_t(bf16_bits(param[g][i], bits) >> 16);
        }
      }
      if (piece.master) {
        store_group(reinterpret_cast<A*>(piece.master) + at, count, unit.aligned, param[g]);
      }
    }
    const std::uint64_t place = (piece.first + at) * sizeof(P);
    if (row.all_params && unit.aligned && count == kGroup &&
        store_to_all(row.all_params + place, rounded)) {
      continue;
    }
    PK_UNROLL(1)
    for (int step = 0; step < outputs; ++step) {
      std::byte* base = row.param;
      if (row.param_segment >= 0) {
        base = endpoint.segments[row.param_segment * endpoint.size + endpoint.visited(step)] +
               row.param_offset;
      }
      store_group(reinterpret_cast<P*>(base + place), count, unit.aligned, rounded);
    }
  }
  const std::uint32_t draw = key(kDrawMoments);
  store_moment<S>(team.block(), false, m.exp_avg, m.exp_avg_scale, unit, draw, 0, exp_avg);
  store_moment<S>(team.block(), true, m.exp_avg_sq, m.exp_avg_sq_scale, unit, draw, 16, exp_avg_sq);
  if (amsgrad) {
    store_moment<S>(team.block(), true, m.max_exp_avg_sq, m.max_exp_avg_sq_scale, unit,
                    key(kDrawMax), 0, max_exp_avg_sq);
  }
}

}  // namespace

template <class Block>
PK_HD PK_INLINE void run(Block& block, const OpenStep& call) {
  Team<Block> team(block, *call.endpoint);
  Entry entry = call.entry;
  double norm = 0.0;
  bool skip = false;
  if (call.squares_at) {
    norm = std::sqrt(call.squares_at[0] + call.squares_at[1]);
    skip = call.skip_nonfinite && !is_weight(norm);
    const double clip = call.max_norm / (norm + 1e-6);
    if (call.max_norm > 0.0 && clip < 1.0) entry.header.scale *= clip;
    if (skip) entry.header.layout = ~entry.header.layout;  // all skip or none
  }
  if (team.enter(entry)) {
    for (int i = block.thread(); i < call.parameter_count && !skip; i += block.threads()) {
      const ParameterRow& row = call.parameters[i];
      if (!row.steps) continue;
      const std::uint64_t count = std::uint64_t(*row.steps) + 1;
      call.plans[i] = {adam_step(row.setting, count), count};
      *row.steps = float(count);
    }
    if (block.thread() == 0 && call.report_at) {
      call.report_at[0] = norm;
      call.report_at[1] = skip;
      call.report_at[2] = team.verdict().total;
    }
    if (block.thread() == 0 && skip) team.call_off();
  }
  team.leave();
}

template <class Block, class P, class G, class S>
PK_HD PK_INLINE void run(Block& block, const Update<P, G, S>& call) {
  using A = decltype(widen(P{}));
  // Blocks of int8 share a scale, so a lane has all its groups at once; of double they would take
  // too many registers.
  constexpr int kAll = Unit<Block, 1>::kAll, kAtOnce = sizeof(A) == sizeof(double) ? 1 : kAll;
  Team<Block> team(block, *call.endpoint);
  if (!team.goes_on()) return;
  const bool alike = all_count_alike(team.verdict(), team.size());
  each_piece(
      block, call.pieces,
      [&](const PieceRow& piece, const ParameterRow& row, std::uint64_t from, std::uint64_t to) {
        const AdamPlan& plan = call.plans[piece.parameter];
        const auto factors = AdamFactors<Scalar<A, A>>::of(plan.step, A(0));
        PK_UNROLL(1)
        for (std::uint64_t u = from + block.warp(); u < to; u += block.warps()) {
          PK_UNROLL(1)
          for (int g = 0; g < kAll; g += kAtOnce) {
            const Unit<Block, kAtOnce> unit(block, piece, u, g, row.aligned);
            update_unit<P, G, S, A>(team, call.pieces, piece, row, factors, plan.count, alike,
                                    unit);
          }
        }
      });
}

// Parameters are whole, and nobody reads gradients any more.
template <class Block>
PK_HD PK_INLINE void run(Block& block, const CloseStep& call) {
  Team<Block> team(block, *call.endpoint);
  if (team.goes_on()) gate(team);
  team.leave();
}

}  // namespace pk
