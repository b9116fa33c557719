// A square of floats, as many rows as a register has lanes, turned over its diagonal.
#pragma once

#include "vec.h"

SGL_KERNEL_BEGIN

#if defined(SGL_ISA_avx512) || defined(SGL_ISA_avx512_vnni_bf16)

inline void transpose(Vec (&rows)[Vec::width]) {
  __m512 quads[16];
  for (int i = 0; i < 4; ++i) {  // within each quarter of four rows: column 4 q + j, q the quarter of the register
    const __m512 a = rows[4 * i].lanes, b = rows[4 * i + 1].lanes, c = rows[4 * i + 2].lanes, d = rows[4 * i + 3].lanes;
    const __m512d ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
    const __m512d cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    quads[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low));
    quads[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low));
    quads[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
    quads[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
  }
  for (int j = 0; j < 4; ++j) {  // then the quarters themselves
    const __m512 low = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0x44), high = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0xee);
    const __m512 low2 = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0x44);
    const __m512 high2 = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0xee);
    rows[j].lanes = _mm512_shuffle_f32x4(low, low2, 0x88);
    rows[4 + j].lanes = _mm512_shuffle_f32x4(low, low2, 0xdd);
    rows[8 + j].lanes = _mm512_shuffle_f32x4(high, high2, 0x88);
    rows[12 + j].lanes = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }
}

#elif defined(SGL_ISA_avx2)

inline void transpose(Vec (&rows)[Vec::width]) {
  __m256 quads[8];
  for (int i = 0; i < 2; ++i) {
    const __m256 a = rows[4 * i].lanes, b = rows[4 * i + 1].lanes, c = rows[4 * i + 2].lanes, d = rows[4 * i + 3].lanes;
    const __m256d ab_low = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), ab_high = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
    const __m256d cd_low = _mm256_castps_pd(_mm256_unpacklo_ps(c, d)), cd_high = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
    quads[4 * i] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab_low, cd_low));
    quads[4 * i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab_low, cd_low));
    quads[4 * i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab_high, cd_high));
    quads[4 * i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab_high, cd_high));
  }
  for (int j = 0; j < 4; ++j) {
    rows[j].lanes = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x20);
    rows[4 + j].lanes = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x31);
  }
}

#else

inline void transpose(Vec (&rows)[Vec::width]) {
  for (int64_t i = 0; i < Vec::width; ++i) {
    for (int64_t j = 0; j < i; ++j) {
      const float kept = rows[i].lane[j];
      rows[i].lane[j] = rows[j].lane[i];
      rows[j].lane[i] = kept;
    }
  }
}

#endif

SGL_KERNEL_END
