#include "work.h"

#include <algorithm>

namespace pk {
namespace {

template <class Call>
bool start_kernels(const Work* const* works, int ranks, cudaStream_t stream) {
  Launch<Call> launch{};
  launch.ranks = ranks;
  for (int r = 0; r < ranks; ++r) {
    const auto& kernel = std::get<Kernel<Call>>(*works[r]);
    if (r > 0 && kernel.blocks != launch.blocks) return false;
    launch.blocks = kernel.blocks;
    launch.calls[r] = kernel.call;
  }
  start(launch, stream);
  return true;
}

// The update of `kind` on every rank, also where a rank owns nothing of it.
template <class P, class G, class S>
void start_update(const UpdateWork& kind, const StepWork* const* steps, int ranks,
                  cudaStream_t stream) {
  Launch<Update<P, G, S>> launch{};
  launch.ranks = ranks;
  std::uint64_t units = 0;
  for (int r = 0; r < ranks; ++r) {
    launch.calls[r].endpoint = steps[r]->open.endpoint;
    for (const UpdateWork& update : steps[r]->updates) {
      if (!update.same_kind(kind)) continue;
      launch.calls[r].pieces = update.pieces;
      launch.calls[r].plans = update.plans;
      units = max_u64(units, update.pieces.units);
    }
  }
  constexpr int kWarps = kMaxThreads / 32;
  launch.blocks = int(min_u64(std::uint64_t(steps[0]->blocks), ceil_div(units, kWarps)));
  start(launch, stream);
}

template <class P, class G>
auto by_storage(Moments moments) {
  switch (moments) {
    case Moments::full:
      return start_update<P, G, float>;
    case Moments::bf16:
      return start_update<P, G, bf16>;
    case Moments::int8:
      break;
  }
  return start_update<P, G, std::int8_t>;
}

auto update_of(const UpdateWork& kind) {
  const bool same = kind.grad_dtype == kind.dtype;
  switch (kind.dtype) {
    case Dtype::f32:
      return by_storage<float, float>(kind.moments);
    case Dtype::bf16:
      return same ? by_storage<bf16, bf16>(kind.moments) : by_storage<bf16, float>(kind.moments);
    case Dtype::f16:
      return same ? by_storage<f16, f16>(kind.moments) : by_storage<f16, float>(kind.moments);
    case Dtype::f64:
      break;
  }
  return start_update<double, double, double>;
}

void start_steps(const Work* const* works, int ranks, cudaStream_t stream) {
  Launch<OpenStep> open{ranks, 1, {}};
  Launch<CloseStep> close{ranks, 1, {}};
  const StepWork* steps[kMaxVirtualRanks];
  std::vector<const UpdateWork*> kinds;
  for (int r = 0; r < ranks; ++r) {
    steps[r] = &std::get<StepWork>(*works[r]);
    open.calls[r] = steps[r]->open;
    close.calls[r].endpoint = steps[r]->open.endpoint;
    for (const UpdateWork& update : steps[r]->updates) {
      const auto known = [&](const UpdateWork* kind) { return kind->same_kind(update); };
      if (std::none_of(kinds.begin(), kinds.end(), known)) kinds.push_back(&update);
    }
  }
  start(open, stream);
  for (const UpdateWork* kind : kinds) update_of (*kind)(*kind, steps, ranks, stream);
  start(close, stream);
}

}  // namespace

bool start_all(const Work* const* works, int ranks, cudaStream_t stream) {
  for (int r = 1; r < ranks; ++r) {
    if (works[r]->index() != works[0]->index()) return false;
  }
  switch (works[0]->index()) {
    case 0:
      return start_kernels<ReduceCall>(works, ranks, stream);
    case 1:
      return start_kernels<GatherCall>(works, ranks, stream);
    case 2:
      return start_kernels<NormCall>(works, ranks, stream);
    default:
      start_steps(works, ranks, stream);
      return true;
  }
}

}  // namespace pk
