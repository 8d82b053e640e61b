// The collectives of one rank over the shared memory of its host.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "control.h"
#include "kernels.h"
#include "tensor_list.h"

namespace pk {

struct Result {
  Outcome outcome = Outcome::done;
  int rank = -1;                        // the rank that broke the group, where one did
  double total = 0.0;                   // sum of the weights
  std::vector<std::string> heard = {};  // of a refusal in the background: what each rank told
};

// Bytes this rank has moved, for the benches: copies to and from staging are told apart from what
// the arithmetic itself reads and writes.
struct Traffic {
  std::atomic<std::uint64_t> read = 0;
  std::atomic<std::uint64_t> written = 0;
  std::atomic<std::uint64_t> staged = 0;
};

class Team;

class Communicator {
 public:
  using Interrupted = std::function<bool()>;

  // At most kMaxRanks. `ring`: peers are visited from the next rank on, else from rank 0 on.
  Communicator(std::shared_ptr<Segment> control, int rank, int size, const std::vector<int>& pids,
               int cores, std::uint64_t slot_bytes, double timeout_seconds, bool ring);

  static std::uint64_t control_bytes(int size, std::uint64_t slot_bytes);

  // Memory of Group.empty, named alike on every rank, in which tensors are worked on in place.
  void add_segment(const std::shared_ptr<Segment>& segment, std::uint64_t name);
  void locate(TensorList& list) const { list.locate(segments_, names_, rank()); }

  // `threads` is the most to use; small tensors take one.
  Result all_reduce(const TensorList& list, Header header, int threads, const Interrupted& stop);
  // `shard` gets this rank's part of the one tensor in `list`, cut as schedule.h's shard_bounds.
  Result reduce_scatter(const TensorList& list, std::byte* shard, std::uint64_t element_bytes,
                        Header header, int threads, const Interrupted& stop);
  // The one tensor in `list` gets every rank's shard.
  Result all_gather(const TensorList& list, const std::byte* shard, std::uint64_t element_bytes,
                    Header header, int threads, const Interrupted& stop);
  Result barrier(const Interrupted& stop);
  // A collective as it runs in the background, on tensors in row-major order. The ranks explain a
  // refusal to each other at once, each with its `told`: when they wait is no matter of agreement.
  Result explained(const std::function<Result(const Interrupted&)>& collective,
                   const std::string& told);
  // A collective of another file: body(team, verdict) on each of the rank's threads.
  Result run(std::uint64_t bytes, int threads, const Interrupted& stop,
             const std::function<void(Team&, Verdict&)>& body);
  // Every rank's message to every rank, of any length; `subject` says what they are about.
  Result exchange(const std::string& message, std::uint64_t subject,
                  std::vector<std::string>& messages, const Interrupted& stop);

  void leave() { peers_.leave(); }
  bool broken() const { return peers_.cause() != Outcome::done; }
  void break_group(Outcome cause, int rank) { peers_.break_group(cause, rank); }
  const Traffic& traffic() const { return traffic_; }
  int rank() const { return peers_.rank(); }
  int size() const { return peers_.size(); }

 private:
  class Reducing;  // all-reduce and reduce-scatter, as one thread runs them

  // Run body(team, verdict) on the rank's threads and conclude.
  template <class Body>
  Result collective(std::uint64_t bytes, int threads, const Interrupted& stop, Body body);
  Result reduce(const TensorList& list, std::byte* shard, const Cut& cut, Header header,
                int threads, const Interrupted& stop);
  int visited(int step) const;  // the rank that is visited in step 0, 1, ...

  Peers peers_;
  Staging staging_;
  bool ring_;
  const Kernels& kernels_;
  std::uint32_t ticket_ = 0;
  Traffic traffic_;
  std::vector<std::weak_ptr<Segment>> segments_;
  std::vector<std::uint64_t> names_;
};

}  // namespace pk
