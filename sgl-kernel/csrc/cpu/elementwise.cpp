// The small operations between the products of a layer: rotation of heads, and the gate of the feed-forward.
#include "vec_math.h"

SGL_KERNEL_BEGIN

namespace {

template <typename T>
void rotary_cos_sin_rows(const RotaryAngles<T>& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float position = static_cast<float>(call.positions[row]);
    T* cos = call.cos + row * 2 * call.half;
    T* sin = call.sin + row * 2 * call.half;
    for (int64_t i = 0; i < call.half; ++i) {
      const double angle = position * call.frequencies[i];  // the angle is a float, its cosine is rounded once
      const float c = static_cast<float>(__builtin_cos(angle)), s = static_cast<float>(__builtin_sin(angle));
      store_one(cos + i, c);
      store_one(cos + call.half + i, c);
      store_one(sin + i, -s);
      store_one(sin + call.half + i, s);
    }
  }
}

// (x1 cos - x2 sin, x2 cos + x1 sin), where `sin` brings its sign.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t half) {
  const int64_t even = half - half % Vec::width;
  for (int64_t i = 0; i < even; i += Vec::width) {
    const Vec low = Vec::load(x + i), high = Vec::load(x + half + i);
    multiply_add(low, Vec::load(cos + i), high * Vec::load(sin + i)).store(out + i);
    multiply_add(high, Vec::load(cos + half + i), low * Vec::load(sin + half + i)).store(out + half + i);
  }
  for (int64_t i = even; i < half; ++i) {
    const float low = load_one(x + i), high = load_one(x + half + i);
    store_one(out + i, low * load_one(cos + i) + high * load_one(sin + i));
    store_one(out + half + i, high * load_one(cos + half + i) + low * load_one(sin + half + i));
  }
}

template <typename T>
void rotate_head_rows(const RotateHeads<T>& call, int64_t begin, int64_t end) {
  const int64_t dim = 2 * call.half;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t head = 0; head < call.heads; ++head) {
      T* x = call.x + row * call.stride + head * dim;
      rotate(x, call.cos + row * dim, call.sin + row * dim, x, call.half);
    }
  }
}

template <typename T>
void silu_and_mul_rows(const SiluAndMul<T>& call, int64_t begin, int64_t end) {
  const int64_t even = call.size - call.size % Vec::width;
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = call.x + row * call.stride;
    const T* up = gate + call.size;
    T* out = call.out + row * call.size;
    for (int64_t i = 0; i < even; i += Vec::width) {
      (silu(Vec::load(gate + i)) * Vec::load(up + i)).store(out + i);
    }
    if (even == call.size) continue;
    float rest[2][Vec::width] = {};
    for (int64_t i = even; i < call.size; ++i) {
      rest[0][i - even] = load_one(gate + i);
      rest[1][i - even] = load_one(up + i);
    }
    (silu(Vec::load(rest[0])) * Vec::load(rest[1])).store(rest[0]);
    for (int64_t i = even; i < call.size; ++i) store_one(out + i, rest[0][i - even]);
  }
}

}  // namespace

void rotary_cos_sin(const RotaryAngles<float>& call, int64_t begin, int64_t end) { rotary_cos_sin_rows(call, begin, end); }
void rotary_cos_sin(const RotaryAngles<bf16>& call, int64_t begin, int64_t end) { rotary_cos_sin_rows(call, begin, end); }
void rotate_heads(const RotateHeads<float>& call, int64_t begin, int64_t end) { rotate_head_rows(call, begin, end); }
void rotate_heads(const RotateHeads<bf16>& call, int64_t begin, int64_t end) { rotate_head_rows(call, begin, end); }
void silu_and_mul(const SiluAndMul<float>& call, int64_t begin, int64_t end) { silu_and_mul_rows(call, begin, end); }
void silu_and_mul(const SiluAndMul<bf16>& call, int64_t begin, int64_t end) { silu_and_mul_rows(call, begin, end); }

SGL_KERNEL_END
