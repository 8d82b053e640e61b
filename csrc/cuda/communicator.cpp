#include "communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "sharded_step.h"

namespace pk {
namespace {

// Up to here a single block does an all-reduce, with one gate instead of two.
constexpr std::uint64_t kOneBlockBytes = 16384;
// A block is worth starting for this much of a tensor: two loads of sixteen bytes a thread.
constexpr std::uint64_t kBytesPerBlock = std::uint64_t(kMaxThreads) * 2 * kQuadBytes;
constexpr int kNobody = 0xffff;  // the rank in a cause where none is to blame

std::uint32_t cause_of(Outcome outcome, int rank) {
  return std::uint32_t(outcome) << 16 | std::uint32_t(rank < 0 ? kNobody : rank);
}

}  // namespace

// One-shot, each rank reads all of every other: (N-1)*S bytes. Direct, it reads its shard of every
// other and writes it to every other: 2*(N-1)/N*S bytes, and waits once more. So one-shot is
// quicker while the difference, (N-1)*(1-2/N)*S, takes less time than a gate. Both constants are
// those of NVLink as its makers describe it, not measured; the limit keeps the copy into the slot
// small.
Algorithm choose_algorithm(std::uint64_t bytes, int size) {
  constexpr double kBytesPerMicrosecond = 200e3, kGateMicroseconds = 3.0, kMostBytes = 512e3;
  const double more = (size - 1) * (1.0 - 2.0 / size) * double(bytes);
  const bool quicker = more < kGateMicroseconds * kBytesPerMicrosecond;
  return quicker && double(bytes) <= kMostBytes ? Algorithm::one_shot : Algorithm::direct;
}

TensorList::TensorList(int device, std::vector<Span> spans, std::uint64_t placement)
    : device_(device), spans_(std::move(spans)), bytes_(0), placement_(placement) {
  for (const Span& span : spans_) bytes_ += round_up(span.bytes, kLine);
}

void TensorList::upload(void* table, cudaStream_t stream) {
  if (table_bytes() == 0) return;
  const OnDevice guard(device_);
  write_table(table, spans_.data(), table_bytes(), stream);
  table_ = static_cast<const Span*>(table);
}

Spans TensorList::spans() const {
  if (spans_.size() > 1 && !table_) {
    throw std::invalid_argument("a list of several tensors has to be uploaded before a call");
  }
  return {spans_.empty() ? Span{} : spans_[0], table_, int(spans_.size()), bytes_};
}

Communicator::Communicator(int rank, int size, int device,
                           const std::vector<std::uintptr_t>& controls, int blocks,
                           double timeout_seconds, Algorithm algorithm,
                           std::shared_ptr<VirtualRanks> virtual_ranks)
    : rank_(rank),
      size_(size),
      device_(device),
      blocks_(blocks),
      timeout_seconds_(timeout_seconds),
      algorithm_(algorithm),
      virtual_(std::move(virtual_ranks)) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size || int(controls.size()) != size ||
      blocks < 1 || (virtual_ && virtual_->size() != size)) {
    throw std::invalid_argument(
        "Communicator: wanted 0 <= rank < size <= " + std::to_string(kMaxRanks) +
        ", one control address a rank, blocks >= 1");
  }
  const OnDevice guard(device);
  check(cudaHostAlloc(reinterpret_cast<void**>(&host_), sizeof(HostWords), cudaHostAllocMapped),
        "cudaHostAlloc");
  std::memset(static_cast<void*>(host_), 0, sizeof(HostWords));
  Endpoint endpoint{rank,
                    size,
                    {size, blocks},
                    algorithm == Algorithm::ring,
                    std::uint64_t(timeout_seconds * 1e9),
                    nullptr,
                    {}};
  check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&endpoint.host), host_, 0),
        "cudaHostGetDevicePointer");
  for (int r = 0; r < size; ++r) {
    endpoint.controls[r] = reinterpret_cast<std::byte*>(controls[std::size_t(r)]);
  }
  const std::size_t segments = std::size_t(kMaxSegments) * std::size_t(size) * sizeof(std::byte*);
  check(cudaMalloc(reinterpret_cast<void**>(&endpoint_), sizeof(Endpoint) + segments),
        "cudaMalloc");
  check(cudaMemcpy(endpoint_, &endpoint, sizeof(Endpoint), cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), "cudaEventCreate");
}

Communicator::~Communicator() { close(); }

void Communicator::close() {
  if (endpoint_) cudaFree(endpoint_);
  if (host_) cudaFreeHost(host_);
  if (last_) cudaEventDestroy(last_);
  endpoint_ = nullptr;
  host_ = nullptr;
  last_ = nullptr;
}

