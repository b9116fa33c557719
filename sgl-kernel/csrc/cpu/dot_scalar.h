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

struct Nibbles {
  static constexpr int64_t bytes = 256;
  const uint8_t* w;  // of the first of the four outputs

  static Nibbles load(const uint8_t* record, int64_t piece) { return Nibbles{record + 4 * Vec::width * piece}; }

  Vec dot(const int8_t* x, int32_t offset) const {
    Vec out;
    for (int64_t i = 0; i < Vec::width; ++i) {
      int32_t sum = -offset;
      for (int64_t j = 0; j < 4; ++j) {
        for (int64_t k = 0; k < 4; ++k) {
          const int32_t both = w[64 * j + 4 * i + k];
          sum += (both & 15) * x[4 * j + k] + (both >> 4) * x[16 + 4 * j + k];
        }
      }
      out.lane[i] = static_cast<float>(sum);
    }
    return out;
  }
};

struct Octets {
  static constexpr int64_t bytes = 512;
  const uint8_t* w;

  static Octets load(const uint8_t* record, int64_t piece) { return Octets{record + 4 * Vec::width * piece}; }

  Vec dot(const int8_t* x, int32_t offset) const {
    Vec out;
    for (int64_t i = 0; i < Vec::width; ++i) {
      int32_t sum = -offset;
      for (int64_t j = 0; j < 8; ++j) {
        for (int64_t k = 0; k < 4; ++k) sum += w[64 * j + 4 * i + k] * x[4 * j + k];
      }
      out.lane[i] = static_cast<float>(sum);
    }
    return out;
  }
};

SGL_KERNEL_END
