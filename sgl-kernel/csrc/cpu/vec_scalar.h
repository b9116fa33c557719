// `Vec` for any processor: four floats in an array, which the compiler turns into what the base instruction set has.
#pragma once

SGL_KERNEL_BEGIN

struct Vec {
  static constexpr int64_t width = 4;
  float lane[width];

  static Vec zero() { return Vec{{0.f, 0.f, 0.f, 0.f}}; }
  static Vec same(float x) { return Vec{{x, x, x, x}}; }

  template <typename T>
  static Vec load(const T* from) {
    Vec out;
    for (int64_t i = 0; i < width; ++i) out.lane[i] = load_one(from + i);
    return out;
  }

  template <typename T>
  void store(T* to) const {
    for (int64_t i = 0; i < width; ++i) store_one(to + i, lane[i]);
  }

  float sum() const { return (lane[0] + lane[1]) + (lane[2] + lane[3]); }
};

inline Vec max(Vec a, Vec b) {
  for (int64_t i = 0; i < Vec::width; ++i) a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}

inline Vec min(Vec a, Vec b) {
  for (int64_t i = 0; i < Vec::width; ++i) a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}

inline Vec operator/(Vec a, Vec b) {
  for (int64_t i = 0; i < Vec::width; ++i) a.lane[i] /= b.lane[i];
  return a;
}

inline float highest(Vec a) {
  float most = a.lane[0];
  for (int64_t i = 1; i < Vec::width; ++i) most = a.lane[i] > most ? a.lane[i] : most;
  return most;
}

inline Vec whole(Vec a) {
  for (int64_t i = 0; i < Vec::width; ++i) a.lane[i] = __builtin_rintf(a.lane[i]);
  return a;
}

inline Vec times_power_of_two(Vec a, Vec power) {
  for (int64_t i = 0; i < Vec::width; ++i) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(power.lane[i]) + 127) << 23;
    float factor;
    __builtin_memcpy(&factor, &bits, sizeof(factor));
    a.lane[i] *= factor;
  }
  return a;
}

// Zero where x is below the bound, else the value.
inline Vec zero_below(Vec x, Vec bound, Vec value) {
  for (int64_t i = 0; i < Vec::width; ++i) {
    if (x.lane[i] < bound.lane[i]) value.lane[i] = 0.f;
  }
  return value;
}

// A bit for each lane in which x is not below the bound.
inline uint32_t at_least(Vec x, Vec bound) {
  uint32_t found = 0;
  for (int64_t i = 0; i < Vec::width; ++i) found |= static_cast<uint32_t>(!(x.lane[i] < bound.lane[i])) << i;
  return found;
}

inline Vec operator-(Vec a, Vec b) {
  for (int64_t i = 0; i < Vec::width; ++i) a.lane[i] -= b.lane[i];
  return a;
}

inline Vec operator+(Vec a, Vec b) {
  for (int64_t i = 0; i < Vec::width; ++i) a.lane[i] += b.lane[i];
  return a;
}

inline Vec operator*(Vec a, Vec b) {
  for (int64_t i = 0; i < Vec::width; ++i) a.lane[i] *= b.lane[i];
  return a;
}

inline Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }

struct Pairs {
  bf16 half[2 * Vec::width];

  static Pairs load(const bf16* from) {
    Pairs out;
    __builtin_memcpy(out.half, from, sizeof(out.half));
    return out;
  }
  Vec even() const { return every_other(0); }
  Vec odd() const { return every_other(1); }

 private:
  Vec every_other(int64_t first) const {
    Vec out;
    for (int64_t i = 0; i < Vec::width; ++i) out.lane[i] = to_float(half[2 * i + first]);
    return out;
  }
};

SGL_KERNEL_END
