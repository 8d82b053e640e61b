// Who owns what, and which piece moves in which step. Pure arithmetic, host and device.
//
// Vocabulary: a *shard* is the part of a buffer that one rank owns (it alone adds it up); a *chunk*
// is what one step of a staged collective moves of every shard. Offsets are bytes in 64 bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtypes.h"

namespace pk {

inline constexpr std::uint64_t kLine = 64;  // one cache line; every cut of a list falls on one

struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  PK_HD std::uint64_t size() const { return end - begin; }
};

PK_HD constexpr std::uint64_t min_u64(std::uint64_t a, std::uint64_t b) { return a < b ? a : b; }
PK_HD constexpr std::uint64_t max_u64(std::uint64_t a, std::uint64_t b) { return a > b ? a : b; }
PK_HD constexpr std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) { return (a + b - 1) / b; }
PK_HD constexpr std::uint64_t round_up(std::uint64_t a, std::uint64_t b) {
  return ceil_div(a, b) * b;
}

// The public rule: shards of ceil(numel / size), so 5 over 4 is 2, 2, 1, 0.
PK_HD inline Range shard_bounds(std::uint64_t numel, int size, int rank) {
  const std::uint64_t each = ceil_div(numel, std::uint64_t(size));
  const std::uint64_t begin = min_u64(numel, each * std::uint64_t(rank));
  return {begin, min_u64(numel, begin + each)};
}

// How a stretch of bytes is dealt out to the ranks: in units of a line, or of one element.
struct Cut {
  std::uint64_t bytes;
  std::uint64_t unit;
  int size;
  PK_HD Range operator()(int owner) const {
    const Range units = shard_bounds(ceil_div(bytes, unit), size, owner);
    return {min_u64(bytes, units.begin * unit), min_u64(bytes, units.end * unit)};
  }
};

// The part that worker `index` of `count` takes of `whole`, cut on cache lines from whole.begin.
PK_HD inline Range share_of(Range whole, int count, int index) {
  const Range lines = shard_bounds(ceil_div(whole.size(), kLine), count, index);
  return {whole.begin + min_u64(whole.size(), lines.begin * kLine),
          whole.begin + min_u64(whole.size(), lines.end * kLine)};
}

// Chunk number `chunk` of a shard, `bytes` at a time; empty past the end.
PK_HD inline Range chunk_of(Range shard, std::uint64_t bytes, std::uint64_t chunk) {
  const std::uint64_t begin = min_u64(shard.size(), chunk * bytes);
  return {shard.begin + begin, shard.begin + min_u64(shard.size(), begin + bytes)};
}

}  // namespace pk
