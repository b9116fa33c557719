// A row of floats in registers: `Vec` with `width`, `load` and `store` for float and bf16, and the few operations that the
// kernels need. `Pairs` holds two bf16 numbers a lane. One file per instruction set; all arithmetic is float, bf16 is a storage
// form.
#pragma once

#include "common.h"
#include "ops.h"

SGL_KERNEL_BEGIN

inline float to_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
inline bf16 to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return bf16{static_cast<uint16_t>((bits >> 16) | 0x0040u)};
  }
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// One element, for the end of a row that fills no register.
inline float load_one(const float* from) { return *from; }
inline float load_one(const bf16* from) { return to_float(*from); }
inline void store_one(float* to, float value) { *to = value; }
inline void store_one(bf16* to, float value) { *to = to_bf16(value); }

SGL_KERNEL_END

#if defined(SGL_ISA_avx512) || defined(SGL_ISA_avx512_vnni_bf16)
#include "vec_avx512.h"
#elif defined(SGL_ISA_avx2)
#include "vec_avx2.h"
#else
#include "vec_scalar.h"
#endif
