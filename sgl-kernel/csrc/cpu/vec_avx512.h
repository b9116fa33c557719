// `Vec` with AVX512 (F, BW, DQ, VL): sixteen floats.
#pragma once

#include "x86.h"

SGL_KERNEL_BEGIN

struct Vec {
  static constexpr int64_t width = 16;
  __m512 lanes;

  static Vec zero() { return Vec{_mm512_setzero_ps()}; }
  static Vec same(float x) { return Vec{_mm512_set1_ps(x)}; }

  static Vec load(const float* from) { return Vec{_mm512_loadu_ps(from)}; }

  static Vec load(const bf16* from) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return Vec{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }

  void store(float* to) const { _mm512_storeu_ps(to, lanes); }

  void store(bf16* to) const {
    const __m512i bits = _mm512_castps_si512(lanes);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(lanes, lanes, _CMP_UNORD_Q);
    const __m512i high = _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(high));
  }

  float sum() const { return _mm512_reduce_add_ps(lanes); }
};

inline Vec max(Vec a, Vec b) { return Vec{_mm512_max_ps(a.lanes, b.lanes)}; }
inline Vec min(Vec a, Vec b) { return Vec{_mm512_min_ps(a.lanes, b.lanes)}; }
inline Vec operator/(Vec a, Vec b) { return Vec{_mm512_div_ps(a.lanes, b.lanes)}; }
inline float highest(Vec a) { return _mm512_reduce_max_ps(a.lanes); }
inline Vec whole(Vec a) { return Vec{_mm512_roundscale_ps(a.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec times_power_of_two(Vec a, Vec power) { return Vec{_mm512_scalef_ps(a.lanes, power.lanes)}; }
// Zero where x is below the bound, else the value.
inline Vec zero_below(Vec x, Vec bound, Vec value) {
  return Vec{_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.lanes, bound.lanes, _CMP_NLT_UQ), value.lanes)};
}
// A bit for each lane in which x is not below the bound.
inline uint32_t at_least(Vec x, Vec bound) { return _mm512_cmp_ps_mask(x.lanes, bound.lanes, _CMP_NLT_UQ); }
inline Vec operator-(Vec a, Vec b) { return Vec{_mm512_sub_ps(a.lanes, b.lanes)}; }
inline Vec operator+(Vec a, Vec b) { return Vec{_mm512_add_ps(a.lanes, b.lanes)}; }
inline Vec operator*(Vec a, Vec b) { return Vec{_mm512_mul_ps(a.lanes, b.lanes)}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return Vec{_mm512_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }

struct Pairs {
  __m512i bits;

  static Pairs load(const bf16* from) { return Pairs{_mm512_loadu_si512(from)}; }
  Vec even() const { return Vec{_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))}; }
  Vec odd() const { return Vec{_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)))}; }
};

SGL_KERNEL_END
