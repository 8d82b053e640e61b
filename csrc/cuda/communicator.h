// One rank's end of the collectives on GPUs, for the host: it enqueues kernels and waits for none.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "launch.h"
#include "reduction.h"
#include "virtual_ranks.h"

namespace pk {

class ShardedStep;

enum class Algorithm : int { automatic, one_shot, direct, ring };

// Which way an all-reduce of so many bytes goes, where nobody says.
Algorithm choose_algorithm(std::uint64_t bytes, int size);

// Memory that every rank reaches: the address here of each rank's part.
struct Segment {
  std::vector<std::byte*> addresses;
  std::byte* multicast;  // the address here of all parts at once, or null
  std::uint64_t bytes;
  std::uint64_t name;  // equal on every rank
  int slot;            // in Endpoint::segments
};

// Where a stretch of this rank's memory lies in a segment.
struct Place {
  const Segment* segment;
  std::uint64_t offset;
};

class TensorList {
 public:
  TensorList(int device, std::vector<Span> spans, std::uint64_t placement);

  std::uint64_t bytes() const { return bytes_; }
  std::uint64_t placement() const { return placement_; }  // 0: not all lie in segments
  std::size_t table_bytes() const { return spans_.size() > 1 ? spans_.size() * sizeof(Span) : 0; }
  void upload(void* table, cudaStream_t stream);
  Spans spans() const;

 private:
  int device_;
  std::vector<Span> spans_;
  std::uint64_t bytes_;
  std::uint64_t placement_;
  const Span* table_ = nullptr;
};

class Communicator {
 public:
  Communicator(int rank, int size, int device, const std::vector<std::uintptr_t>& controls,
               int blocks, double timeout_seconds, Algorithm algorithm,
               std::shared_ptr<VirtualRanks> virtual_ranks);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  static std::uint64_t control_bytes(int size, int blocks);

  void add_segment(const std::vector<std::uintptr_t>& addresses, std::uint64_t bytes,
                   std::uintptr_t multicast);
  void remove_segment(std::uintptr_t address);
  std::optional<Place> find(const void* data, std::uint64_t bytes) const;

  TensorList tensors(
      const std::vector<std::tuple<std::uintptr_t, std::uint64_t, int>>& tensors) const;
  void all_reduce(const TensorList& list, Entry entry, cudaStream_t stream);
  void reduce_scatter(const TensorList& list, std::byte* shard, std::uint64_t unit_bytes,
                      Entry entry, cudaStream_t stream);
  void all_gather(const TensorList& list, const std::byte* shard, std::uint64_t unit_bytes,
                  Entry entry, cudaStream_t stream);
  void barrier(cudaStream_t stream);
  void gradient_norm(const ShardedStep& step, Entry entry, double* squares_at, cudaStream_t stream);
  struct StepOptions {
    const double* squares_at;
    double max_norm;
    bool skip_nonfinite;
    double* report_at;
  };
  void sharded_step(const ShardedStep& step, Entry entry, const StepOptions& options,
                    cudaStream_t stream);

  // The first thing that went wrong and has not been told; refusals are told once.
  std::pair<Outcome, int> status();
  void abort(Outcome outcome, int rank);
  void close();

  int rank() const { return rank_; }
  int size() const { return size_; }
  int device() const { return device_; }

 private:
  int blocks_for(std::uint64_t bytes) const;
  void require_open() const;
  void submit(const Work& work, cudaStream_t stream);

  int rank_, size_, device_, blocks_;
  double timeout_seconds_;
  Algorithm algorithm_;
  std::shared_ptr<VirtualRanks> virtual_;
  Endpoint* endpoint_ = nullptr;  // device memory
  HostWords* host_ = nullptr;     // pinned
  std::vector<Segment> segments_;
  std::vector<bool> slot_used_ = std::vector<bool>(kMaxSegments);
  std::uint64_t named_ = 0;          // segments so far
  Outcome refused_ = Outcome::done;  // by the host, untold
  std::uint32_t refusals_told_ = 0;
  cudaEvent_t last_ = nullptr;  // the end of the last call, on last_stream_
  cudaStream_t last_stream_ = nullptr;
  bool any_yet_ = false;
};

}  // namespace pk
