// Keys and values of 8 bits as registers take them: pairs of them, widened to 16 bits, times pairs of whole numbers of 16 bits, in
// sums of 32 bits. These are exact, so the order of a sum does not matter and each instruction set has the same ones. Read by
// kv_tiles.h. Largest sum: 32767 * 127 * 256, of a query with a key.
#pragma once

#include "vec.h"

SGL_KERNEL_BEGIN

// Sums, `BytePairs`: two numbers of 16 bits in each lane, one lane for each of `Vec`.
#if defined(SGL_ISA_avx512) || defined(SGL_ISA_avx512_vnni_bf16)

struct WholeSums {
  __m512i lanes;
  static WholeSums zero() { return {_mm512_setzero_si512()}; }
  Vec floats() const { return Vec{_mm512_cvtepi32_ps(lanes)}; }
};

struct BytePairs {
  __m512i both;

  static BytePairs load(const int8_t* from) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))}; }
  static BytePairs same(const int16_t* pair) {
    int32_t bits;
    __builtin_memcpy(&bits, pair, sizeof(bits));
    return {_mm512_set1_epi32(bits)};
  }
  // The first or the second of the pairs of one, beside the first or the second of another.
  static BytePairs of(BytePairs one, bool second_of_one, BytePairs other, bool second_of_other) {
    const __m512i even = second_of_one ? _mm512_srli_epi32(one.both, 16) : one.both;
    const __m512i odd = second_of_other ? other.both : _mm512_slli_epi32(other.both, 16);
    return {_mm512_mask_blend_epi16(0xaaaaaaaa, even, odd)};
  }
};

inline void keep(BytePairs& loaded) { keep(loaded.both); }

inline void add_two_products(WholeSums& sum, BytePairs a, BytePairs b) {
#if defined(SGL_ISA_avx512_vnni_bf16)
  add_two_products(sum.lanes, a.both, b.both);
#else
  sum.lanes = _mm512_add_epi32(sum.lanes, _mm512_madd_epi16(a.both, b.both));
#endif
}

// Rounded to whole numbers, ties to even; each fits.
inline void store_whole(Vec a, int16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.lanes)));
}
inline void store_whole(Vec a, int8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.lanes)));
}

#elif defined(SGL_ISA_avx2)

struct WholeSums {
  __m256i lanes;
  static WholeSums zero() { return {_mm256_setzero_si256()}; }
  Vec floats() const { return Vec{_mm256_cvtepi32_ps(lanes)}; }
};

struct BytePairs {
  __m256i both;

  static BytePairs load(const int8_t* from) { return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))}; }
  static BytePairs same(const int16_t* pair) {
    int32_t bits;
    __builtin_memcpy(&bits, pair, sizeof(bits));
    return {_mm256_set1_epi32(bits)};
  }
  static BytePairs of(BytePairs one, bool second_of_one, BytePairs other, bool second_of_other) {
    const __m256i even = second_of_one ? _mm256_srli_epi32(one.both, 16) : one.both;
    const __m256i odd = second_of_other ? other.both : _mm256_slli_epi32(other.both, 16);
    return {_mm256_blend_epi16(even, odd, 0xaa)};
  }
};

inline void keep(BytePairs& loaded) { keep(loaded.both); }

inline void add_two_products(WholeSums& sum, BytePairs a, BytePairs b) {
  sum.lanes = _mm256_add_epi32(sum.lanes, _mm256_madd_epi16(a.both, b.both));
}

inline void store_whole(Vec a, int16_t* to) {
  const __m256i whole = _mm256_cvtps_epi32(a.lanes);
  const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
}
inline void store_whole(Vec a, int8_t* to) {
  const __m256i whole = _mm256_cvtps_epi32(a.lanes);
  const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(half, half));
}

#else

struct WholeSums {
  int32_t lanes[Vec::width];
  static WholeSums zero() { return {}; }
  Vec floats() const {
    Vec out;
    for (int64_t i = 0; i < Vec::width; ++i) out.lane[i] = static_cast<float>(lanes[i]);
    return out;
  }
};

struct BytePairs {
  int16_t both[2 * Vec::width];

  static BytePairs load(const int8_t* from) {
    BytePairs out;
    for (int64_t i = 0; i < 2 * Vec::width; ++i) out.both[i] = from[i];
    return out;
  }
  static BytePairs same(const int16_t* pair) {
    BytePairs out;
    for (int64_t i = 0; i < 2 * Vec::width; ++i) out.both[i] = pair[i % 2];
    return out;
  }
  static BytePairs of(BytePairs one, bool second_of_one, BytePairs other, bool second_of_other) {
    for (int64_t i = 0; i < 2 * Vec::width; i += 2) {
      one.both[i] = one.both[i + second_of_one];
      one.both[i + 1] = other.both[i + second_of_other];
    }
    return one;
  }
};

inline void keep(BytePairs&) {}

inline void add_two_products(WholeSums& sum, const BytePairs& a, const BytePairs& b) {
  for (int64_t i = 0; i < Vec::width; ++i) sum.lanes[i] += a.both[2 * i] * b.both[2 * i] + a.both[2 * i + 1] * b.both[2 * i + 1];
}

template <typename Whole>
inline void store_whole(Vec a, Whole* to) {
  for (int64_t i = 0; i < Vec::width; ++i) to[i] = static_cast<Whole>(__builtin_rintf(a.lane[i]));
}

#endif

// Scales are of at least this size; where all numbers of a row are below it they count as zeros.
constexpr float kSmallest = 1e-30f;

// Rounds `count` floats, a multiple of a register, to whole numbers from -most to most; returns the scale that gives them back: not
// a number where one of them is not finite, and all are zeros then.
template <typename Whole>
inline float to_whole(const float* from, int64_t count, float most, Whole* to) {
  const Vec zero = Vec::zero();
  Vec largest = zero, spoiled = zero;
  for (int64_t i = 0; i < count; i += Vec::width) {
    const Vec x = Vec::load(from + i);
    largest = max(max(x, zero - x), largest);  // as written it passes what is not a number
    spoiled = multiply_add(x, zero, spoiled);
  }
  const float bound = highest(largest);
  const bool is_finite = spoiled.sum() == 0.f, is_zero = !is_finite || bound < kSmallest;
  const Vec factor = Vec::same(is_zero ? 0.f : most / bound);
  for (int64_t i = 0; i < count; i += Vec::width) {
    store_whole(is_zero ? zero : Vec::load(from + i) * factor, to + i);
  }
  return is_finite ? (is_zero ? 0.f : bound / most) : __builtin_nanf("");
}

SGL_KERNEL_END
