// The kernels as the dispatcher sees them: one declaration, once per instruction set. Raw pointers and sizes only.
//
// A linear kernel computes one of `parts` equal shares of the outputs, so that whoever runs it chooses the threads.
#pragma once

#include <stdint.h>

namespace sgl {

struct bf16 {
  uint16_t bits;
};

// Outputs of a packed panel of floats, and of a packed group of quantized blocks.
constexpr int64_t kPanel = 32;
constexpr int64_t kGroup = 16;
// Inputs of a quantized block.
constexpr int64_t kBlock = 32;
// Rows that a linear kernel takes at once: what it makes of them first stays in the second cache.
constexpr int64_t kRowsAtOnce = 192;

// out[r, n] = sum over k of x[r, k] * weight[n, k], plus bias[n] where there is one.
template <typename T>
struct Linear {
  const T* x;           // [rows, in], rows `x_stride` apart
  const void* weight;   // packed, see sgl_kernel/linear.py
  const T* bias;        // [out], or null
  T* out;               // [rows, outputs], rows `out_stride` apart
  int64_t rows, in, outputs, x_stride, out_stride;
};

// How the numbers of a quantized block are stored; each form with one scale a block, the second with a minimum too.
enum class Blocks : int64_t { q4, q4_min, q8, q8_min };

// Most query vectors that one pass over the keys serves, and the longest of them.
constexpr int64_t kMostQueries = 16;
constexpr int64_t kMostHeadDim = 256;

// Attention of some rows of each request over its slots of the cache. Row r of request b is at `first_rows[b] + r`; it sees the
// keys up to its own, which is `lengths[b] - rows of b + r`, or what `tail_mask` says of the last `tail` ones.
template <typename T>
struct PagedAttention {
  const T* q;                  // [rows, heads, dim], rows `q_stride` apart
  const T* kv;                 // [2 * kv heads, slots, dim]: all key heads, then all value heads
  const int64_t* table;        // [table rows, table_stride]: the slots of a request in order
  const int64_t* table_rows;   // [requests]
  const int64_t* first_rows;   // [requests + 1]
  const int64_t* lengths;      // [requests]
  const bool* tail_mask;       // [requests, width, tail], or null; then every request has `width` rows
  T* out;                      // [rows, heads * dim]
  int64_t requests, heads, kv_heads, dim, slots, table_stride, q_stride, width, tail;
  float scale;
};

// Floats from the scores of one query to those of the next, with room for a register behind the last key; and the bytes of scratch
// that one share of attention needs.
constexpr int64_t score_stride(int64_t keys) { return (keys + 16 + 15) / 16 * 16; }
constexpr int64_t attention_scratch_bytes(int64_t most_keys) { return kMostQueries * score_stride(most_keys) * 4; }

// Bytes of scratch that one share of a linear kernel needs.
constexpr int64_t linear_scratch_bytes(int64_t rows, int64_t in) {
  const int64_t at_once = rows < kRowsAtOnce ? rows : kRowsAtOnce;
  return at_once * (in + kBlock) * 4 + 64;
}

#define SGL_DECLARE_KERNELS(isa)                                                                                    \
  namespace isa {                                                                                                   \
  void fused_add_rmsnorm(float* input, float* residual, const float* weight, int64_t rows, int64_t hidden, float eps); \
  void fused_add_rmsnorm(bf16* input, bf16* residual, const bf16* weight, int64_t rows, int64_t hidden, float eps);   \
  void rmsnorm(const float* input, const float* weight, float* out, int64_t rows, int64_t hidden, float eps);          \
  void rmsnorm(const bf16* input, const bf16* weight, bf16* out, int64_t rows, int64_t hidden, float eps);             \
  void paged_attention(const PagedAttention<float>& call, void* scratch, int64_t part, int64_t parts);                \
  void paged_attention(const PagedAttention<bf16>& call, void* scratch, int64_t part, int64_t parts);                 \
  void linear_float(const Linear<float>& call, void* scratch, int64_t part, int64_t parts);                           \
  void linear_bf16(const Linear<bf16>& call, void* scratch, int64_t part, int64_t parts);                             \
  void linear_blocks(const Linear<float>& call, Blocks form, void* scratch, int64_t part, int64_t parts);             \
  void linear_blocks(const Linear<bf16>& call, Blocks form, void* scratch, int64_t part, int64_t parts);              \
  }

SGL_DECLARE_KERNELS(base)
SGL_DECLARE_KERNELS(avx2)
SGL_DECLARE_KERNELS(avx512)
SGL_DECLARE_KERNELS(avx512_vnni_bf16)

}  // namespace sgl
