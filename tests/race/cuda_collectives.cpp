// The collectives of csrc/cuda as threads of the host run them, for ThreadSanitizer: every result
// is the CPU backend's to the bit, and near a float64 mean.
//
//     cuda_collectives RANKS THREADS BLOCKS
#include <cmath>
#include <random>

#include "cpu/kernels.h"
#include "cuda_block.h"

namespace pk {
extern const Kernels kPortable;
}

namespace {

using namespace pk;

enum class Way { one_shot, staged, in_place };
enum class Operation { all_reduce, reduce_scatter, all_gather };

// Weights 1, 0, 3, 4, ...: the values of rank 1 are NaN and reach nobody.
double weight_of(int rank) { return rank == 1 ? 0.0 : rank + 1.0; }

void fill(std::byte* data, Dtype dtype, std::uint64_t count, int rank, std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (std::uint64_t i = 0; i < count; ++i) {
    const float x = weight_of(rank) == 0.0 ? NAN : normal(random);
    std::byte* at = data + i * size_of(dtype);
    const auto put = [&](auto value) { std::memcpy(at, &value, sizeof value); };
    switch (dtype) {
      case Dtype::f32:
        put(x);
        break;
      case Dtype::f64:
        put(double(x));
        break;
      case Dtype::bf16:
        put(narrow<bf16>(x));
        break;
      case Dtype::f16:
        put(narrow<f16>(x));
        break;
    }
  }
}

double value_at(const std::byte* data, Dtype dtype, std::uint64_t i) {
  const std::byte* at = data + i * size_of(dtype);
  const auto get = [&](auto value) {
    std::memcpy(&value, at, sizeof value);
    return double(widen(value));
  };
  switch (dtype) {
    case Dtype::f32:
      return get(float{});
    case Dtype::f64:
      return get(double{});
    case Dtype::bf16:
      return get(bf16{});
    case Dtype::f16:
      return get(f16{});
  }
  return 0.0;
}

// One collective of all ranks: its tensors, and what has to come of it.
class Case {
 public:
  Case(Gpus& gpus, Operation operation, Way way, std::vector<std::pair<Dtype, std::uint64_t>> list,
       double scale, std::mt19937& random)
      : gpus_(gpus), operation_(operation), list_(std::move(list)), scale_(scale) {
    std::uint64_t begin = 0;
    for (const auto& [dtype, count] : list_) {
      begins_.push_back(begin);
      begin += round_up(count * size_of(dtype), kLine);
    }
    bytes_ = begin;
    const Layout& layout = gpus.endpoint(0).layout;
    if (bytes_ > std::uint64_t(gpus.blocks()) * layout.slot_bytes())
      way = std::max(way, Way::staged);
    for (int r = 0; r < gpus.size(); ++r) {
      tensors_.emplace_back(bytes_);
      for (std::size_t t = 0; t < list_.size(); ++t) {
        fill(data(r, t), list_[t].first, list_[t].second, r, random);
      }
      inputs_.emplace_back(bytes_);
      std::memcpy(inputs_.back().data.get(), tensors_.back().data.get(), bytes_);
      results_.emplace_back(bytes_);
      shards_.emplace_back(bytes_);
      spans_.emplace_back();
    }
    std::vector<std::byte*> places;
    for (Zeroed& tensor : tensors_) places.push_back(tensor.data.get());
    const int segment = way == Way::in_place ? gpus.segment(places) : -1;
    for (int r = 0; r < gpus.size(); ++r) {
      enqueue(r, way, segment);
      // Later work on the stream finds the result, and may write what it likes to these tensors.
      gpus.then(r, [this, r] {
        const std::size_t rank = std::size_t(r);
        std::memcpy(results_[rank].data.get(), tensors_[rank].data.get(), bytes_);
        std::memset(tensors_[rank].data.get(), 0xff, bytes_);
      });
    }
  }

  void check() {
    for (std::size_t t = 0; t < list_.size(); ++t) check(t);
    for (int r = 0; r < gpus_.size(); ++r) require(totals_[r] == total(), "the total weight");
  }

 private:
  std::byte* data(int rank, std::size_t tensor) {
    return tensors_[std::size_t(rank)].data.get() + begins_[tensor];
  }
  const std::byte* result(int rank, std::size_t tensor) const {
    return results_[std::size_t(rank)].data.get() + begins_[tensor];
  }
  double total() const {
    double sum = 0.0;
    for (int r = 0; r < gpus_.size(); ++r) sum += weight_of(r);
    return sum;
  }
  Cut cut() const {
    if (operation_ == Operation::all_reduce) return {bytes_, kLine, gpus_.size()};
    const auto [dtype, count] = list_[0];
    return {count * size_of(dtype), size_of(dtype), gpus_.size()};
  }

