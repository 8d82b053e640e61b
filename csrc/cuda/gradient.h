// The mean gradient of what a rank owns, as one warp sums it. Host and device.
//
// A warp works on one block of moments at a time (kMomentBlock elements, the unit of int8 scales),
// each lane on groups of four elements, so that loads of float are 16 bytes wide and adjacent.
#pragma once

#include "multicast.h"
#include "step_calls.h"
#include "team.h"

namespace pk {
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

}  // namespace
}  // namespace pk
