// Normalisation kernels. Compiled once per instruction set; see vec.h for what differs.
#include "vec.h"

SGL_KERNEL_BEGIN

namespace {

inline float scale_of(float squares, int64_t hidden, float eps) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(hidden) + eps);
}

template <typename T>
void scale_row(const T* from, const T* weight, T* to, int64_t hidden, float scale) {
  const int64_t whole = hidden - hidden % Vec::width;
  const Vec scales = Vec::same(scale);
  for (int64_t i = 0; i < whole; i += Vec::width) {
    (Vec::load(from + i) * scales * Vec::load(weight + i)).store(to + i);
  }
  for (int64_t i = whole; i < hidden; ++i) store_one(to + i, load_one(from + i) * scale * load_one(weight + i));
}

// residual += input, rounded to its storage form; input = residual / rms(residual) * weight. The norm is taken of the rounded
// residual, because that is what the next layer reads back.
template <typename T>
void fused_add_rmsnorm_row(T* input, T* residual, const T* weight, int64_t hidden, float eps) {
  const int64_t whole = hidden - hidden % Vec::width;
  Vec squares = Vec::zero();
  for (int64_t i = 0; i < whole; i += Vec::width) {
    (Vec::load(input + i) + Vec::load(residual + i)).store(residual + i);
    const Vec stored = Vec::load(residual + i);
    squares = multiply_add(stored, stored, squares);
  }
  float total = squares.sum();
  for (int64_t i = whole; i < hidden; ++i) {
    store_one(residual + i, load_one(input + i) + load_one(residual + i));
    const float stored = load_one(residual + i);
    total += stored * stored;
  }

  scale_row(residual, weight, input, hidden, scale_of(total, hidden, eps));
}

// out = input / rms(input) * weight.
template <typename T>
void rmsnorm_row(const T* input, const T* weight, T* out, int64_t hidden, float eps) {
  const int64_t whole = hidden - hidden % Vec::width;
  Vec squares = Vec::zero();
  for (int64_t i = 0; i < whole; i += Vec::width) {
    const Vec value = Vec::load(input + i);
    squares = multiply_add(value, value, squares);
  }
  float total = squares.sum();
  for (int64_t i = whole; i < hidden; ++i) total += load_one(input + i) * load_one(input + i);
  scale_row(input, weight, out, hidden, scale_of(total, hidden, eps));
}

template <typename T>
void fused_add_rmsnorm_rows(T* input, T* residual, const T* weight, int64_t rows, int64_t hidden, float eps) {
  for (int64_t row = 0; row < rows; ++row) {
    fused_add_rmsnorm_row(input + row * hidden, residual + row * hidden, weight, hidden, eps);
  }
}

}  // namespace

void fused_add_rmsnorm(float* input, float* residual, const float* weight, int64_t rows, int64_t hidden, float eps) {
  fused_add_rmsnorm_rows(input, residual, weight, rows, hidden, eps);
}

void fused_add_rmsnorm(bf16* input, bf16* residual, const bf16* weight, int64_t rows, int64_t hidden, float eps) {
  fused_add_rmsnorm_rows(input, residual, weight, rows, hidden, eps);
}

void rmsnorm(const float* input, const float* weight, float* out, int64_t rows, int64_t hidden, float eps) {
  for (int64_t row = 0; row < rows; ++row) rmsnorm_row(input + row * hidden, weight, out + row * hidden, hidden, eps);
}

void rmsnorm(const bf16* input, const bf16* weight, bf16* out, int64_t rows, int64_t hidden, float eps) {
  for (int64_t row = 0; row < rows; ++row) rmsnorm_row(input + row * hidden, weight, out + row * hidden, hidden, eps);
}

SGL_KERNEL_END