  void enqueue(int rank, Way way, int segment) {
    auto& spans = spans_[std::size_t(rank)];
    for (std::size_t t = 0; t < list_.size(); ++t) {
      const auto [dtype, count] = list_[t];
      spans.push_back(
          {data(rank, t), count * size_of(dtype), begins_[t], begins_[t], segment, dtype});
    }
    Entry entry;
    entry.header.operation = pk::Operation(int(operation_) + 2);
    entry.header.weight = weight_of(rank);
    entry.header.scale = scale_;
    entry.header.placement = std::uint64_t(segment + 1);
    entry.total_at = &totals_[rank];
    const Spans list{spans[0], spans.size() > 1 ? spans.data() : nullptr, int(spans.size()),
                     bytes_};
    std::byte* shard = shards_[std::size_t(rank)].data.get();
    const Endpoint* endpoint = &gpus_.endpoint(rank);
    if (operation_ == Operation::all_gather) {
      const Range mine = cut()(rank);
      std::memcpy(shard, data(rank, 0) + mine.begin, mine.size());
      gpus_.call(rank, GatherCall{endpoint, entry, list, cut(), shard}, gpus_.blocks());
      return;
    }
    const bool small = way == Way::one_shot && bytes_ <= 16384;
    const bool scatter = operation_ == Operation::reduce_scatter;
    gpus_.call(rank, ReduceCall{endpoint, entry, list, cut(), way == Way::one_shot, scatter, shard},
               small ? 1 : gpus_.blocks());
  }

  // The weighted mean as the CPU backend adds it.
  std::vector<std::byte> expected(std::size_t t) {
    const auto [dtype, count] = list_[t];
    std::vector<std::byte> sum(count * size_of(dtype));
    const void* in[kMaxRanks];
    double coefficient[kMaxRanks];
    int inputs = 0;
    for (int r = 0; r < gpus_.size(); ++r) {
      if (weight_of(r) == 0.0) continue;
      in[inputs] = inputs_[std::size_t(r)].data.get() + begins_[t];
      coefficient[inputs++] = scale_ * (weight_of(r) / total());
    }
    void* out[] = {sum.data()};
    const bool wide = scale_ < 0x1p-90;
    kPortable.weighted_sum({dtype, wide, inputs, 1, in, coefficient, out, count});
    return sum;
  }

  // All-gather: the inputs of those who own them.
  std::vector<std::byte> gathered() {
    std::vector<std::byte> whole(cut().bytes);
    for (int r = 0; r < gpus_.size(); ++r) {
      const Range mine = cut()(r);
      std::memcpy(whole.data() + mine.begin, inputs_[std::size_t(r)].data.get() + mine.begin,
                  mine.size());
    }
    return whole;
  }

  void check(std::size_t t) {
    const auto [dtype, count] = list_[t];
    if (count == 0) return;
    if (operation_ == Operation::all_gather) {
      const std::vector<std::byte> whole = gathered();
      for (int r = 0; r < gpus_.size(); ++r) {
        require(std::memcmp(result(r, t), whole.data(), whole.size()) == 0,
                "an all-gather is whole");
      }
      return;
    }
    const std::vector<std::byte> sum = expected(t);
    for (std::uint64_t i = 0; i < count; i += 13) near(sum, t, i);
    for (int r = 0; r < gpus_.size(); ++r) {
      if (operation_ == Operation::all_reduce) {
        require(std::memcmp(result(r, t), sum.data(), sum.size()) == 0,
                "an all-reduce is the CPU's to the bit");
        continue;
      }
      const Range mine = cut()(r);
      require(std::memcmp(shards_[std::size_t(r)].data.get(), sum.data() + mine.begin,
                          mine.size()) == 0,
              "a reduce-scatter is the CPU's to the bit");
      const std::byte* before = inputs_[std::size_t(r)].data.get() + begins_[t];
      require(std::memcmp(result(r, t), before, count * size_of(dtype)) == 0,
              "a reduce-scatter leaves its input alone");
    }
  }

  void near(const std::vector<std::byte>& sum, std::size_t t, std::uint64_t i) {
    const Dtype dtype = list_[t].first;
    double exact = 0.0, size = 0.0;
    for (int r = 0; r < gpus_.size(); ++r) {
      if (weight_of(r) == 0.0) continue;
      const double x = value_at(inputs_[std::size_t(r)].data.get() + begins_[t], dtype, i);
      exact += scale_ * weight_of(r) * x / total();
      size += std::abs(scale_ * weight_of(r) * x / total());
    }
    const double unit = dtype == Dtype::bf16  ? 0x1p-8
                        : dtype == Dtype::f16 ? 0x1p-11
                        : dtype == Dtype::f32 ? 0x1p-24
                                              : 0x1p-52;
    const double smallest = dtype == Dtype::f16 ? 0x1p-24 : 0x1p-140;
    require(std::abs(value_at(sum.data(), dtype, i) - exact) <=
                unit * (std::abs(exact) + (gpus_.size() + 1) * size) + smallest,
            "the mean is near that in float64");
  }

