// What one rank's call is to the GPU: one kernel, or the three of a step. Calls of several ranks
// that share the GPU become one launch each.
#pragma once

#include <variant>
#include <vector>

#include "launch.h"
#include "reduction.h"
#include "step_calls.h"

namespace pk {

template <class Call>
struct Kernel {
  Call call;
  int blocks;
};

// The pieces of one kind, which one instantiation of Update moves.
struct UpdateWork {
  Dtype dtype;
  Dtype grad_dtype;
  Moments moments;
  Pieces pieces;
  const AdamPlan* plans;

  bool same_kind(const UpdateWork& other) const {
    return dtype == other.dtype && grad_dtype == other.grad_dtype && moments == other.moments;
  }
};

struct StepWork {
  OpenStep open;
  std::vector<UpdateWork> updates;
  int blocks;  // at most, of each rank
};

using Work = std::variant<Kernel<ReduceCall>, Kernel<GatherCall>, Kernel<NormCall>, StepWork>;

// Start the calls of all `ranks`, which are of one kind; false: they are not, nothing is started.
bool start_all(const Work* const* works, int ranks, cudaStream_t stream);

}  // namespace pk
