// What attention makes of the scores of one query: weights, and sums of weighted values, which chunks of keys give piece by piece. Read
// by attention.cpp. It must not know requests, masks and slots.
#pragma once

#include "kv_bytes.h"
#include "vec_math.h"

SGL_KERNEL_BEGIN

constexpr float kNothing = -__builtin_inff();
// Keys whose values are added to the sums of a chunk at once; weights of whole numbers have one factor for so many.
constexpr int64_t kGroupKeys = 64;

// The highest score and the total of the weights lie behind the weighted values that a chunk gives.
inline float& highest_of(float* piece, int64_t padded_dim) { return piece[padded_dim]; }
inline float& total_of(float* piece, int64_t padded_dim) { return piece[padded_dim + 1]; }

// Turns the scores of one query into weights against the highest and returns their sum; behind the last one zeros follow, up to
// a whole register, for which there is room. Where it sees no key, the sum is zero.
template <typename Weight>
inline float weigh(float* scores, int64_t count, float& most) {
  int64_t padded = count;
  for (; padded % Vec::width != 0; ++padded) scores[padded] = kNothing;
  Vec top_of = Vec::same(kNothing);
  for (int64_t k = 0; k < padded; k += Vec::width) top_of = max(Vec::load(scores + k), top_of);
  most = highest(top_of);
  const Vec top = Vec::same(most == kNothing ? 0.f : most);
  Weight* weights = reinterpret_cast<Weight*>(scores);
  Vec total = Vec::zero();
  for (int64_t k = 0; k < padded; k += Vec::width) {
    exp_of_negative(Vec::load(scores + k) - top).store(weights + k);
    total = total + Vec::load(weights + k);  // as they were rounded
  }
  return total.sum();
}

// Of 64 weights times the scales of their values whole numbers of 16 bits, in their place, and behind these the factor that gives
// them back. A weight of zero counts whatever its scale is.
inline void to_whole_weights(float* weights, const float* scales) {
  constexpr float kLeast = 1.2e-38f;  // weights are not below, or zero
  const Vec least = Vec::same(kLeast);
  for (int64_t k = 0; k < kGroupKeys; k += Vec::width) {
    const Vec weight = Vec::load(weights + k);
    zero_below(weight, least, weight * Vec::load(scales + k)).store(weights + k);
  }
  alignas(64) int16_t whole[kGroupKeys];
  const float factor = to_whole(weights, kGroupKeys, 32767.f, whole);
  __builtin_memcpy(weights, whole, sizeof(whole));
  weights[kGroupKeys / 2] = factor;
}

// Adds what a later chunk gave, all of it against the higher of both highest scores. Not inlined, so that it rounds alike wherever
// chunks are joined.
[[gnu::noinline]] inline void join(float* into, const float* piece, int64_t padded_dim) {
  const float before = into[padded_dim], next = piece[padded_dim], total = piece[padded_dim + 1];
  if (next == kNothing && total == 0.f) return;  // it saw none of its keys
  const bool is_lower = next <= before;
  const Vec factor = exp_of_negative(Vec::same(is_lower ? next - before : before - next));
  for (int64_t d = 0; d < piece_size(padded_dim); d += Vec::width) {  // with the total; the highest, too, is overwritten
    const Vec sum = Vec::load(into + d), added = Vec::load(piece + d);
    (is_lower ? multiply_add(added, factor, sum) : multiply_add(sum, factor, added)).store(into + d);
  }
  highest_of(into, padded_dim) = is_lower ? before : next;
}

template <typename T>
inline void store_query(float* piece, T* out, int64_t dim, int64_t padded_dim) {
  const float total = total_of(piece, padded_dim), factor = total == 0.f ? 0.f : 1.f / total;
  const int64_t even = dim - dim % Vec::width;
  for (int64_t d = 0; d < even; d += Vec::width) (Vec::load(piece + d) * Vec::same(factor)).store(out + d);
  for (int64_t d = even; d < dim; ++d) store_one(out + d, piece[d] * factor);
}

inline void clear(float* piece, int64_t padded_dim) {
  for (int64_t d = 0; d < piece_size(padded_dim); ++d) piece[d] = 0.f;
  highest_of(piece, padded_dim) = kNothing;
}

// Sums of values begin with what the chunk has so far, and end there; those of whole numbers are added to it.
inline void begin_sum(Vec& sum, const float* so_far) { sum = Vec::load(so_far); }
inline void begin_sum(WholeSums& sum, const float*) { sum = WholeSums::zero(); }
inline void end_sum(Vec sum, float, float* so_far) { sum.store(so_far); }
inline void end_sum(const WholeSums& sum, float factor, float* so_far) {
  multiply_add(sum.floats(), Vec::same(factor), Vec::load(so_far)).store(so_far);
}

SGL_KERNEL_END