  Gpus& gpus_;
  const Operation operation_;
  const std::vector<std::pair<Dtype, std::uint64_t>> list_;
  const double scale_;
  std::uint64_t bytes_;
  std::vector<std::uint64_t> begins_;
  std::vector<Zeroed> tensors_, inputs_, results_, shards_;
  std::vector<std::vector<Span>> spans_;
  double totals_[kMaxRanks] = {};
};

void run_cases(Gpus& gpus, const std::vector<Dtype>& dtypes) {
  std::mt19937 random(7);
  std::vector<std::unique_ptr<Case>> cases;
  const auto add = [&](Operation operation, Way way,
                       std::vector<std::pair<Dtype, std::uint64_t>> list, double scale = 1.0) {
    cases.push_back(std::make_unique<Case>(gpus, operation, way, std::move(list), scale, random));
  };
  for (const Way way : {Way::one_shot, Way::staged, Way::in_place}) {
    for (const Dtype dtype : dtypes) {
      for (const std::uint64_t count : {1, 1003, 9001}) {
        add(Operation::all_reduce, way, {{dtype, count}});
        if (way == Way::one_shot) continue;
        add(Operation::reduce_scatter, way, {{dtype, count}});
        add(Operation::all_gather, way, {{dtype, count}});
      }
      add(Operation::all_reduce, way, {{dtype, 501}}, 0x1p-110);  // added in double
    }
    add(Operation::all_reduce, way,
        {{Dtype::f32, 3},
         {Dtype::bf16, 0},
         {Dtype::bf16, 1501},
         {Dtype::f64, 7},
         {Dtype::f32, 2049}});
  }
  // Several chunks of each share, so that both slots come again.
  add(Operation::all_reduce, Way::staged, {{Dtype::f32, 100003}});
  add(Operation::reduce_scatter, Way::staged, {{Dtype::f32, 100003}});
  add(Operation::all_gather, Way::staged, {{Dtype::f32, 200003}});
  gpus.finish();
  for (const auto& each : cases) each->check();
}

// What one rank says alone is refused by all, changes nothing, and the next call works.
void run_refusals(Gpus& gpus) {
  const auto all = [&](int odd, auto change, pk::Outcome wanted) {
    std::vector<std::vector<float>> values(std::size_t(gpus.size()), std::vector<float>(100, 2.0f));
    std::vector<double> weights(std::size_t(gpus.size()), 1.0);
    for (int r = 0; r < gpus.size(); ++r) {
      float* x = values[std::size_t(r)].data();
      const Span span{reinterpret_cast<std::byte*>(x), 400, 0, 0, -1, Dtype::f32};
      Entry entry;
      entry.header.operation = pk::Operation::all_reduce;
      entry.header.scale = 3.0;
      entry.weight_at = &weights[std::size_t(r)];
      if (r == odd) change(entry, weights[std::size_t(r)]);
      const Spans list{span, nullptr, 1, 448};
      const bool one = r == odd || r % 2;  // ranks that disagree may start other numbers of blocks
      gpus.call(r,
                ReduceCall{
                    &gpus.endpoint(r), entry, list, {448, kLine, gpus.size()}, one, false, nullptr},
                1);
    }
    gpus.finish();
    for (int r = 0; r < gpus.size(); ++r) {
      const std::uint32_t refused = gpus.words(r).refused.load(kAcquire);
      require(pk::Outcome(refused & 0xffu) == wanted, "every rank is told why");
      require(values[std::size_t(r)][99] == 2.0f, "a refused call changes nothing");
    }
  };
  const int last = gpus.size() - 1;
  all(last, [](Entry& e, double&) { e.header.signature = 1; }, Outcome::mismatch);
  all(0, [](Entry&, double& w) { w = -1.0; }, Outcome::bad_weight);
  all(last, [](Entry&, double& w) { w = NAN; }, Outcome::bad_weight);
  all(0, [](Entry& e, double&) { e.header.fault = 1; }, Outcome::fault);
  run_cases(gpus, {});
}

// A rank that does not come: the others give up and name it, and later calls end at once.
void run_timeout(int size, int threads) {
  Gpus gpus(size, threads, 2, false, 1.0);
  for (int round = 0; round < 2; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int r = 0; r < size - 1; ++r) {
      Entry entry;
      const ReduceCall nothing{
          &gpus.endpoint(r), entry, {}, {0, kLine, size}, false, false, nullptr};
      gpus.call(r, nothing, 2);
    }
    gpus.finish();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    for (int r = 0; r < size - 1; ++r) {
      const std::uint32_t broken = gpus.words(r).broken.load(kAcquire);
      require(broken >> 16 == std::uint32_t(Outcome::timeout), "a rank that waits gives up");
      require(int(broken & 0xffffu) == size - 1, "the rank that did not come is named");
    }
    require(took.count() < (round == 0 ? 6.0 : 0.9), "within the timeout, then at once");
  }
}

}  // namespace

int main(int count, char** arguments) {
  require(count == 4, "usage: cuda_collectives RANKS THREADS BLOCKS");
  const int size = std::atoi(arguments[1]), threads = std::atoi(arguments[2]);
  const int blocks = std::atoi(arguments[3]);
  for (const bool ring : {false, true}) {
    Gpus gpus(size, threads, blocks, ring, 60.0);
    run_cases(gpus, ring ? std::vector{Dtype::f32}
                         : std::vector{Dtype::f32, Dtype::f64, Dtype::bf16, Dtype::f16});
    if (size > 1 && ring) run_refusals(gpus);
  }
  if (size > 1) run_timeout(size, threads);
}
