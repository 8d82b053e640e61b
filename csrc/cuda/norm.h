// The sum of squares of the whole mean gradient, told to every rank. Host and device.
#pragma once

#include "gradient.h"

namespace pk {
namespace {  // internal linkage, see dtypes.h

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
        if (row.in_norm == InNorm::elsewhere) return;
        const auto sum = [&]<class G>() {
          return wide ? sum_of_squares<G, double>(team, pieces, piece, row, from, to)
                      : sum_of_squares<G, float>(team, pieces, piece, row, from, to);
        };
        double& total = mine[row.in_norm == InNorm::split];
        switch (row.grad_dtype) {
          case Dtype::f64:
            total += sum_of_squares<double, double>(team, pieces, piece, row, from, to);
            break;
          case Dtype::f32:
            total += sum.template operator()<float>();
            break;
          case Dtype::bf16:
            total += sum.template operator()<bf16>();
            break;
          case Dtype::f16:
            total += sum.template operator()<f16>();
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

}  // namespace pk