std::uint64_t Communicator::control_bytes(int size, int blocks) {
  return Layout{size, blocks}.bytes();
}

void Communicator::require_open() const {
  if (!endpoint_) throw std::invalid_argument("Communicator: it is closed");
}

// --- memory that every rank reaches -------------------------------------------------------------

void Communicator::add_segment(const std::vector<std::uintptr_t>& addresses, std::uint64_t bytes,
                               std::uintptr_t multicast) {
  require_open();
  Segment segment{{}, reinterpret_cast<std::byte*>(multicast), bytes, named_, 0};
  for (const std::uintptr_t address : addresses) {
    segment.addresses.push_back(reinterpret_cast<std::byte*>(address));
  }
  const bool aligned = std::all_of(segment.addresses.begin(), segment.addresses.end(),
                                   [](const std::byte* p) { return is_aligned(p); });
  if (int(addresses.size()) != size_ || !aligned || !is_aligned(segment.multicast)) {
    throw std::invalid_argument(
        "Communicator.add_segment: wanted one address a rank, on multiples of 16");
  }
  const auto free = std::find(slot_used_.begin(), slot_used_.end(), false);
  if (free == slot_used_.end()) {
    throw std::invalid_argument("Communicator.add_segment: at most " +
                                std::to_string(kMaxSegments) + " at a time");
  }
  segment.slot = int(free - slot_used_.begin());
  std::byte* row = reinterpret_cast<std::byte*>(endpoint_) + sizeof(Endpoint) +
                   std::size_t(segment.slot) * std::size_t(size_) * sizeof(std::byte*);
  const OnDevice guard(device_);
  check(cudaMemcpy(row, segment.addresses.data(), std::size_t(size_) * sizeof(std::byte*),
                   cudaMemcpyHostToDevice),
        "cudaMemcpy");
  *free = true;
  ++named_;
  segments_.push_back(std::move(segment));
}

void Communicator::remove_segment(std::uintptr_t address) {
  const auto found = std::find_if(segments_.begin(), segments_.end(), [&](const Segment& s) {
    return s.addresses[std::size_t(rank_)] == reinterpret_cast<std::byte*>(address);
  });
  if (found == segments_.end()) {
    throw std::invalid_argument("Communicator.remove_segment: no segment begins there");
  }
  slot_used_[std::size_t(found->slot)] = false;
  segments_.erase(found);
}

std::optional<Place> Communicator::find(const void* data, std::uint64_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  for (const Segment& segment : segments_) {
    const auto begin = reinterpret_cast<std::uintptr_t>(segment.addresses[std::size_t(rank_)]);
    if (at >= begin && at + bytes <= begin + segment.bytes) return Place{&segment, at - begin};
  }
  return std::nullopt;
}

TensorList Communicator::tensors(
    const std::vector<std::tuple<std::uintptr_t, std::uint64_t, int>>& tensors) const {
  std::vector<Span> spans;
  std::uint64_t begin = 0;
  PlacementHash placement;
  bool all = true;
  for (const auto& [address, bytes, dtype] : tensors) {
    Span span{reinterpret_cast<std::byte*>(address), bytes, begin, 0, -1, Dtype(dtype)};
    const auto place = bytes > 0 ? find(span.data, bytes) : std::nullopt;
    if (place) {
      span.segment = place->segment->slot;
      span.offset = place->offset;
      placement.add(place->segment->name, place->offset);
    }
    all = all && (place || bytes == 0);
    begin += round_up(bytes, kLine);
    spans.push_back(span);
  }
  return TensorList(device_, std::move(spans), all && begin > 0 ? placement.value() : 0);
}

// --- calls -------------------------------------------------------------------------------------

int Communicator::blocks_for(std::uint64_t bytes) const {
  return int(max_u64(1, min_u64(std::uint64_t(blocks_), ceil_div(bytes, kBytesPerBlock))));
}

void Communicator::submit(const Work& work, cudaStream_t stream) {
  require_open();
  const OnDevice guard(device_);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  const bool captured = capture != cudaStreamCaptureStatusNone;  // a graph has its own order
  if (any_yet_ && stream != last_stream_ && !captured) {
    check(cudaStreamWaitEvent(stream, last_), "cudaStreamWaitEvent");
  }
  if (virtual_) {
    const Outcome outcome = virtual_->submit(rank_, work, stream, timeout_seconds_);
    if (outcome == Outcome::mismatch) refused_ = outcome;
    if (outcome == Outcome::timeout) abort(outcome, -1);
  } else {
    const Work* mine = &work;
    start_all(&mine, 1, stream);
  }
  if (captured) return;
  check(cudaEventRecord(last_, stream), "cudaEventRecord");
  last_stream_ = stream;
  any_yet_ = true;
}

