// Whole-number products of a quantized block for any processor, four outputs at once.
#pragma once

SGL_KERNEL_BEGIN

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  uint32_t bits = magnitude << 13;
  if (magnitude >= 0x7c00u) {
    bits += 224u << 23;  // infinite or NaN: the exponent goes from 31 to 255
  } else if (magnitude >= 0x0400u) {
    bits += 112u << 23;
  } else {
    // Below the normal numbers: so many times 2^-24.
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    __builtin_memcpy(&bits, &value, sizeof(bits));
  }
  bits |= sign;
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline Vec load_half(const uint16_t* from) {
  Vec out;
  for (int64_t i = 0; i < Vec::width; ++i) out.lane[i] = half_to_float(from[i]);
  return out;
}

// The bits of the largest size: sizes are ordered as their bits are, and NaN lies above them all.
inline uint32_t largest_size(const XVecs& x) {
  int32_t most = 0;
  for (const Vec& part : x.part) {
    int32_t bits[Vec::width];
    __builtin_memcpy(bits, part.lane, sizeof(bits));
    for (int64_t i = 0; i < Vec::width; ++i) most = (bits[i] & 0x7fffffff) > most ? bits[i] & 0x7fffffff : most;
  }
  return most;
}

// Writes x * inverse as whole numbers, rounded to nearest, ties to even; returns their sum.
inline int32_t round_block(const XVecs& x, float inverse, int8_t* to) {
  // Behind 1.5 * 2^23 a float has no room for a fraction. The product is rounded before: there is no fused one here.
  constexpr float whole = 12582912.f;
  int32_t total = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const float shifted = x.part[i / Vec::width].lane[i % Vec::width] * inverse + whole;
    int32_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof(bits));
    to[i] = static_cast<int8_t>(bits - 0x4b400000);
    total += bits - 0x4b400000;
  }
  return total;
}

// The products with the inputs of the fours from `first` to `last`, of which each output has four bytes in each row of w.
inline Vec products(const uint8_t* w, int64_t stride, int64_t first, int64_t last, const int8_t* x, int32_t start) {
  Vec out;
  for (int64_t i = 0; i < Vec::width; ++i) {
    int32_t sum = start;
    for (int64_t j = first; j < last; ++j) {
      for (int64_t k = 0; k < 4; ++k) sum += w[stride * j + 4 * i + k] * x[4 * j + k];
    }
    out.lane[i] = static_cast<float>(sum);
  }
  return out;
}

// The numbers of a block as they are stored, at most 6 bits; those of four outputs.
template <int64_t Bits>
struct Numbers {
  static constexpr int64_t high = Bits - 4, row = 4 * Vec::width;
  uint8_t w[8][row];

  [[gnu::always_inline]] static Numbers load(const uint8_t* record, int64_t piece) {
    Numbers out;
    for (int64_t j = 0; j < 4; ++j) {
      const uint8_t* both = record + 64 * j + row * piece;
      for (int64_t i = 0; i < row; ++i) {
        out.w[j][i] = both[i] & 15;
        out.w[4 + j][i] = both[i] >> 4;
      }
    }
    if constexpr (high > 0) {
      for (int64_t j = 0; j < 8; ++j) {
        const uint8_t* plane = record + 256 + j * high / 8 * 64 + row * piece;
        for (int64_t i = 0; i < row; ++i) out.w[j][i] |= (plane[i] >> (j * high % 8) & ((1 << high) - 1)) << 4;
      }
    }
    return out;
  }

  [[gnu::always_inline]] Vec dot(const int8_t* x, int32_t start) const { return products(w[0], row, 0, 8, x, start); }
  [[gnu::always_inline]] Vec first_half(const int8_t* x, int32_t start) const { return products(w[0], row, 0, 4, x, start); }
  [[gnu::always_inline]] Vec second_half(const int8_t* x, int32_t start) const { return products(w[0], row, 4, 8, x, start); }
};

// 8-bit numbers of a block, stored 128 above their value.
template <>
struct Numbers<8> {
  const uint8_t* w;  // of the first of the four outputs

  [[gnu::always_inline]] static Numbers load(const uint8_t* record, int64_t piece) { return Numbers{record + 4 * Vec::width * piece}; }

  [[gnu::always_inline]] Vec dot(const int8_t* x, int32_t start) const { return products(w, 64, 0, 8, x, start); }
};

SGL_KERNEL_END
