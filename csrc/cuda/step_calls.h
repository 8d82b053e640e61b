// The optimizer's pass as calls: the tables that it reads, and the kernels it is made of. Host and
// device.
//
// A step is three kernels: one block a rank opens it and works out what all need (OpenStep), any
// number of blocks update pieces of one kind (Update), and one block a rank closes it (CloseStep).
// Blocks of the second wait for nobody.
#pragma once

#include "../adam.h"
#include "control.h"

namespace pk {

// A parameter as one step sees it. In a segment it, or its gradient, lies at one offset on every
// rank; segment -1: only this rank's counts.
struct ParameterRow {
  float* steps;  // how often it was stepped; null: it does not move
  AdamSetting setting;
  std::byte* param;
  std::byte* grad;
  std::byte* all_params;  // multicast addresses of both, or null: not asked for
  std::byte* all_grads;
  std::uint64_t param_offset;
  std::uint64_t grad_offset;
  int param_segment;
  int grad_segment;
  Dtype dtype;
  Dtype grad_dtype;
  bool stochastic;  // without a master, bf16: round stochastically
  InNorm in_norm;
  bool maximize;
  bool aligned;  // every address of it and of its state is a multiple of 16
};

// What this rank owns of a parameter that moves.
struct PieceRow {
  std::uint32_t parameter;
  std::uint32_t number;  // of the parameter at any world size, the key of random bits
  std::uint64_t first;
  std::uint64_t count;
  std::uint64_t unit;  // number of its first block of moments among all that move
  float* master;       // or null
  MomentStorage moments;
};

// A parameter's step as block 0 works it out for all.
struct AdamPlan {
  AdamStep step;
  std::uint64_t count;
};

// The pieces of one kind, or of all.
struct Pieces {
  const ParameterRow* parameters;
  const PieceRow* rows;
  int count;
  std::uint64_t first_unit;
  std::uint64_t units;
  bool averaged;  // gradients are the mean already: read the own ones alone
};

struct NormCall {
  static constexpr bool kMeets = true;
  const Endpoint* endpoint;
  Entry entry;
  Pieces pieces;
  double* squares_at;  // [2]: of parameters that are whole, and of those that are split
};

struct OpenStep {
  static constexpr bool kMeets = true;
  const Endpoint* endpoint;
  Entry entry;
  const ParameterRow* parameters;
  AdamPlan* plans;  // one a parameter
  int parameter_count;
  const double* squares_at;  // or null: the norm is not known
  double max_norm;           // 0: do not clip
  bool skip_nonfinite;
  double* report_at;  // or null; [3]: norm, whether it was skipped, total weight
};

// P, G: dtypes of parameter and gradient. S: how moments are stored: as they are computed (float,
// or double for double), bf16, or std::int8_t for int8.
template <class P, class G, class S>
struct Update {
  static constexpr bool kMeets = false;
  const Endpoint* endpoint;
  Pieces pieces;
  const AdamPlan* plans;
};

struct CloseStep {
  static constexpr bool kMeets = true;
  const Endpoint* endpoint;
};

}  // namespace pk
