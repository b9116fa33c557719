// The kernels as the dispatcher sees them: one declaration, once per instruction set. Raw pointers and sizes only.
#pragma once

#include <stdint.h>

namespace sgl {

struct bf16 {
  uint16_t bits;
};

#define SGL_DECLARE_KERNELS(isa)                                                                                    \
  namespace isa {                                                                                                   \
  void fused_add_rmsnorm(float* input, float* residual, const float* weight, int64_t rows, int64_t hidden, float eps); \
  void fused_add_rmsnorm(bf16* input, bf16* residual, const bf16* weight, int64_t rows, int64_t hidden, float eps);   \
  }

SGL_DECLARE_KERNELS(base)
SGL_DECLARE_KERNELS(avx2)
SGL_DECLARE_KERNELS(avx512)

}  // namespace sgl
