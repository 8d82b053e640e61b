// AdamW on what a rank owns, with the new parameters written to every rank. Host and device.
#pragma once

#include "gradient.h"

namespace pk {
namespace {  // internal linkage, see dtypes.h

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

template <class S, class A, class Block, int n>
PK_HD inline void store_moment(const Block& block, bool second, void* stored, float* scales,
                               const Unit<Block, n>& unit, std::uint32_t key,
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
        const auto drawn = draw<L>(key, std::uint32_t(unit.index(g) + i), 0);
        const std::uint32_t bits = second ? drawn.exp_avg_sq : drawn.exp_avg;
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

  const std::uint32_t key =
      block_key(steps, piece.number, piece.first / kMomentBlock + unit.number);
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
          const std::uint32_t bits = draw<Scalar<A, A>>(key, place, 0).param;
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
  store_moment<S>(team.block(), false, m.exp_avg, m.exp_avg_scale, unit, key, exp_avg);
  store_moment<S>(team.block(), true, m.exp_avg_sq, m.exp_avg_sq_scale, unit, key, exp_avg_sq);
  if (amsgrad) {
    store_moment<S>(team.block(), true, m.max_exp_avg_sq, m.max_exp_avg_sq_scale, unit, key,
                    max_exp_avg_sq);
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
