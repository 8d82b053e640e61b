#include <algorithm>
#include <cstdint>
#include <cstring>

#include "launch.h"

namespace pk {
namespace {

constexpr std::size_t kWords = 1000;  // the parameters of a kernel hold 4096 bytes

struct Part {
  std::uint32_t words[kWords];
};

__global__ void write_words(const __grid_constant__ Part part, std::uint32_t* to, unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) to[i] = part.words[i];
}

}  // namespace

void write_table(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  for (std::size_t at = 0; at < bytes; at += sizeof(Part)) {
    const std::size_t size = std::min(bytes - at, sizeof(Part));
    Part part;
    std::memcpy(&part, static_cast<const std::byte*>(from) + at, size);
    auto* target = reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(to) + at);
    write_words<<<1, 256, 0, stream>>>(part, target, unsigned(size / sizeof(std::uint32_t)));
    check(cudaGetLastError(), "write_table");
  }
}

}  // namespace pk
