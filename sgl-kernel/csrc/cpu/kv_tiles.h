// Blocks of keys and pairs of values as registers take them, for every number type and instruction set. Read by attention.cpp;
// how a block lies in memory is KvBlock's word (ops.h). It must not know requests and masks.
#pragma once

#include "kv_bytes.h"
#include "vec.h"

SGL_KERNEL_BEGIN

// What queries are multiplied with keys of a cache as, what their products are summed in, and what a block has of one key in a row.
template <typename Cache>
struct Scores {
  using Query = Cache;
  using Sum = Vec;
  using Lane = uint32_t;
};

template <>
struct Scores<int8_t> {
  using Query = int16_t;
  using Sum = WholeSums;
  using Lane = uint16_t;
};

// Adds the products of `Count` queries, kMostHeadDim apart, with `Strips` registers of keys, dimension by dimension.
template <int64_t Count, int64_t Strips>
inline void add_products(const float* const* strips, const float* q, int64_t dim, Vec (&sums)[Count][Strips]) {
  for (int64_t d = 0; d < dim; ++d) {
    Vec keys[Strips];
    for (int64_t t = 0; t < Strips; ++t) keys[t] = Vec::load(strips[t] + d * kBlockSlots);
    for (int64_t i = 0; i < Count; ++i) {
      const Vec value = Vec::same(q[i * kMostHeadDim + d]);
      for (int64_t t = 0; t < Strips; ++t) sums[i][t] = multiply_add(value, keys[t], sums[i][t]);
    }
  }
}

#if defined(SGL_ISA_avx512_vnni_bf16)

template <int64_t Count, int64_t Strips>
inline void add_products(const bf16* const* strips, const bf16* q, int64_t dim, Vec (&sums)[Count][Strips]) {
  for (int64_t pair = 0; 2 * pair < dim; ++pair) {
    __m512i keys[Strips];
#pragma GCC unroll 8
    for (int64_t t = 0; t < Strips; ++t) {
      keys[t] = _mm512_loadu_si512(strips[t] + pair * 2 * kBlockSlots);
      keep(keys[t]);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
      int32_t both;
      __builtin_memcpy(&both, q + i * kMostHeadDim + 2 * pair, sizeof(both));
      const __m512i value = _mm512_set1_epi32(both);
#pragma GCC unroll 8
      for (int64_t t = 0; t < Strips; ++t) add_two_products(sums[i][t].lanes, value, keys[t]);
    }
  }
}

#else

template <int64_t Count, int64_t Strips>
inline void add_products(const bf16* const* strips, const bf16* q, int64_t dim, Vec (&sums)[Count][Strips]) {
  for (int64_t pair = 0; 2 * pair < dim; ++pair) {
    for (int64_t t = 0; t < Strips; ++t) {
      const Pairs keys = Pairs::load(strips[t] + pair * 2 * kBlockSlots);
      const Vec even = keys.even(), odd = keys.odd();
      for (int64_t i = 0; i < Count; ++i) {
        const bf16* value = q + i * kMostHeadDim + 2 * pair;
        sums[i][t] = multiply_add(Vec::same(to_float(value[0])), even, sums[i][t]);
        sums[i][t] = multiply_add(Vec::same(to_float(value[1])), odd, sums[i][t]);
      }
    }
  }
}

#endif

template <int64_t Count, int64_t Strips>
inline void add_products(const int8_t* const* strips, const int16_t* q, int64_t dim, WholeSums (&sums)[Count][Strips]) {
  for (int64_t pair = 0; 2 * pair < dim; ++pair) {
    BytePairs keys[Strips];
#pragma GCC unroll 8
    for (int64_t t = 0; t < Strips; ++t) {
      keys[t] = BytePairs::load(strips[t] + pair * 2 * kBlockSlots);
      keep(keys[t]);
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
      const BytePairs value = BytePairs::same(q + i * kMostHeadDim + 2 * pair);
#pragma GCC unroll 8
      for (int64_t t = 0; t < Strips; ++t) add_two_products(sums[i][t], value, keys[t]);
    }
  }
}

// Some dimensions of two values, and their weighted sum.
template <typename T>
struct Values {
  using Weight = float;
  using Sum = Vec;
  struct Both {
    Vec one, other;
  };
  Vec one, other;

  // Of an even slot and the one behind it.
  static Values neighbours(const float* value, int64_t padded_dim) { return {Vec::load(value), Vec::load(value + padded_dim)}; }
  static Values neighbours(const bf16* value, int64_t) {
    const Pairs both = Pairs::load(value);
    return {both.even(), both.odd()};
  }

  // Of any two slots, from where each begins.
  static Values apart(const float* one, int64_t, const float* other, int64_t) { return {Vec::load(one), Vec::load(other)}; }
  static Values apart(const bf16* one, int64_t slot, const bf16* other, int64_t next) { return {of(one, slot), of(other, next)}; }

  static Both weight(const float* weights) { return {Vec::same(weights[0]), Vec::same(weights[1])}; }
  Vec add(Both weight, Vec sum) const { return multiply_add(weight.other, other, multiply_add(weight.one, one, sum)); }

