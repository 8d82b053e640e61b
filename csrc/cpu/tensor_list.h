// A list of tensors as one stretch of bytes: each tensor begins on a cache line, so that any cut on
// a line falls between elements of one dtype.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "../protocol.h"
#include "segment.h"

namespace pk {

struct Span {
  std::byte* data;
  std::uint64_t bytes;
  std::uint64_t begin;    // where it starts in the list's stretch
  std::ptrdiff_t stride;  // from a rank's copy to the next rank's; 0: not in shared memory
  Dtype dtype;
};

// What a range of the stretch covers of one tensor.
struct Piece {
  const Span& span;
  std::uint64_t offset;  // bytes into the tensor
  std::uint64_t bytes;
  std::uint64_t at;  // bytes from the beginning of the range
};

class TensorList {
 public:
  void add(std::byte* data, std::uint64_t bytes, Dtype dtype) {
    spans_.push_back({data, bytes, bytes_, 0, dtype});
    bytes_ += round_up(bytes, kLine);
  }

  // Find each tensor in the group's shared memory. placement() stays 0 unless all are there.
  void locate(const std::vector<std::weak_ptr<Segment>>& segments,
              const std::vector<std::uint64_t>& names, int rank) {
    PlacementHash placement;
    bool all = !spans_.empty();
    for (Span& span : spans_) {
      bool found = span.bytes == 0;
      for (std::size_t i = 0; i < segments.size() && !found; ++i) {
        auto segment = segments[i].lock();
        if (!segment) continue;
        const std::byte* slab = segment->slab(rank);
        if (span.data < slab || span.data + span.bytes > slab + segment->slab_bytes()) continue;
        span.stride = segment->stride();
        if (std::find(held_.begin(), held_.end(), segment) == held_.end()) {
          held_.push_back(std::move(segment));
        }
        placement.add(names[i], std::uint64_t(span.data - slab));
        found = true;
      }
      all = all && found;
    }
    placement_ = all && bytes_ > 0 ? placement.value() : 0;
  }

  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t placement() const { return placement_; }
  const std::vector<Span>& spans() const { return spans_; }

  // Call visit(Piece) for every tensor that `range` touches, in order.
  template <class Visit>
  void each(Range range, Visit visit) const {
    auto span = std::upper_bound(spans_.begin(), spans_.end(), range.begin,
                                 [](std::uint64_t at, const Span& s) { return at < s.begin; });
    if (span != spans_.begin()) --span;
    for (; span != spans_.end() && span->begin < range.end; ++span) {
      const std::uint64_t begin = max_u64(range.begin, span->begin);
      const std::uint64_t end = min_u64(range.end, span->begin + span->bytes);
      if (begin < end) visit(Piece{*span, begin - span->begin, end - begin, begin - range.begin});
    }
  }

 private:
  std::vector<Span> spans_;
  std::vector<std::shared_ptr<Segment>> held_;  // mapped as long as the list may be used
  std::uint64_t bytes_ = 0;
  std::uint64_t placement_ = 0;
};

}  // namespace pk
