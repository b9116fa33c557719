// `Vec` with AVX2 and FMA: eight floats.
#pragma once

#include "x86.h"

SGL_KERNEL_BEGIN

struct Vec {
  static constexpr int64_t width = 8;
  __m256 lanes;

  static Vec zero() { return Vec{_mm256_setzero_ps()}; }
  static Vec same(float x) { return Vec{_mm256_set1_ps(x)}; }

  static Vec load(const float* from) { return Vec{_mm256_loadu_ps(from)}; }

  static Vec load(const bf16* from) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return Vec{_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
  }

  void store(float* to) const { _mm256_storeu_ps(to, lanes); }

  void store(bf16* to) const {
    const __m256i bits = _mm256_castps_si256(lanes);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(lanes, lanes, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    // Packing works within 128-bit halves: [lo, lo, hi, hi], so the middle quarters are swapped back.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0b11011000);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
  }

  float sum() const {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
};

inline Vec max(Vec a, Vec b) { return Vec{_mm256_max_ps(a.lanes, b.lanes)}; }
inline Vec min(Vec a, Vec b) { return Vec{_mm256_min_ps(a.lanes, b.lanes)}; }
inline Vec operator/(Vec a, Vec b) { return Vec{_mm256_div_ps(a.lanes, b.lanes)}; }
inline float highest(Vec a) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.lanes), _mm256_extractf128_ps(a.lanes, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Vec whole(Vec a) { return Vec{_mm256_round_ps(a.lanes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec times_power_of_two(Vec a, Vec power) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power.lanes), _mm256_set1_epi32(127));
  return Vec{_mm256_mul_ps(a.lanes, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}
// Zero where x is below the bound, else the value.
inline Vec zero_below(Vec x, Vec bound, Vec value) {
  return Vec{_mm256_and_ps(_mm256_cmp_ps(x.lanes, bound.lanes, _CMP_NLT_UQ), value.lanes)};
}
// A bit for each lane in which x is not below the bound.
inline uint32_t at_least(Vec x, Vec bound) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.lanes, bound.lanes, _CMP_NLT_UQ)));
}
inline Vec operator-(Vec a, Vec b) { return Vec{_mm256_sub_ps(a.lanes, b.lanes)}; }
inline Vec operator+(Vec a, Vec b) { return Vec{_mm256_add_ps(a.lanes, b.lanes)}; }
inline Vec operator*(Vec a, Vec b) { return Vec{_mm256_mul_ps(a.lanes, b.lanes)}; }
inline Vec multiply_add(Vec a, Vec b, Vec c) { return Vec{_mm256_fmadd_ps(a.lanes, b.lanes, c.lanes)}; }

struct Pairs {
  __m256i bits;

  static Pairs load(const bf16* from) { return Pairs{_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))}; }
  Vec even() const { return Vec{_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))}; }
  Vec odd() const { return Vec{_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)))}; }
};

SGL_KERNEL_END
