// Whole-number products of int8 weights with quantized rows: `Int8Step` adds those of four inputs to the sums of some outputs.
//
// Weights are any int8, x is -127 .. 127, and every sum is exact, so all instruction sets agree to the last bit. Where weights need
// an unsigned x it is stored 128 above its value; the sums then start at -128 times those of the weights.
#pragma once

#include "vec.h"

SGL_KERNEL_BEGIN

inline int32_t four_bytes(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof(four));
  return four;
}

#if defined(SGL_ISA_avx512) || defined(SGL_ISA_avx512_vnni_bf16)

using Whole = __m512i;
inline Whole load_whole(const int32_t* from) { return _mm512_loadu_si512(from); }
// Not the intrinsic, of which g++ 12 believes that it reads a register before it is set.
inline Vec to_vec(Whole sums) { return Vec{(__m512)__builtin_convertvector((__v16si)sums, __v16sf)}; }

#elif defined(SGL_ISA_avx2)

using Whole = __m256i;
inline Whole load_whole(const int32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline Vec to_vec(Whole sums) { return Vec{_mm256_cvtepi32_ps(sums)}; }

#else

struct Whole {
  int32_t lane[Vec::width];
};
inline Whole load_whole(const int32_t* from) {
  Whole out;
  __builtin_memcpy(out.lane, from, sizeof(out.lane));
  return out;
}
inline Vec to_vec(Whole sums) {
  Vec out;
  for (int64_t i = 0; i < Vec::width; ++i) out.lane[i] = static_cast<float>(sums.lane[i]);
  return out;
}

#endif

struct Int8Step {
#if defined(SGL_ISA_avx512_vnni_bf16)
  static constexpr bool above = true;  // x is stored 128 above its value
  static constexpr int64_t rows = 14, sums = 28;

  template <int64_t Rows, int64_t Lanes>
  static void add(const int8_t* x, int64_t stride, const int8_t* weight, Whole (&sums)[Rows][Lanes]) {
    Whole w[Lanes];
    for (int64_t j = 0; j < Lanes; ++j) w[j] = _mm512_loadu_si512(weight + j * sizeof(Whole));
    for (int64_t r = 0; r < Rows; ++r) {
      const Whole value = _mm512_set1_epi32(four_bytes(x + r * stride));
      for (int64_t j = 0; j < Lanes; ++j) add_four_products(sums[r][j], value, w[j]);
    }
  }
#elif defined(SGL_ISA_avx512)
  static constexpr bool above = false;
  static constexpr int64_t rows = 12, sums = 24;

  // Pairs of products with an unsigned 255 would not fit 16 bits: the sign of w goes over to x, and 2 * 128 * 127 fits.
  template <int64_t Rows, int64_t Lanes>
  static void add(const int8_t* x, int64_t stride, const int8_t* weight, Whole (&sums)[Rows][Lanes]) {
    Whole size[Lanes];
    __mmask64 negative[Lanes];
    for (int64_t j = 0; j < Lanes; ++j) {
      const Whole w = _mm512_loadu_si512(weight + j * sizeof(Whole));
      size[j] = _mm512_abs_epi8(w);
      negative[j] = _mm512_movepi8_mask(w);
    }
    for (int64_t r = 0; r < Rows; ++r) {
      const Whole value = _mm512_set1_epi32(four_bytes(x + r * stride));
      for (int64_t j = 0; j < Lanes; ++j) {
        const Whole turned = _mm512_mask_sub_epi8(value, negative[j], _mm512_setzero_si512(), value);
        const Whole pairs = _mm512_maddubs_epi16(size[j], turned);
        sums[r][j] = _mm512_add_epi32(sums[r][j], _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
      }
    }
  }
#elif defined(SGL_ISA_avx2)
  static constexpr bool above = false;
  static constexpr int64_t rows = 4, sums = 8;

  // As above.
  template <int64_t Rows, int64_t Lanes>
  static void add(const int8_t* x, int64_t stride, const int8_t* weight, Whole (&sums)[Rows][Lanes]) {
    Whole w[Lanes], size[Lanes];
    for (int64_t j = 0; j < Lanes; ++j) {
      w[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight + j * sizeof(Whole)));
      size[j] = _mm256_abs_epi8(w[j]);
    }
    for (int64_t r = 0; r < Rows; ++r) {
      const Whole value = _mm256_set1_epi32(four_bytes(x + r * stride));
      for (int64_t j = 0; j < Lanes; ++j) {
        const Whole pairs = _mm256_maddubs_epi16(size[j], _mm256_sign_epi8(value, w[j]));
        sums[r][j] = _mm256_add_epi32(sums[r][j], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
      }
    }
  }
#else
  static constexpr bool above = false;
  static constexpr int64_t rows = 4, sums = 8;

  template <int64_t Rows, int64_t Lanes>
  static void add(const int8_t* x, int64_t stride, const int8_t* weight, Whole (&sums)[Rows][Lanes]) {
    for (int64_t r = 0; r < Rows; ++r) {
      const int8_t* four = x + r * stride;
      for (int64_t j = 0; j < Lanes; ++j) {
        for (int64_t i = 0; i < Vec::width; ++i) {
          const int8_t* w = weight + 4 * (j * Vec::width + i);
          sums[r][j].lane[i] += w[0] * four[0] + w[1] * four[1] + w[2] * four[2] + w[3] * four[3];
        }
      }
    }
  }
#endif
};

SGL_KERNEL_END
