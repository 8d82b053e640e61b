// The optimizer's pass of csrc/cuda as threads of the host run it, for ThreadSanitizer: parameters,
// masters and moments are the CPU backend's to the bit.
//
//     cuda_step RANKS THREADS BLOCKS
#include <cmath>
#include <random>

#include "cpu/kernels.h"
#include "cuda_block.h"

namespace pk {
extern const Kernels kPortable;
}

namespace {

using namespace pk;

struct Kind {
  Dtype dtype;
  Dtype grad_dtype;
  Moments moments;
  bool master;
  bool amsgrad;
  bool maximize;
  bool averaged;
  bool aligned;
  double scale;
};

constexpr std::uint64_t kCounts[] = {1, 700, 2563, 4096};  // of the parameters' elements
constexpr int kParameters = 4;
constexpr int kSteps = 3;
constexpr AdamSetting kSetting{0.01, 0.9, 0.99, 1e-8, 0.1};
constexpr double kMaxNorm = 2.0;

std::uint64_t moment_bytes(const Kind& kind) {
  return kind.moments == Moments::int8   ? 1
         : kind.moments == Moments::bf16 ? 2
         : kind.dtype == Dtype::f64      ? 8
                                         : 4;
}

// What rank `rank` owns of a parameter: whole blocks of moments.
Range owned(std::uint64_t count, int size, int rank) {
  const Range blocks = shard_bounds(ceil_div(count, kMomentBlock), size, rank);
  return {min_u64(count, blocks.begin * kMomentBlock), min_u64(count, blocks.end * kMomentBlock)};
}

// Buffers of one parameter on one rank, as large as if the rank owned all of it.
struct Buffers {
  Buffers(const Kind& kind, std::uint64_t count)
      : param(count * size_of(kind.dtype)),
        grad(count * size_of(kind.grad_dtype)),
        master(count * sizeof(float)),
        moments{Zeroed(count * moment_bytes(kind)), Zeroed(count * moment_bytes(kind)),
                Zeroed(count * moment_bytes(kind))},
        scales{Zeroed(count), Zeroed(count), Zeroed(count)} {}

  MomentStorage storage(const Kind& kind, std::uint64_t first) const {
    const auto moment = [&](int i) {
      return static_cast<void*>(moments[i].data.get() + first * moment_bytes(kind));
    };
    const auto scale = [&](int i) -> float* {
      if (kind.moments != Moments::int8) return nullptr;
      return reinterpret_cast<float*>(scales[i].data.get()) + first / kMomentBlock;
    };
    return {kind.moments,
            moment(0),
            moment(1),
            kind.amsgrad ? moment(2) : nullptr,
            scale(0),
            scale(1),
            kind.amsgrad ? scale(2) : nullptr};
  }
  float* masters(const Kind& kind, std::uint64_t first) const {
    return kind.master ? reinterpret_cast<float*>(master.data.get()) + first : nullptr;
  }

