// Whole-number products of a quantized block, sixteen outputs at once; with VNNI or with what AVX-512 has without it.
#pragma once

SGL_KERNEL_BEGIN

inline Vec load_half(const uint16_t* from) {
  return Vec{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}

// The bits of the largest size: sizes are ordered as their bits are, and NaN lies above them all.
inline uint32_t largest_size(const XVecs& x) {
  const __m512i size = _mm512_set1_epi32(0x7fffffff);
  const __m512i low = _mm512_and_si512(_mm512_castps_si512(x.part[0].lanes), size);
  return _mm512_reduce_max_epu32(_mm512_max_epu32(low, _mm512_and_si512(_mm512_castps_si512(x.part[1].lanes), size)));
}

// Writes x * inverse as whole numbers, rounded to nearest, ties to even; returns their sum.
inline int32_t round_block(const XVecs& x, float inverse, int8_t* to) {
  const __m512i low = _mm512_cvtps_epi32((x.part[0] * Vec::same(inverse)).lanes);
  const __m512i high = _mm512_cvtps_epi32((x.part[1] * Vec::same(inverse)).lanes);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm512_cvtepi32_epi8(high));
  return _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
}

inline Vec to_vec(__m512i whole) { return Vec{_mm512_cvtepi32_ps(whole)}; }

inline __m512i four_inputs(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof(four));
  return _mm512_set1_epi32(four);
}

// The numbers of a block as they are stored, at most 6 bits.
template <int64_t Bits>
struct Numbers {
  static constexpr int64_t high = Bits - 4;
  __m512i w[8];

  [[gnu::always_inline]] static Numbers load(const uint8_t* record, int64_t) {
    Numbers out;
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t j = 0; j < 4; ++j) {
      const __m512i both = _mm512_loadu_si512(record + 64 * j);
      out.w[j] = _mm512_and_si512(both, low);
      out.w[4 + j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
    if constexpr (high > 0) out.template add_high<0>(record + 256);
    return out;
  }

  // Bits above the fourth. What a shift of 16 bits brings from the byte beside falls to the mask.
  template <int64_t J>
  [[gnu::always_inline]] void add_high(const uint8_t* planes) {
    constexpr int64_t bit = J * high, left = 4 - bit % 8;
    const __m512i plane = _mm512_loadu_si512(planes + bit / 8 * 64);
    __m512i turned = plane;
    if constexpr (left > 0) turned = _mm512_slli_epi16(plane, left);
    if constexpr (left < 0) turned = _mm512_srli_epi16(plane, -left);
    constexpr int a_or_b_and_c = 0xf8;
    w[J] = _mm512_ternarylogic_epi32(w[J], turned, _mm512_set1_epi8(((1 << high) - 1) << 4), a_or_b_and_c);
    if constexpr (J < 7) add_high<J + 1>(planes);
  }

  // The products with the inputs of `Count` fours, added to `start`.
  template <int64_t First, int64_t Count>
  [[gnu::always_inline]] __m512i products(const int8_t* x, int32_t start) const {
    __m512i sum = _mm512_set1_epi32(start);
#if defined(SGL_ISA_avx512_vnni_bf16)
    for (int64_t j = First; j < First + Count; ++j) sum = _mm512_dpbusd_epi32(sum, w[j], four_inputs(x + 4 * j));
#else
    constexpr int64_t together = kFoursTogether<Bits> < Count ? kFoursTogether<Bits> : Count;
    for (int64_t j = First; j < First + Count; j += together) {
      __m512i pairs = _mm512_maddubs_epi16(w[j], four_inputs(x + 4 * j));
      for (int64_t k = j + 1; k < j + together; ++k) {
        pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(w[k], four_inputs(x + 4 * k)));
      }
      sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
#endif
    return sum;
  }

  [[gnu::always_inline]] Vec dot(const int8_t* x, int32_t start) const {
#if defined(SGL_ISA_avx512_vnni_bf16)
    const __m512i first = products<0, 4>(x, start), second = products<4, 4>(x, 0);
    return to_vec(_mm512_add_epi32(first, second));
#else
    return to_vec(products<0, 8>(x, start));
#endif
  }
  [[gnu::always_inline]] Vec first_half(const int8_t* x, int32_t start) const { return to_vec(products<0, 4>(x, start)); }
  [[gnu::always_inline]] Vec second_half(const int8_t* x, int32_t start) const { return to_vec(products<4, 4>(x, start)); }
};

// 8-bit numbers of a block, stored 128 above their value.
template <>
struct Numbers<8> {
  __m512i w[8];

  [[gnu::always_inline]] static Numbers load(const uint8_t* record, int64_t) {
    Numbers out;
    for (int64_t j = 0; j < 8; ++j) {
      out.w[j] = _mm512_loadu_si512(record + 64 * j);
#if !defined(SGL_ISA_avx512_vnni_bf16)
      out.w[j] = _mm512_xor_si512(out.w[j], _mm512_set1_epi8(-128));
#endif
    }
    return out;
  }

  [[gnu::always_inline]] Vec dot(const int8_t* x, int32_t start) const {
#if defined(SGL_ISA_avx512_vnni_bf16)
    __m512i first = _mm512_set1_epi32(start), second = _mm512_setzero_si512();
    for (int64_t j = 0; j < 4; ++j) {
      first = _mm512_dpbusd_epi32(first, w[j], four_inputs(x + 4 * j));
      second = _mm512_dpbusd_epi32(second, w[4 + j], four_inputs(x + 16 + 4 * j));
    }
    return to_vec(_mm512_add_epi32(first, second));
#else
    // Pairs of products of a full byte would not fit 16 bits: the sign of w goes over to x, whose value is at most 127.
    (void)start;
    __m512i sum = _mm512_setzero_si512();
    for (int64_t j = 0; j < 8; ++j) {
      const __m512i value = four_inputs(x + 4 * j);
      const __m512i turned = _mm512_mask_sub_epi8(value, _mm512_movepi8_mask(w[j]), _mm512_setzero_si512(), value);
      const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w[j]), turned);
      sum = _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
    return to_vec(sum);
#endif
  }
};

SGL_KERNEL_END
