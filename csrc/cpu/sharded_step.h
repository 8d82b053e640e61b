// The optimizer step between the two halves of an all-reduce: each rank adds up the gradients of
// the elements it owns, updates them, and writes the new parameters to every rank, in one pass.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "adam_job.h"
#include "communicator.h"

namespace pk {

// A parameter as one step sees it. Gradients and parameters of other ranks lie `stride` bytes apart
// from one rank to the next; 0: there are none.
struct StepParameter {
  Dtype dtype;
  bool stochastic;  // without a master, bf16: round stochastically
  InNorm in_norm;
  std::byte* param = nullptr;
  std::ptrdiff_t param_stride = 0;
  const std::byte* grad = nullptr;  // null: this step leaves the parameter alone
  Dtype grad_dtype = Dtype::f32;
  std::ptrdiff_t grad_stride = 0;
  std::uint32_t setting = 0;  // index of a StepSetting
};

// What the elements of one parameter group at one step count share.
struct StepSetting {
  AdamStep adam;
  std::uint64_t count;  // of steps
  bool maximize;
};

// What this rank owns of one parameter: `count` elements from `first` on, and their state.
struct OwnedPiece {
  std::uint32_t parameter;  // index of a StepParameter
  std::uint32_t number;     // of the parameter, equal at any world size: keys the random bits
  std::uint64_t first;      // a multiple of kMomentBlock
  std::uint64_t count;
  float* master;  // or null
  MomentStorage moments;
};

class ShardedStep {
 public:
  // `shared`: the buffers that ranks read and write of each other. `averaged`: gradients are the
  // global mean already, and only the own ones are read.
  ShardedStep(std::shared_ptr<TensorList> shared, bool averaged)
      : shared_(std::move(shared)), averaged_(averaged) {}

  std::vector<StepParameter> parameters;
  std::vector<StepSetting> settings;
  std::vector<OwnedPiece> pieces;

  // Sums of squares of the mean gradient's owned elements, of split and of whole parameters; once
  // it returns, nobody has written anything, and peers may still read gradients here.
  Result measure(Communicator& comm, Header header, int threads,
                 const Communicator::Interrupted& stop);
  double split_squares = 0.0;
  double squares = 0.0;

  // The step, on `header.scale` times the gradients.
  Result run(Communicator& comm, Header header, int threads, const Communicator::Interrupted& stop);

  // Bytes of gradients, parameters and state that measure and run have read and written.
  std::uint64_t bytes_read() const { return read_; }
  std::uint64_t bytes_written() const { return written_; }

 private:
  class Gradient;

  template <class Visit>
  void each_part(int thread, int threads, Visit visit) const;
  std::uint64_t active_elements() const;
  void update(const OwnedPiece& piece, std::uint64_t from, std::uint64_t count,
              const Verdict& verdict, const Header& header, int rank, int size, bool stream);

  std::shared_ptr<TensorList> shared_;
  bool averaged_;
  std::atomic<std::uint64_t> read_ = 0;
  std::atomic<std::uint64_t> written_ = 0;
};

}  // namespace pk