  Zeroed param, grad, master;
  Zeroed moments[3];
  Zeroed scales[3];
};

void put(std::byte* data, Dtype dtype, std::uint64_t i, float x) {
  std::byte* at = data + i * size_of(dtype);
  const auto write = [&](auto value) { std::memcpy(at, &value, sizeof value); };
  switch (dtype) {
    case Dtype::f32:
      return write(x);
    case Dtype::f64:
      return write(double(x));
    case Dtype::bf16:
      return write(narrow<bf16>(x));
    case Dtype::f16:
      return write(narrow<f16>(x));
  }
}

template <class P, class G>
void enqueue(Gpus& gpus, int rank, Moments moments, const Endpoint* endpoint, const Pieces& pieces,
             const AdamPlan* plans) {
  const int blocks = gpus.blocks();
  if constexpr (sizeof(P) == 8) {
    gpus.call(rank, Update<P, G, double>{endpoint, pieces, plans}, blocks);
  } else if (moments == Moments::full) {
    gpus.call(rank, Update<P, G, float>{endpoint, pieces, plans}, blocks);
  } else if (moments == Moments::bf16) {
    gpus.call(rank, Update<P, G, bf16>{endpoint, pieces, plans}, blocks);
  } else {
    gpus.call(rank, Update<P, G, std::int8_t>{endpoint, pieces, plans}, blocks);
  }
}

// Some steps of one kind on all ranks: the third is skipped, because a gradient is not finite.
class Training {
 public:
  Training(Gpus& gpus, const Kind& kind) : gpus_(gpus), kind_(kind) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (int r = 0; r < gpus.size(); ++r) {
      for (int p = 0; p < kParameters; ++p) {
        auto made = std::make_unique<Buffers>(kind, kCounts[p]);
        for (std::uint64_t i = 0; i < kCounts[p]; ++i) {
          // Parameters are equal on all ranks, and the mean gradient too where it is made already.
          const float x = float(std::sin(double(i) + p)), g = normal(random);
          const float equal = float(std::cos(double(i) - p));
          put(made->param.data.get(), kind.dtype, i, x);
          const float own = weight(r) == 0.0 ? NAN : kind.averaged ? equal : g;
          put(made->grad.data.get(), kind.grad_dtype, i, own);
          if (kind.master) put(made->master.data.get(), Dtype::f32, i, x + 1e-4f);
        }
        buffers_.push_back(std::move(made));
      }
    }
    reference_ = std::make_unique<Reference>(*this);
    segments_ = place();
    for (int r = 0; r < gpus.size(); ++r) prepare(r);
  }

  void enqueue_all() {
    for (int step = 0; step < kSteps; ++step) {
      for (int r = 0; r < gpus_.size(); ++r) enqueue_step(r, step);
    }
  }

  void check() {
    double squares[2];
    for (int step = 0; step < kSteps - 1; ++step) {
      std::memcpy(squares, tables_[0].squares[step], sizeof squares);
      reference_->step(step, std::sqrt(squares[0] + squares[1]), squares);
    }
    for (int r = 0; r < gpus_.size(); ++r) {
      for (int step = 0; step < kSteps; ++step) {
        const double* report = tables_[std::size_t(r)].report[step];
        require(report[1] == (step == kSteps - 1 ? 1.0 : 0.0),
                "a step is skipped where it must be");
        require(std::memcmp(tables_[std::size_t(r)].squares[step], tables_[0].squares[step],
                            sizeof squares) == 0,
                "ranks have one norm");
      }
      for (int p = 0; p < kParameters; ++p) check(r, p);
    }
  }

 private:
  struct Tables {
    std::vector<ParameterRow> rows;
    std::vector<PieceRow> pieces;
    std::vector<AdamPlan> plans;
    float counts[kParameters] = {};
    double squares[kSteps][2] = {};
    double report[kSteps][3] = {};
  };

  // The same training by the CPU's kernels, one rank after another.
  struct Reference {
    explicit Reference(Training& t) : training(t) {
      for (const auto& from : t.buffers_) {
        auto copy = std::make_unique<Buffers>(t.kind_, bytes_of(*from));
        const auto take = [](const Zeroed& a, Zeroed& b, std::uint64_t bytes) {
          std::memcpy(b.data.get(), a.data.get(), bytes);
        };
        const std::uint64_t n = bytes_of(*from);
        take(from->param, copy->param, n * size_of(t.kind_.dtype));
        take(from->grad, copy->grad, n * size_of(t.kind_.grad_dtype));
        take(from->master, copy->master, n * sizeof(float));
        buffers.push_back(std::move(copy));
      }
    }
    std::uint64_t bytes_of(const Buffers& b) const {
      for (std::size_t i = 0; i < training.buffers_.size(); ++i) {
        if (training.buffers_[i].get() == &b) return kCounts[i % kParameters];
      }
      return 0;
    }

