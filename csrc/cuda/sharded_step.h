// The tables of an optimizer step: what the kernels of step.h read, put together by the host.
#pragma once

#include <tuple>
#include <vector>

#include "communicator.h"

namespace pk {

class ShardedStep {
 public:
  // `averaged`: gradients are the global mean already, and only the own ones are read.
  // `multicast`: through multicast.h, for shared parameters.
  ShardedStep(std::shared_ptr<Communicator> comm, bool averaged, bool multicast)
      : comm_(std::move(comm)), averaged_(averaged), multicast_(multicast) {}

  // What stays the same from step to step.
  struct Parameter {
    Dtype dtype;
    bool stochastic;
    InNorm in_norm;
    bool shared_param;
    bool shared_grad;
  };
  struct Setting {
    AdamSetting adam;
    bool maximize;
  };
  // What a step does to a parameter.
  struct Row {
    std::byte* param;
    std::byte* grad;  // null: it does not move
    Dtype grad_dtype;
    std::uint32_t setting;
    float* steps;
  };

  void add_parameter(const Parameter& parameter) { parameters_.push_back(parameter); }
  void add_piece(const PieceRow& piece);
  void set(const std::vector<Row>& rows, const std::vector<Setting>& settings);

  std::size_t table_bytes() const;
  void upload(std::byte* table, cudaStream_t stream);

  // For calls, once uploaded.
  void enter(Header& header) const;
  Pieces all() const;
  std::vector<UpdateWork> updates() const;
  AdamPlan* plans() const;
  int count() const { return int(rows_.size()); }

 private:
  ParameterRow row_of(std::size_t index, const Row& row, const Setting& setting,
                      PlacementHash& placement) const;
  std::size_t pieces_at() const { return rows_.size() * sizeof(ParameterRow); }
  std::size_t plans_at() const { return pieces_at() + moving_.size() * sizeof(PieceRow); }
  const std::byte* table() const;

  std::shared_ptr<Communicator> comm_;
  bool averaged_, multicast_;
  std::vector<Parameter> parameters_;
  std::vector<PieceRow> pieces_;
  std::vector<ParameterRow> rows_;
  std::vector<PieceRow> moving_;   // of pieces_, by kind, with their units numbered
  std::vector<UpdateWork> kinds_;  // of moving_; pieces.rows is filled in by updates()
  std::uint64_t placement_ = 0;
  std::byte* table_ = nullptr;
};

}  // namespace pk
