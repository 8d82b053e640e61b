#include "kernels.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace pk {
namespace {

const Kernels& choose() {
  const char* wanted = std::getenv("PARALLELKIT_ISA");
  const std::string name = wanted ? wanted : "";
#if defined(PK_X86_DISPATCH)
  __builtin_cpu_init();
  // Whatever has AVX2 and FMA has F16C too, which not every compiler lets us ask for.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && (name.empty() || name == "avx512")) return kAvx512;
  if (avx2 && (name.empty() || name == "avx2")) return kAvx2;
#endif
  if (name.empty() || name == "portable") return kPortable;
  throw std::invalid_argument("PARALLELKIT_ISA=" + name +
                              ": this processor or build has no such path; "
                              "wanted portable, avx2 or avx512, or leave it unset");
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace pk