void Communicator::all_reduce(const TensorList& list, Entry entry, cudaStream_t stream) {
  entry.header.operation = Operation::all_reduce;
  entry.header.placement = list.placement();
  ReduceCall call{endpoint_, entry, list.spans(), {list.bytes(), kLine, size_},
                  false,     false, nullptr};
  const Algorithm algorithm =
      algorithm_ == Algorithm::automatic ? choose_algorithm(list.bytes(), size_) : algorithm_;
  const std::uint64_t room = std::uint64_t(blocks_) * Layout{size_, blocks_}.slot_bytes();
  call.one_shot = algorithm == Algorithm::one_shot && size_ > 1 && list.bytes() <= room;
  int blocks = blocks_for(call.cut(0).size());
  if (call.one_shot) {
    const std::uint64_t enough = ceil_div(list.bytes(), Layout{size_, blocks_}.slot_bytes());
    blocks = list.bytes() <= kOneBlockBytes ? 1 : std::max(blocks_for(list.bytes()), int(enough));
  }
  submit(Kernel<ReduceCall>{call, blocks}, stream);
}

void Communicator::reduce_scatter(const TensorList& list, std::byte* shard,
                                  std::uint64_t unit_bytes, Entry entry, cudaStream_t stream) {
  entry.header.operation = Operation::reduce_scatter;
  entry.header.placement = list.placement();
  const Spans spans = list.spans();
  const ReduceCall call{endpoint_, entry, spans, {spans.only.bytes, unit_bytes, size_},
                        false,     true,  shard};
  submit(Kernel<ReduceCall>{call, blocks_for(call.cut(0).size())}, stream);
}

void Communicator::all_gather(const TensorList& list, const std::byte* shard,
                              std::uint64_t unit_bytes, Entry entry, cudaStream_t stream) {
  entry.header.operation = Operation::all_gather;
  entry.header.placement = list.placement();
  const Spans spans = list.spans();
  const GatherCall call{endpoint_, entry, spans, {spans.only.bytes, unit_bytes, size_}, shard};
  submit(Kernel<GatherCall>{call, blocks_for(call.cut(0).size())}, stream);
}

void Communicator::barrier(cudaStream_t stream) {
  Entry entry;
  entry.header.operation = Operation::barrier;
  const ReduceCall nothing{endpoint_, entry, {}, {0, kLine, size_}, true, false, nullptr};
  submit(Kernel<ReduceCall>{nothing, 1}, stream);
}

void Communicator::gradient_norm(const ShardedStep& step, Entry entry, double* squares_at,
                                 cudaStream_t stream) {
  entry.header.operation = Operation::gradient_norm;
  step.enter(entry.header);
  submit(Kernel<NormCall>{{endpoint_, entry, step.all(), squares_at}, blocks_}, stream);
}

void Communicator::sharded_step(const ShardedStep& step, Entry entry, const StepOptions& options,
                                cudaStream_t stream) {
  entry.header.operation = Operation::sharded_step;
  step.enter(entry.header);
  StepWork work{{}, step.updates(), blocks_};
  const Pieces all = step.all();
  work.open = {endpoint_,        entry,
               all.parameters,   step.plans(),
               step.count(),     options.squares_at,
               options.max_norm, options.skip_nonfinite,
               options.report_at};
  submit(work, stream);
}

// --- what went wrong ---------------------------------------------------------------------------

std::pair<Outcome, int> Communicator::status() {
  if (!host_) return {Outcome::done, -1};
  if (const std::uint32_t cause = host_->broken.load(kAcquire)) {
    const int rank = int(cause & 0xffffu);
    return {Outcome(cause >> 16), rank == kNobody ? -1 : rank};
  }
  if (refused_ != Outcome::done) return {std::exchange(refused_, Outcome::done), -1};
  const std::uint32_t refused = host_->refused.load(kAcquire);
  if (refused >> 8 != refusals_told_) {
    refusals_told_ = refused >> 8;
    return {Outcome(refused & 0xffu), -1};
  }
  return {Outcome::done, -1};
}

void Communicator::abort(Outcome outcome, int rank) {
  if (!host_ || host_->broken.load(kAcquire) != 0) return;
  host_->abort.store(cause_of(outcome, rank), kRelease);
  host_->broken.store(cause_of(outcome, rank), kRelease);
}

}  // namespace pk
