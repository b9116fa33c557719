// The processor's vector instructions, and the products for which an intrinsic will not do. Read by vec_*.h, dot_*.h and kv_*.h.
//
// A level that the processor at hand lacks is built for tests with SGL_EMULATED: then the same intrinsics are functions of SIMDe, and
// no line outside of this file and x86_emulated.h knows of it.
#pragma once

#include "common.h"

#if defined(SGL_EMULATED)
#include "x86_emulated.h"
#else
#include <immintrin.h>
#endif

SGL_KERNEL_BEGIN

#if defined(SGL_ISA_avx512_vnni_bf16)

// sum += the four products of unsigned x and signed w in each lane. Not the intrinsic: g++ 12 moves its sums between registers and
// the stack, which halves the rate.
inline void add_four_products(__m512i& sum, __m512i x, __m512i w) {
#if defined(SGL_EMULATED)
  sum = _mm512_dpbusd_epi32(sum, x, w);
#else
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
#endif
}

// sum += the two products of bf16 in each lane. Not the intrinsic: with it g++ 12 keeps such sums on the stack.
inline void add_two_products(__m512& sum, __m512i a, __m512i b) {
#if defined(SGL_EMULATED)
  sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#endif
}

// sum += the two products of 16 bits in each lane, for the same reason.
inline void add_two_products(__m512i& sum, __m512i a, __m512i b) {
#if defined(SGL_EMULATED)
  sum = _mm512_dpwssd_epi32(sum, a, b);
#else
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#endif
}

#endif

#if defined(SGL_ISA_avx512) || defined(SGL_ISA_avx512_vnni_bf16)

// What was loaded stays in its register, where g++ would load it once more for each use.
inline void keep(__m512i& loaded) {
#if !defined(SGL_EMULATED)
  asm("" : "+v"(loaded));
#else
  (void)loaded;
#endif
}

#elif defined(SGL_ISA_avx2)

inline void keep(__m256i& loaded) {
#if !defined(SGL_EMULATED)
  asm("" : "+x"(loaded));
#else
  (void)loaded;
#endif
}

#endif

SGL_KERNEL_END
