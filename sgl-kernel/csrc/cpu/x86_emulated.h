// The vector instructions of a level that the processor at hand lacks, as plain C: SIMDe's, under the names of the intrinsics, and
// below what SIMDe 0.8.2 does not have or has wrong. For tests only (tests/emulated.py builds it), far too slow for anything else.
#pragma once

#define SIMDE_NO_NATIVE
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC

#if defined(SGL_ISA_avx512) || defined(SGL_ISA_avx512_vnni_bf16)

typedef int32_t __v16si __attribute__((vector_size(64)));
typedef float __v16sf __attribute__((vector_size(64)));

namespace {

inline __m256i _mm512_cvtepi32_epi16(__m512i a) {
  typedef int16_t Halves __attribute__((vector_size(32)));
  return (__m256i)__builtin_convertvector((__v16si)a, Halves);
}

inline __m128i _mm512_cvtepi32_epi8(__m512i a) {
  typedef int8_t Bytes __attribute__((vector_size(16)));
  return (__m128i)__builtin_convertvector((__v16si)a, Bytes);
}

inline int32_t _mm512_reduce_add_epi32(__m512i a) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += static_cast<uint32_t>(((__v16si)a)[i]);
  return static_cast<int32_t>(sum);
}

inline float _mm512_reduce_add_ps(__m512 a) {
  float sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = ((__v16sf)a)[i];
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// SIMDe's write zeros where the mask has none.
template <typename Lane, typename Register>
inline void store_some(void* to, __mmask16 mask, Register a) {
  Lane lanes[16];
  static_assert(sizeof(lanes) == sizeof(a));
  __builtin_memcpy(lanes, &a, sizeof(a));
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) static_cast<Lane*>(to)[i] = lanes[i];
  }
}
#undef _mm512_mask_storeu_epi32
#undef _mm256_mask_storeu_epi16
#define _mm512_mask_storeu_epi32 store_some<int32_t>
#define _mm256_mask_storeu_epi16 store_some<int16_t>

}  // namespace

#endif