 private:
  static Vec of(const bf16* value, int64_t slot) {
    const Pairs both = Pairs::load(value - slot % 2);
    return slot % 2 == 0 ? both.even() : both.odd();
  }
};

#if defined(SGL_ISA_avx512_vnni_bf16)

template <>
struct Values<bf16> {
  using Weight = bf16;
  using Sum = Vec;
  __m512i both;

  static Values neighbours(const bf16* value, int64_t) { return {_mm512_loadu_si512(value)}; }
  static Values apart(const bf16* one, int64_t slot, const bf16* other, int64_t next) {
    const __m512i low = _mm512_loadu_si512(one - slot % 2), high = _mm512_loadu_si512(other - next % 2);
    const __m512i even = slot % 2 == 0 ? low : _mm512_srli_epi32(low, 16);
    const __m512i odd = next % 2 == 0 ? _mm512_slli_epi32(high, 16) : high;
    return {_mm512_mask_blend_epi16(0xaaaaaaaa, even, odd)};
  }

  static __m512i weight(const bf16* weights) {
    int32_t pair;
    __builtin_memcpy(&pair, weights, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  Vec add(__m512i weight, Vec sum) const {
    add_two_products(sum.lanes, weight, both);
    return sum;
  }
};

#endif

template <>
struct Values<int8_t> {
  using Weight = int16_t;
  using Sum = WholeSums;
  BytePairs both;

  static Values neighbours(const int8_t* value, int64_t) { return {BytePairs::load(value)}; }
  static Values apart(const int8_t* one, int64_t slot, const int8_t* other, int64_t next) {
    const BytePairs low = BytePairs::load(one - slot % 2), high = BytePairs::load(other - next % 2);
    return {BytePairs::of(low, slot % 2 != 0, high, next % 2 != 0)};
  }

  static BytePairs weight(const int16_t* weights) { return BytePairs::same(weights); }
  WholeSums add(const BytePairs& weight, WholeSums sum) const {
    add_two_products(sum, weight, both);
    return sum;
  }
};

// Fills `to` [rows, 16] with the keys of `count` slots, of which blocks[i] [rows, 16] is the block; a lane has 32 bits, or 16. What
// lies behind the last one may be anything.
#if defined(SGL_ISA_avx512) || defined(SGL_ISA_avx512_vnni_bf16)

// Of a row of two blocks the lanes `places`, the second block's counted on; those of the mask are written.
inline void pick_lanes(const uint32_t* one, const uint32_t* other, __m512i places, __mmask16 mask, uint32_t* to) {
  const __m512i first = _mm512_loadu_si512(one), second = _mm512_loadu_si512(other);
  _mm512_mask_storeu_epi32(to, mask, _mm512_permutex2var_epi32(first, places, second));
}
inline void pick_lanes(const uint16_t* one, const uint16_t* other, __m512i places, __mmask16 mask, uint16_t* to) {
  const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(one));
  const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(other));
  _mm256_mask_storeu_epi16(to, mask, _mm256_permutex2var_epi16(first, _mm512_cvtepi32_epi16(places), second));
}

template <typename Lane>
inline void put_in_order(const Lane* const (&blocks)[kBlockSlots], const int64_t* slots, int64_t count, int64_t rows, Lane* to) {
  alignas(64) int32_t lanes[kBlockSlots] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = static_cast<int32_t>(slots[i] % kBlockSlots);
  const __m512i from = _mm512_load_si512(lanes);
  for (uint32_t left = (1u << count) - 1; left != 0;) {  // two blocks at a time: a run of slots touches no more
    const Lane* one = blocks[__builtin_ctz(left)];
    uint32_t of_one = 0, of_other = 0;
    for (int64_t i = 0; i < count; ++i) of_one |= static_cast<uint32_t>(blocks[i] == one) << i;
    const uint32_t rest = left & ~of_one;
    const Lane* other = rest != 0 ? blocks[__builtin_ctz(rest)] : one;
    for (int64_t i = 0; i < count; ++i) of_other |= static_cast<uint32_t>(rest != 0 && blocks[i] == other) << i;
    const __m512i places = _mm512_mask_add_epi32(from, static_cast<__mmask16>(of_other), from, _mm512_set1_epi32(kBlockSlots));
    const __mmask16 both = static_cast<__mmask16>(of_one | of_other);
    for (int64_t row = 0; row < rows; ++row) {
      pick_lanes(one + row * kBlockSlots, other + row * kBlockSlots, places, both, to + row * kBlockSlots);
    }
    left = rest & ~of_other;
  }
}

#else

template <typename Lane>
inline void put_in_order(const Lane* const (&blocks)[kBlockSlots], const int64_t* slots, int64_t count, int64_t rows, Lane* to) {
  for (int64_t i = 0; i < count; ++i) {
    const Lane* from = blocks[i] + slots[i] % kBlockSlots;
    for (int64_t row = 0; row < rows; ++row) __builtin_memcpy(to + row * kBlockSlots + i, from + row * kBlockSlots, sizeof(Lane));
  }
}

#endif

SGL_KERNEL_END