    void step(int step, double norm, const double* squares) {
      const Kind& kind = training.kind_;
      const int size = training.gpus_.size();
      const double clip = std::min(1.0, kMaxNorm / (norm + 1e-6));
      const double count = step + 1.0;
      const AdamStep adam{kSetting.beta1,
                          kSetting.beta2,
                          1.0 - kSetting.lr * kSetting.weight_decay,
                          kSetting.lr / (1.0 - std::pow(kSetting.beta1, count)),
                          1.0 / std::sqrt(1.0 - std::pow(kSetting.beta2, count)),
                          kSetting.eps};
      double sums[2] = {};
      for (int p = 0; p < kParameters; ++p) {
        for (int owner = 0; owner < size; ++owner) {
          const Range mine = owned(kCounts[p], size, owner);
          if (mine.size() == 0) continue;
          const void* in[kMaxRanks];
          double coefficient[kMaxRanks], unclipped[kMaxRanks];
          int inputs = 0;
          void* out[kMaxRanks];
          for (int r = 0; r < size; ++r) {
            const Buffers& b = *buffers[std::size_t(r * kParameters + p)];
            out[r] = b.param.data.get() + mine.begin * size_of(kind.dtype);
            if (kind.averaged ? r != owner : training.weight(r) == 0.0) continue;
            const double share = kind.averaged ? 1.0 : training.weight(r) / training.total();
            const double sign = kind.maximize ? -1.0 : 1.0;
            in[inputs] = b.grad.data.get() + mine.begin * size_of(kind.grad_dtype);
            unclipped[inputs] = sign * (kind.scale * share);
            coefficient[inputs++] = sign * ((kind.scale * clip) * share);
          }
          const Buffers& own = *buffers[std::size_t(owner * kParameters + p)];
          const bool wide = kind.scale < 0x1p-90;
          sums[p == 1] +=
              kPortable.sum_of_squares({kind.grad_dtype, wide, inputs, in, unclipped}, mine.size());
          const bool stochastic = kind.dtype == Dtype::bf16 && !kind.master;
          kPortable.adam({adam,
                          {kind.grad_dtype, wide, inputs, in, coefficient},
                          kind.dtype,
                          stochastic,
                          out[owner],
                          own.masters(kind, mine.begin),
                          own.storage(kind, mine.begin),
                          size,
                          out,
                          mine.size(),
                          mine.begin / kMomentBlock,
                          std::uint64_t(step + 1),
                          std::uint32_t(10 + p)});
        }
      }
      for (int i = 0; i < 2; ++i) {
        require(std::abs(squares[i] - sums[i]) <= 1e-12 * sums[i], "the norm is the CPU's");
      }
    }

    Training& training;
    std::vector<std::unique_ptr<Buffers>> buffers;
  };

  double weight(int rank) const { return rank == 1 && !kind_.averaged ? 0.0 : rank + 1.0; }
  double total() const {
    double sum = 0.0;
    for (int r = 0; r < gpus_.size(); ++r) sum += weight(r);
    return sum;
  }
  Buffers& buffers(int rank, int p) { return *buffers_[std::size_t(rank * kParameters + p)]; }

  // Segments of each parameter and its gradient; none where a rank is alone.
  std::vector<std::pair<int, int>> place() {
    std::vector<std::pair<int, int>> found;
    for (int p = 0; p < kParameters; ++p) {
      std::vector<std::byte*> params, grads;
      for (int r = 0; r < gpus_.size(); ++r) {
        params.push_back(buffers(r, p).param.data.get());
        grads.push_back(buffers(r, p).grad.data.get());
      }
      if (gpus_.size() == 1) {
        found.emplace_back(-1, -1);
      } else {
        found.emplace_back(gpus_.segment(params), gpus_.segment(grads));
      }
    }
    return found;
  }

