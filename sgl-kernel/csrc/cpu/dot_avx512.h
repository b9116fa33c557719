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

// sum += the four products of unsigned w and signed x in each lane; w is at most 15 where there is no VNNI.
inline __m512i add_products(__m512i sum, __m512i w, __m512i x) {
#if defined(SGL_ISA_avx512_vnni_bf16)
  return _mm512_dpbusd_epi32(sum, w, x);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
#endif
}

// 4-bit numbers of a block, without their offset: 0 .. 15.
struct Nibbles {
  static constexpr int64_t bytes = 256;
  __m512i w[8];

  static Nibbles load(const uint8_t* record, int64_t) {
    Nibbles out;
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t j = 0; j < 4; ++j) {
      const __m512i both = _mm512_loadu_si512(record + 64 * j);
      out.w[j] = _mm512_and_si512(both, low);
      out.w[4 + j] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
    return out;
  }

  // The products with 32 inputs, added to `start`.
  Vec dot(const int8_t* x, int32_t start) const {
    __m512i first = _mm512_set1_epi32(start), second = _mm512_setzero_si512();
    for (int64_t j = 0; j < 4; ++j) {
      first = add_products(first, w[j], four_inputs(x + 4 * j));
      second = add_products(second, w[4 + j], four_inputs(x + 16 + 4 * j));
    }
    return to_vec(_mm512_add_epi32(first, second));
  }
};

// 8-bit numbers of a block, stored 128 above their value.
struct Octets {
  static constexpr int64_t bytes = 512;
  __m512i w[8];

  static Octets load(const uint8_t* record, int64_t) {
    Octets out;
    for (int64_t j = 0; j < 8; ++j) {
      out.w[j] = _mm512_loadu_si512(record + 64 * j);
#if !defined(SGL_ISA_avx512_vnni_bf16)
      out.w[j] = _mm512_xor_si512(out.w[j], _mm512_set1_epi8(-128));
#endif
    }
    return out;
  }

  Vec dot(const int8_t* x, int32_t start) const {
#if defined(SGL_ISA_avx512_vnni_bf16)
    __m512i first = _mm512_set1_epi32(start), second = _mm512_setzero_si512();
    for (int64_t j = 0; j < 4; ++j) {
      first = add_products(first, w[j], four_inputs(x + 4 * j));
      second = add_products(second, w[4 + j], four_inputs(x + 16 + 4 * j));
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
