// Whole-number products of a quantized block with AVX2, eight outputs at once: pairs of products in 16 bits.
#pragma once

SGL_KERNEL_BEGIN

inline Vec load_half(const uint16_t* from) {
  return Vec{_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}

inline __m256i four_inputs(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, sizeof(four));
  return _mm256_set1_epi32(four);
}

inline __m256i load_bytes(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }

struct Nibbles {
  static constexpr int64_t bytes = 256;
  __m256i w[8];

  static Nibbles load(const uint8_t* record, int64_t piece) {
    Nibbles out;
    const __m256i low = _mm256_set1_epi8(15);
    for (int64_t j = 0; j < 4; ++j) {
      const __m256i both = load_bytes(record + 64 * j + 32 * piece);
      out.w[j] = _mm256_and_si256(both, low);
      out.w[4 + j] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    return out;
  }

  // Eight pairs of products of at most 15 * 127 fit 16 bits together.
  Vec dot(const int8_t* x, int32_t offset) const {
    __m256i pairs = _mm256_maddubs_epi16(w[0], four_inputs(x));
    for (int64_t j = 1; j < 8; ++j) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[j], four_inputs(x + 4 * j)));
    const __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    return Vec{_mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_set1_epi32(offset)))};
  }
};

struct Octets {
  static constexpr int64_t bytes = 512;
  __m256i w[8];

  static Octets load(const uint8_t* record, int64_t piece) {
    Octets out;
    const __m256i high = _mm256_set1_epi8(-128);
    for (int64_t j = 0; j < 8; ++j) out.w[j] = _mm256_xor_si256(load_bytes(record + 64 * j + 32 * piece), high);
    return out;
  }

  // Pairs of products of a full byte would not fit 16 bits: the sign of w goes over to x, whose value is at most 127.
  Vec dot(const int8_t* x, int32_t) const {
    __m256i sum = _mm256_setzero_si256();
    for (int64_t j = 0; j < 8; ++j) {
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), _mm256_sign_epi8(four_inputs(x + 4 * j), w[j]));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return Vec{_mm256_cvtepi32_ps(sum)};
  }
};

SGL_KERNEL_END
