// Whole-number products of a quantized block with AVX2, eight outputs at once: pairs of products in 16 bits.
#pragma once

SGL_KERNEL_BEGIN

inline Vec load_half(const uint16_t* from) {
  return Vec{_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}

// The bits of the largest size: sizes are ordered as their bits are, and NaN lies above them all.
inline uint32_t largest_size(const XVecs& x) {
  const __m256i size = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256();
  for (const Vec& part : x.part) most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(part.lanes), size));
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0b01001110));
  return _mm_cvtsi128_si32(_mm_max_epu32(half, _mm_shuffle_epi32(half, 0b10110001)));
}

// Writes x * inverse as whole numbers, rounded to nearest, ties to even; returns their sum.
inline int32_t round_block(const XVecs& x, float inverse, int8_t* to) {
  __m256i whole[4];
  for (int64_t i = 0; i < 4; ++i) whole[i] = _mm256_cvtps_epi32((x.part[i] * Vec::same(inverse)).lanes);
  const __m256i pairs = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
  // Packing works within 128-bit halves: the fours lie 0 2 4 6 1 3 5 7.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(pairs, order));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(whole[0], whole[1]), _mm256_add_epi32(whole[2], whole[3]));
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0b01001110));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0b10110001)));
}

inline __m256i four_inputs(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof(four));
  return _mm256_set1_epi32(four);
}

inline __m256i load_bytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

// The numbers of a block as they are stored, at most 6 bits; those of eight outputs.
template <int64_t Bits>
struct Numbers {
  static constexpr int64_t high = Bits - 4;
  __m256i w[8];

  [[gnu::always_inline]] static Numbers load(const uint8_t* record, int64_t piece) {
    Numbers out;
    const __m256i low = _mm256_set1_epi8(15);
    for (int64_t j = 0; j < 4; ++j) {
      const __m256i both = load_bytes(record + 64 * j + 32 * piece);
      out.w[j] = _mm256_and_si256(both, low);
      out.w[4 + j] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    if constexpr (high > 0) out.template add_high<0>(record + 256 + 32 * piece);
    return out;
  }

  // Bits above the fourth. What a shift of 16 bits brings from the byte beside falls to the mask.
  template <int64_t J>
  [[gnu::always_inline]] void add_high(const uint8_t* planes) {
    constexpr int64_t bit = J * high, left = 4 - bit % 8;
    const __m256i plane = load_bytes(planes + bit / 8 * 64);
    __m256i turned = plane;
    if constexpr (left > 0) turned = _mm256_slli_epi16(plane, left);
    if constexpr (left < 0) turned = _mm256_srli_epi16(plane, -left);
    w[J] = _mm256_or_si256(w[J], _mm256_and_si256(turned, _mm256_set1_epi8(((1 << high) - 1) << 4)));
    if constexpr (J < 7) add_high<J + 1>(planes);
  }

  // The products with the inputs of `Count` fours, added to `start`.
  template <int64_t First, int64_t Count>
  [[gnu::always_inline]] Vec products(const int8_t* x, int32_t start) const {
    constexpr int64_t together = kFoursTogether<Bits> < Count ? kFoursTogether<Bits> : Count;
    __m256i sum = _mm256_set1_epi32(start);
    for (int64_t j = First; j < First + Count; j += together) {
      __m256i pairs = _mm256_maddubs_epi16(w[j], four_inputs(x + 4 * j));
      for (int64_t k = j + 1; k < j + together; ++k) {
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[k], four_inputs(x + 4 * k)));
      }
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return Vec{_mm256_cvtepi32_ps(sum)};
  }

  [[gnu::always_inline]] Vec dot(const int8_t* x, int32_t start) const { return products<0, 8>(x, start); }
  [[gnu::always_inline]] Vec first_half(const int8_t* x, int32_t start) const { return products<0, 4>(x, start); }
  [[gnu::always_inline]] Vec second_half(const int8_t* x, int32_t start) const { return products<4, 4>(x, start); }
};

// 8-bit numbers of a block, stored 128 above their value.
template <>
struct Numbers<8> {
  __m256i w[8];

  [[gnu::always_inline]] static Numbers load(const uint8_t* record, int64_t piece) {
    Numbers out;
    const __m256i high = _mm256_set1_epi8(-128);
    for (int64_t j = 0; j < 8; ++j) out.w[j] = _mm256_xor_si256(load_bytes(record + 64 * j + 32 * piece), high);
    return out;
  }

  // Pairs of products of a full byte would not fit 16 bits: the sign of w goes over to x, whose value is at most 127.
  [[gnu::always_inline]] Vec dot(const int8_t* x, int32_t) const {
    __m256i sum = _mm256_setzero_si256();
    for (int64_t j = 0; j < 8; ++j) {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), _mm256_sign_epi8(four_inputs(x + 4 * j), w[j]));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return Vec{_mm256_cvtepi32_ps(sum)};
  }
};

SGL_KERNEL_END
