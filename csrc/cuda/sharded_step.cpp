#include "sharded_step.h"

#include <algorithm>

namespace pk {
namespace {

bool is_aligned_piece(const PieceRow& piece) {
  const MomentStorage& m = piece.moments;
  return is_aligned(piece.master) && is_aligned(m.exp_avg) && is_aligned(m.exp_avg_sq) &&
         is_aligned(m.max_exp_avg_sq);
}

}  // namespace

void ShardedStep::add_piece(const PieceRow& piece) {
  if (piece.parameter >= parameters_.size() || piece.first % kMomentBlock != 0 ||
      piece.count == 0) {
    throw std::invalid_argument("ShardedStep.add_piece: no such parameter, or a bad stretch of it");
  }
  pieces_.push_back(piece);
}

ParameterRow ShardedStep::row_of(std::size_t index, const Row& row, const Setting& setting,
                                 PlacementHash& placement) const {
  const Parameter& p = parameters_[index];
  ParameterRow made{};
  made.steps = row.steps;
  made.setting = setting.adam;
  made.param = row.param;
  made.grad = row.grad;
  made.param_segment = made.grad_segment = -1;
  made.dtype = p.dtype;
  made.grad_dtype = row.grad_dtype;
  made.stochastic = p.stochastic;
  made.in_norm = p.in_norm;
  made.maximize = setting.maximize;
  made.aligned = is_aligned(row.param) && is_aligned(row.grad);
  const auto locate = [&](const void* data, int& segment, std::uint64_t& offset, std::byte*& all) {
    const auto place = comm_->find(data, 1);
    const std::string name = "ShardedStep.set: parameter " + std::to_string(index);
    if (!place) {
      throw std::invalid_argument(name +
                                  " or its gradient is said to be shared, but lies in no segment");
    }
    segment = place->segment->slot;
    offset = place->offset;
    placement.add(place->segment->name, offset);
    if (!multicast_) return;
    if (!place->segment->multicast) {
      throw std::invalid_argument(name +
                                  ": multicast wants segments that have a multicast address");
    }
    all = place->segment->multicast + offset;
  };
  if (comm_->size() > 1 && p.shared_param) {
    locate(row.param, made.param_segment, made.param_offset, made.all_params);
  }
  if (comm_->size() > 1 && p.shared_grad && !averaged_) {
    locate(row.grad, made.grad_segment, made.grad_offset, made.all_grads);
  }
  return made;
}

void ShardedStep::set(const std::vector<Row>& rows, const std::vector<Setting>& settings) {
  if (rows.size() != parameters_.size()) {
    throw std::invalid_argument("ShardedStep.set: wanted one row for each of " +
                                std::to_string(parameters_.size()) + " parameters, got " +
                                std::to_string(rows.size()));
  }
  rows_.clear();
  PlacementHash placement;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!rows[i].grad) {
      rows_.push_back({});
      continue;
    }
    if (rows[i].setting >= settings.size() || !rows[i].steps || !rows[i].param) {
      throw std::invalid_argument("ShardedStep.set: row " + std::to_string(i) +
                                  " wants a parameter, a step count and a setting that exists");
    }
    rows_.push_back(row_of(i, rows[i], settings[rows[i].setting], placement));
  }
  placement_ = placement.value();

  moving_.clear();
  kinds_.clear();
  for (const PieceRow& piece : pieces_) {
    ParameterRow& row = rows_[piece.parameter];
    if (!row.steps) continue;
    row.aligned = row.aligned && is_aligned_piece(piece);
    moving_.push_back(piece);
  }
  const auto kind_of = [&](const PieceRow& piece) {
    const ParameterRow& row = rows_[piece.parameter];
    return std::tuple(row.dtype, row.grad_dtype, piece.moments.kind);
  };
  std::stable_sort(moving_.begin(), moving_.end(),
                   [&](const PieceRow& a, const PieceRow& b) { return kind_of(a) < kind_of(b); });
  std::uint64_t unit = 0;
  for (std::size_t i = 0; i < moving_.size(); ++i) {
    PieceRow& piece = moving_[i];
    if (i == 0 || kind_of(piece) != kind_of(moving_[i - 1])) {
      const auto [dtype, grad_dtype, kind] = kind_of(piece);
      kinds_.push_back(
          {dtype, grad_dtype, kind, {nullptr, nullptr, 0, unit, 0, averaged_}, nullptr});
    }
    const std::uint64_t units = ceil_div(piece.count, kMomentBlock);
    piece.unit = unit;
    unit += units;
    ++kinds_.back().pieces.count;
    kinds_.back().pieces.units += units;
  }
  table_ = nullptr;
}

std::size_t ShardedStep::table_bytes() const {
  return plans_at() + rows_.size() * sizeof(AdamPlan);
}

void ShardedStep::upload(std::byte* table, cudaStream_t stream) {
  const OnDevice guard(comm_->device());
  write_table(table, rows_.data(), pieces_at(), stream);
  write_table(table + pieces_at(), moving_.data(), plans_at() - pieces_at(), stream);
  table_ = table;
}

const std::byte* ShardedStep::table() const {
  if (!table_ && !rows_.empty()) {
    throw std::invalid_argument("ShardedStep: it has to be uploaded after each set");
  }
  return table_;
}

void ShardedStep::enter(Header& header) const {
  header.signature ^= placement_;  // where ranks reach each other's memory, they must agree
  if (averaged_) header.reduction = Reduction::total;
}

Pieces ShardedStep::all() const {
  const std::byte* at = table();
  std::uint64_t units = 0;
  for (const UpdateWork& kind : kinds_) units += kind.pieces.units;
  return {reinterpret_cast<const ParameterRow*>(at),
          reinterpret_cast<const PieceRow*>(at + pieces_at()),
          int(moving_.size()),
          0,
          units,
          averaged_};
}

AdamPlan* ShardedStep::plans() const {
  table();
  return reinterpret_cast<AdamPlan*>(table_ + plans_at());
}

std::vector<UpdateWork> ShardedStep::updates() const {
  std::vector<UpdateWork> made = kinds_;
  const Pieces every = all();
  int first = 0;
  for (UpdateWork& kind : made) {
    kind.pieces.parameters = every.parameters;
    kind.pieces.rows = every.rows + first;
    kind.plans = plans();
    first += kind.pieces.count;
  }
  return made;
}

}  // namespace pk
