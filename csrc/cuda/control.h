// What a rank on a GPU keeps in device memory: what its peers see of it, and what its own blocks
// share. Host and device.
#pragma once

#include "../protocol.h"

namespace pk {

#if defined(__CUDACC__)
template <class T>
using device_atomic = cuda::atomic<T, cuda::thread_scope_device>;
#else
template <class T>
using device_atomic = std::atomic<T>;
#endif

// What one block stages at once, of all shards and at least of each.
inline constexpr std::uint64_t kSlotBytes = 65536, kLeastChunkBytes = 4096;
inline constexpr int kMaxSegments = 1024;  // known to a communicator at a time

// Between a rank's kernels and its host, in the host's memory. Causes are `outcome << 16 | rank`.
struct alignas(kLine) HostWords {
  shared_atomic<std::uint32_t> broken;   // by kernels: 0, or why the group broke
  shared_atomic<std::uint32_t> refused;  // by kernels: refused calls so far << 8 | last outcome
  shared_atomic<std::uint32_t> abort;    // by the host: 0, or why kernels have to give up
};

// The head of a rank's control memory, which peers map. After it: two signals for each block, what
// each block keeps for itself, and each block's staging slots.
struct alignas(kLine) Control {
  shared_atomic<std::uint32_t> broken;  // as HostWords::broken; a peer that gives up writes it too
  double squares[2];                    // of this rank's shard of the gradient: whole, split
  // What only this rank's own blocks use.
  alignas(kLine) device_atomic<std::uint32_t> arrived;
  device_atomic<std::uint32_t> round;
  std::uint32_t refusals;
  Verdict verdict;  // of the running call, as block 0 came to it
};

// What a block keeps from one call to the next, and tells block 0.
struct alignas(kLine) BlockRecord {
  std::uint32_t ticket;
  double squares[2];
};

// Where things lie in control memory, as offsets that hold on every rank.
struct Layout {
  int size;
  int blocks;
  PK_HD std::uint64_t chunk_bytes() const {  // of one shard
    return max_u64(kLeastChunkBytes, kSlotBytes / std::uint64_t(size) / kLine * kLine);
  }
  PK_HD std::uint64_t slot_bytes() const { return std::uint64_t(size) * chunk_bytes(); }
  PK_HD std::uint64_t signal(int block, std::uint32_t ticket) const {
    return sizeof(Control) + (std::uint64_t(block) * 2 + (ticket & 1)) * sizeof(Signal);
  }
  PK_HD std::uint64_t record(int block) const {
    return signal(blocks, 0) + std::uint64_t(block) * sizeof(BlockRecord);
  }
  PK_HD std::uint64_t inputs(int block, std::uint32_t slot) const {
    const std::uint64_t each = 2 * (slot_bytes() + chunk_bytes());
    return record(blocks) + std::uint64_t(block) * each + slot * slot_bytes();
  }
  PK_HD std::uint64_t results(int block, std::uint32_t slot) const {
    return inputs(block, 2) + slot * chunk_bytes();
  }
  PK_HD std::uint64_t bytes() const { return inputs(blocks, 0); }
};

// What a rank's kernels know of the group; device memory, written once.
struct Endpoint {
  int rank;
  int size;
  Layout layout;
  bool ring;  // visit peers from the next rank on, else from rank 0 on
  std::uint64_t timeout_nanoseconds;
  HostWords* host;
  std::byte* controls[kMaxRanks];
  std::byte* segments[];  // of segment s on rank r: [s * size + r]

  PK_HD int visited(int step) const { return ring ? (rank + 1 + step) % size : step; }
};

// What a rank says when it enters, of which the GPU may know more than the host.
struct Entry {
  Header header;
  const double* weight_at = nullptr;  // in place of header.weight
  double* total_at = nullptr;         // gets the total weight
};

}  // namespace pk