  void prepare(int rank) {
    tables_.emplace_back();
    tables_.back().plans.resize(kParameters);
    std::uint64_t unit = 0;
    for (int p = 0; p < kParameters; ++p) {
      Buffers& b = buffers(rank, p);
      const auto [param, grad] = segments_[std::size_t(p)];
      ParameterRow row{};
      row.setting = kSetting;
      row.param = b.param.data.get();
      row.grad = b.grad.data.get();
      row.param_segment = param;
      row.grad_segment = grad;
      row.dtype = kind_.dtype;
      row.grad_dtype = kind_.grad_dtype;
      row.stochastic = kind_.dtype == Dtype::bf16 && !kind_.master;
      row.in_norm = p == 1 ? InNorm::split : InNorm::whole;
      row.maximize = kind_.maximize;
      row.aligned = kind_.aligned;
      tables_.back().rows.push_back(row);
      const Range mine = owned(kCounts[p], gpus_.size(), rank);
      if (mine.size() == 0) continue;
      tables_.back().pieces.push_back({std::uint32_t(p), std::uint32_t(10 + p), mine.begin,
                                       mine.size(), unit, b.masters(kind_, mine.begin),
                                       b.storage(kind_, mine.begin)});
      unit += ceil_div(mine.size(), kMomentBlock);
    }
    units_.push_back(unit);
  }

  void enqueue_step(int rank, int step) {
    Tables& t = tables_[std::size_t(rank)];
    for (int p = 0; p < kParameters; ++p) t.rows[std::size_t(p)].steps = &t.counts[p];
    const Pieces pieces{
        t.rows.data(), t.pieces.data(), int(t.pieces.size()), 0, units_[std::size_t(rank)],
        kind_.averaged};
    const Endpoint* endpoint = &gpus_.endpoint(rank);
    Entry entry;
    entry.header.operation = Operation::gradient_norm;
    entry.header.weight = weight(rank);
    entry.header.scale = kind_.scale;
    if (kind_.averaged) entry.header.reduction = Reduction::total;
    if (step == kSteps - 1 && rank == 0) {
      gpus_.then(rank, [this] { put(buffers(0, 2).grad.data.get(), kind_.grad_dtype, 5, NAN); });
    }
    gpus_.call(rank, NormCall{endpoint, entry, pieces, t.squares[step]}, gpus_.blocks());
    entry.header.operation = Operation::sharded_step;
    gpus_.call(rank,
               OpenStep{endpoint, entry, t.rows.data(), t.plans.data(), kParameters,
                        t.squares[step], kMaxNorm, true, t.report[step]},
               1);
    const Moments m = kind_.moments;
    const bool same = kind_.dtype == kind_.grad_dtype;
    switch (kind_.dtype) {
      case Dtype::f32:
        enqueue<float, float>(gpus_, rank, m, endpoint, pieces, t.plans.data());
        break;
      case Dtype::f64:
        enqueue<double, double>(gpus_, rank, m, endpoint, pieces, t.plans.data());
        break;
      case Dtype::bf16:
        same ? enqueue<bf16, bf16>(gpus_, rank, m, endpoint, pieces, t.plans.data())
             : enqueue<bf16, float>(gpus_, rank, m, endpoint, pieces, t.plans.data());
        break;
      case Dtype::f16:
        same ? enqueue<f16, f16>(gpus_, rank, m, endpoint, pieces, t.plans.data())
             : enqueue<f16, float>(gpus_, rank, m, endpoint, pieces, t.plans.data());
        break;
    }
    gpus_.call(rank, CloseStep{endpoint}, 1);
    // Later work on the stream reads the parameters, and may write the gradients.
    gpus_.then(rank, [this, rank] {
      for (int p = 0; p < kParameters; ++p) {
        Buffers& b = buffers(rank, p);
        std::vector<std::byte> whole(kCounts[p] * size_of(kind_.dtype));
        std::memcpy(whole.data(), b.param.data.get(), whole.size());
        std::vector<std::byte> grad(kCounts[p] * size_of(kind_.grad_dtype));
        std::memcpy(grad.data(), b.grad.data.get(), grad.size());
        std::memcpy(b.grad.data.get(), grad.data(), grad.size());
      }
    });
  }

