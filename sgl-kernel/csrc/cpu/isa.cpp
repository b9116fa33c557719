#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace sgl {

namespace {

constexpr Isa kLevels[] = {Isa::base, Isa::avx2, Isa::avx512, Isa::avx512_vnni_bf16};

Isa pick() {
  const char* asked = std::getenv("SGL_KERNEL_ISA");
  if (asked == nullptr || *asked == '\0') {
    Isa best = Isa::base;
    for (Isa level : kLevels) {
      if (isa_supported(level)) best = level;
    }
    return best;
  }
  for (Isa level : kLevels) {
    if (std::strcmp(asked, isa_name(level)) != 0) continue;
    if (!isa_supported(level)) {
      throw std::runtime_error(std::string("SGL_KERNEL_ISA=") + asked +
                               ": this processor does not have it; unset the variable to take the best that it has");
    }
    return level;
  }
  throw std::runtime_error(std::string("SGL_KERNEL_ISA=") + asked + ": use one of base, avx2, avx512, avx512_vnni_bf16");
}

}  // namespace

const char* isa_name(Isa level) {
  switch (level) {
    case Isa::avx512_vnni_bf16: return "avx512_vnni_bf16";
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    default: return "base";
  }
}

bool isa_supported(Isa level) {
  if (is_emulated) return is_built(level);
  switch (level) {
    case Isa::avx512_vnni_bf16:
      return isa_supported(Isa::avx512) && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    case Isa::avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
    case Isa::avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    default: return true;
  }
}

Isa isa() {
  static const Isa picked = pick();
  return picked;
}

}  // namespace sgl
