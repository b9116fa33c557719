// Reduction of pieces that several ranks bring, in rank order. Compiled once per instruction set; see vec.h for what differs.
#include "vec.h"

SGL_KERNEL_BEGIN

namespace {

struct half {
  uint16_t bits;
};

inline float from_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float half_to_float(half value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16, size = value.bits & 0x7fffu;
  if (size >= 0x7c00u) return from_bits(sign | (size << 13) | 0x7f800000u);
  if (size >= 0x0400u) return from_bits(sign | ((size << 13) + 0x38000000u));
  return from_bits(sign | to_bits(static_cast<float>(size) * 0x1p-24f));
}

// To the nearest, ties to even. Below the normal numbers the addition of 0.5, whose last bit is worth 2^-24, does the rounding.
inline half to_half(float value) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  uint32_t out;
  if (size > 0x7f800000u) {
    out = 0x7e00u;
  } else if (size >= 0x477ff000u) {
    out = 0x7c00u;
  } else if (size < 0x38800000u) {
    out = to_bits(from_bits(size) + 0.5f) - to_bits(0.5f);
  } else {
    out = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
  }
  return half{static_cast<uint16_t>(sign | out)};
}

// One number in the form it is reduced in, and back.
template <typename T>
inline T read(const T* from) {
  return *from;
}
inline float read(const bf16* from) { return to_float(*from); }
inline float read(const half* from) { return half_to_float(*from); }
template <typename T, typename Wide>
inline void write(T* to, Wide value) {
  *to = static_cast<T>(value);
}
inline void write(bf16* to, float value) { *to = to_bf16(value); }
inline void write(half* to, float value) { *to = to_half(value); }

struct Sum {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(a + b);
  }
};

// A NaN on either side is what comes out, as torch has it.
struct Max {
  template <typename T>
  T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};

struct Min {
  template <typename T>
  T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

template <typename T, typename Op>
void reduce_from(const Reduction& call, int64_t begin, Op op) {
  T* out = static_cast<T*>(call.out);
  const T* first = static_cast<const T*>(call.pieces[0]);
  for (int64_t i = begin; i < call.count; ++i) {
    auto total = read(first + i);
    for (int64_t k = 1; k < call.num_pieces; ++k) total = op(total, read(static_cast<const T*>(call.pieces[k]) + i));
    write(out + i, total);
  }
}

// Sums of float and bf16, which every layer asks for, in registers.
template <typename T>
void sum_vectors(const Reduction& call) {
  T* out = static_cast<T*>(call.out);
  const T* first = static_cast<const T*>(call.pieces[0]);
  const T* second = static_cast<const T*>(call.pieces[call.num_pieces > 1 ? 1 : 0]);
  const int64_t whole = call.num_pieces > 1 ? call.count - call.count % Vec::width : 0;
  for (int64_t i = 0; i < whole; i += Vec::width) {
    Vec total = Vec::load(first + i) + Vec::load(second + i);
    for (int64_t k = 2; k < call.num_pieces; ++k) total = total + Vec::load(static_cast<const T*>(call.pieces[k]) + i);
    total.store(out + i);
  }
  reduce_from<T>(call, whole, Sum{});
}

// Integers are summed without a sign, where going over the end is defined.
template <typename T, typename Unsigned>
void reduce_all(const Reduction& call) {
  switch (call.op) {
    case Reduce::sum: return reduce_from<Unsigned>(call, 0, Sum{});
    case Reduce::max: return reduce_from<T>(call, 0, Max{});
    case Reduce::min: return reduce_from<T>(call, 0, Min{});
  }
}

}  // namespace

void reduce_pieces(const Reduction& call) {
  switch (call.number) {
    case Number::float32:
      return call.op == Reduce::sum ? sum_vectors<float>(call) : reduce_all<float, float>(call);
    case Number::bfloat16:
      return call.op == Reduce::sum ? sum_vectors<bf16>(call) : reduce_all<bf16, bf16>(call);
    case Number::float16: return reduce_all<half, half>(call);
    case Number::float64: return reduce_all<double, double>(call);
    case Number::int64: return reduce_all<int64_t, uint64_t>(call);
    case Number::int32: return reduce_all<int32_t, uint32_t>(call);
    case Number::int16: return reduce_all<int16_t, uint16_t>(call);
    case Number::int8: return reduce_all<int8_t, uint8_t>(call);
    case Number::uint8: return reduce_all<uint8_t, uint8_t>(call);
    case Number::boolean:  // the sum of truths is their "or"
      return call.op == Reduce::min ? reduce_from<uint8_t>(call, 0, Min{}) : reduce_from<uint8_t>(call, 0, Max{});
    case Number::bytes: return;  // refused before it comes here
  }
}

SGL_KERNEL_END