  void check(int rank, int p) {
    const Buffers &mine = buffers(rank, p),
                  &wanted = *reference_->buffers[std::size_t(rank * kParameters + p)];
    const auto equal = [&](const Zeroed& a, const Zeroed& b, std::uint64_t from,
                           std::uint64_t bytes, const char* claim) {
      require(std::memcmp(a.data.get() + from, b.data.get() + from, bytes) == 0, claim);
    };
    equal(mine.param, wanted.param, 0, kCounts[p] * size_of(kind_.dtype),
          "parameters are the CPU's to the bit, on every rank");
    require(tables_[std::size_t(rank)].counts[p] == kSteps - 1, "steps taken are counted");
    const Range range = owned(kCounts[p], gpus_.size(), rank);
    equal(mine.master, wanted.master, range.begin * 4, range.size() * 4, "masters are the CPU's");
    const std::uint64_t each = moment_bytes(kind_);
    for (int i = 0; i < 3; ++i) {
      equal(mine.moments[i], wanted.moments[i], range.begin * each, range.size() * each,
            "moments are the CPU's");
      equal(mine.scales[i], wanted.scales[i], range.begin / kMomentBlock * 4,
            ceil_div(range.size(), kMomentBlock) * 4, "scales are the CPU's");
    }
  }

  Gpus& gpus_;
  const Kind kind_;
  std::vector<std::unique_ptr<Buffers>> buffers_;
  std::unique_ptr<Reference> reference_;
  std::vector<std::pair<int, int>> segments_;
  std::vector<Tables> tables_;
  std::vector<std::uint64_t> units_;
};

}  // namespace

int main(int count, char** arguments) {
  require(count == 4, "usage: cuda_step RANKS THREADS BLOCKS");
  Gpus gpus(std::atoi(arguments[1]), std::atoi(arguments[2]), std::atoi(arguments[3]), true, 60.0);
  using D = Dtype;
  using M = Moments;
  const Kind kinds[] = {
      // dtype, gradient, moments, master, amsgrad, maximize, averaged, aligned, scale
      {D::f32, D::f32, M::full, false, false, false, false, true, 1.0},
      {D::f32, D::f32, M::full, false, true, true, false, true, 0.5},
      {D::f32, D::f32, M::full, false, false, false, true, true, 1.0},
      {D::f32, D::f32, M::full, false, false, false, false, false, 0x1p-110},
      {D::f32, D::f32, M::bf16, false, true, false, false, true, 1.0},
      {D::f32, D::f32, M::int8, false, true, false, false, true, 1.0},
      {D::f64, D::f64, M::full, false, true, false, false, true, 1.0},
      {D::bf16, D::bf16, M::full, true, false, false, false, true, 1.0},
      {D::bf16, D::bf16, M::bf16, false, false, false, false, true, 1.0},
      {D::bf16, D::bf16, M::int8, true, false, true, false, false, 1.0},
      {D::bf16, D::f32, M::full, true, true, false, false, true, 1.0},
      {D::bf16, D::f32, M::bf16, true, false, false, true, true, 1.0},
      {D::bf16, D::f32, M::int8, false, false, false, false, true, 1.0},
      {D::f16, D::f16, M::full, true, false, false, false, true, 0x1p-3},
      {D::f16, D::f16, M::bf16, true, false, false, false, true, 1.0},
      {D::f16, D::f16, M::int8, true, true, false, false, true, 1.0},
      {D::f16, D::f32, M::full, true, false, false, false, true, 1.0},
      {D::f16, D::f32, M::bf16, true, true, false, false, false, 1.0},
      {D::f16, D::f32, M::int8, true, false, false, false, true, 1.0},
  };
  std::vector<std::unique_ptr<Training>> trainings;
  for (const Kind& kind : kinds) {
    trainings.push_back(std::make_unique<Training>(gpus, kind));
    trainings.back()->enqueue_all();
  }
  gpus.finish();
  for (const auto& training : trainings) training->check();
}
