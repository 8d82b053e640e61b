// The launches and the memory of csrc/cuda with threads of the host as blocks.
#include <utility>

#include "cuda/memory.h"
#include "cuda/work.h"
#include "race/cuda_block.h"

namespace pk {

template <class Call>
void start(const Launch<Call>& launch, cudaStream_t) {
  constexpr int kThreads = 2;
  run_threads(launch.ranks, [&](int rank) {
    run_threads(launch.blocks, [&](int index) {
      SharedByBlock shared(kThreads);
      run_threads(kThreads, [&](int thread) {
        HostBlock block(shared, thread, kThreads, index, launch.blocks);
        run(block, launch.calls[rank]);
      });
    });
  });
}

template <class Call>
int blocks_per_multiprocessor() {
  return 1;
}

template int blocks_per_multiprocessor<ReduceCall>();
template int blocks_per_multiprocessor<GatherCall>();
template int blocks_per_multiprocessor<NormCall>();
template void start(const Launch<ReduceCall>&, cudaStream_t);
template void start(const Launch<GatherCall>&, cudaStream_t);
template void start(const Launch<NormCall>&, cudaStream_t);
template void start(const Launch<OpenStep>&, cudaStream_t);
template void start(const Launch<CloseStep>&, cudaStream_t);
template void start(const Launch<Update<float, float, float>>&, cudaStream_t);
template void start(const Launch<Update<float, float, bf16>>&, cudaStream_t);
template void start(const Launch<Update<float, float, std::int8_t>>&, cudaStream_t);
template void start(const Launch<Update<double, double, double>>&, cudaStream_t);
template void start(const Launch<Update<bf16, bf16, float>>&, cudaStream_t);
template void start(const Launch<Update<bf16, bf16, bf16>>&, cudaStream_t);
template void start(const Launch<Update<bf16, bf16, std::int8_t>>&, cudaStream_t);
template void start(const Launch<Update<bf16, float, float>>&, cudaStream_t);
template void start(const Launch<Update<bf16, float, bf16>>&, cudaStream_t);
template void start(const Launch<Update<bf16, float, std::int8_t>>&, cudaStream_t);
template void start(const Launch<Update<f16, f16, float>>&, cudaStream_t);
template void start(const Launch<Update<f16, f16, bf16>>&, cudaStream_t);
template void start(const Launch<Update<f16, f16, std::int8_t>>&, cudaStream_t);
template void start(const Launch<Update<f16, float, float>>&, cudaStream_t);
template void start(const Launch<Update<f16, float, bf16>>&, cudaStream_t);
template void start(const Launch<Update<f16, float, std::int8_t>>&, cudaStream_t);

void write_table(void* to, const void* from, std::size_t bytes, cudaStream_t) {
  std::memcpy(to, from, bytes);
}

// --- memory
// ---------------------------------------------------------------------------------------

std::shared_ptr<Memory> Memory::plain(int device, std::uint64_t bytes) {
  void* address = nullptr;
  cudaMalloc(&address, bytes);
  std::memset(address, 0, bytes);
  std::shared_ptr<Memory> made(
      new Memory(device, reinterpret_cast<std::uintptr_t>(address), bytes));
  made->release_ = [address] { cudaFree(address); };
  return made;
}
std::shared_ptr<Memory> Memory::shareable(int device, std::uint64_t bytes) {
  return plain(device, bytes);
}
std::shared_ptr<Memory> Memory::open_ipc(int, const std::string&, std::uint64_t) {
  throw std::runtime_error("not on the host");
}
std::shared_ptr<Memory> Memory::open_fd(int, int, std::uint64_t) {
  throw std::runtime_error("not on the host");
}
std::string Memory::ipc_handle() const { return std::string(64, '\0'); }
int Memory::export_fd() const { throw std::runtime_error("not on the host"); }
void Memory::close() {
  if (const auto release = std::exchange(release_, nullptr)) release();
}
bool exports_descriptors(int) { return false; }
bool has_multicast(int) { return false; }

}  // namespace pk
