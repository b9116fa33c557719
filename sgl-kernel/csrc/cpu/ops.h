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
// Most inputs whose products of -128 with 127 a sum of 32 bits holds.
constexpr int64_t kMostInt8Inputs = 131072;
// Rows that a linear kernel takes at once: what it makes of them first stays in the second cache.
constexpr int64_t kRowsAtOnce = 192;

// out[r, n] = sum over k of x[r, k] * weight[n, k], plus bias[n] where there is one.
template <typename T, typename Out = T>
struct Linear {
  const T* x;           // [rows, in], rows `x_stride` apart
  const void* weight;   // packed, see sgl_kernel/linear.py
  const T* bias;        // [out], or null
  Out* out;             // [rows, outputs], rows `out_stride` apart
  int64_t rows, in, outputs, x_stride, out_stride;
};

// How a quantized block is stored: bits of a number, with a minimum for each output in two of the forms, and in `q6` with two scales.
enum class Blocks : int64_t { q4, q4_min, q5, q5_min, q6, q8 };
constexpr int64_t kBlockForms = 6;

// Where the parts of a packed record lie: numbers, a half float scale for each output (where there are two, those of the first
// half of the inputs first), then the minima.
//
// Of 8 bits, numbers lie in fours of inputs, those of all outputs side by side. Of fewer bits the low four of input i lie in the low
// half of a byte, those of input i + 16 in the high half; the bits above follow in planes: byte p of a plane has some bits of number
// p of each of several fours, those of the first four lowest.
struct BlockLayout {
  int64_t bits;    // of a number
  int64_t offset;  // how far above its value a number is stored
  int64_t scales;  // of an output
  bool has_minimum;

  explicit constexpr BlockLayout(Blocks form) : bits(8), offset(128), scales(1), has_minimum(false) {
    switch (form) {
      case Blocks::q4: bits = 4, offset = 8; break;
      case Blocks::q4_min: bits = 4, offset = 0, has_minimum = true; break;
      case Blocks::q5: bits = 5, offset = 16; break;
      case Blocks::q5_min: bits = 5, offset = 0, has_minimum = true; break;
      case Blocks::q6: bits = 6, offset = 32, scales = 2; break;
      case Blocks::q8: break;
    }
  }

  constexpr int64_t number_bytes() const { return kGroup * kBlock * bits / 8; }
  constexpr int64_t record_bytes() const { return number_bytes() + kGroup * 2 * (scales + (has_minimum ? 1 : 0)); }
  constexpr int64_t scale_at(int64_t output, int64_t i) const {
    return number_bytes() + 2 * (i * scales / kBlock * kGroup + output);
  }
  constexpr int64_t minimum_at(int64_t output) const { return number_bytes() + 2 * (scales * kGroup + output); }

  // Where the number of input `i` of an output has its low bits, and where the others.
  constexpr int64_t low_at(int64_t output, int64_t i) const {
    const int64_t low = bits == 8 ? i : i % (kBlock / 2);
    return (low / 4 * kGroup + output) * 4 + low % 4;
  }
  constexpr int64_t high_at(int64_t output, int64_t i) const {
    return kGroup * kBlock / 2 + (i / 4 * (bits - 4) / 8 * kGroup + output) * 4 + i % 4;
  }
  constexpr int64_t high_shift(int64_t i) const { return i / 4 * (bits - 4) % 8; }

  // A number as it is stored, `offset` above its value.
  int64_t stored(const uint8_t* record, int64_t output, int64_t i) const {
    const uint8_t byte = record[low_at(output, i)];
    if (bits == 8) return byte;
    const int64_t low = i < kBlock / 2 ? byte & 15 : byte >> 4;
    if (bits == 4) return low;
    return low | (record[high_at(output, i)] >> high_shift(i) & ((1 << (bits - 4)) - 1)) << 4;
  }
};

// Cosines and signed sines of the angles of some positions; dimension i turns with dimension i + half.
template <typename T>
struct RotaryAngles {
  const int64_t* positions;  // [rows]
  const float* frequencies;  // [half]
  T* cos;                    // [rows, 2 * half]
  T* sin;
  int64_t half;
};

// Turns `heads` heads of each row in place.
template <typename T>
struct RotateHeads {
  T* x;          // [rows, heads, 2 * half], rows `stride` apart
  const T* cos;  // [rows, 2 * half]
  const T* sin;
  int64_t heads, half, stride;
};

// out = silu(gate) * up
template <typename T>
struct SiluAndMul {
  const T* x;  // [rows, gate | up], rows `stride` apart
  T* out;      // [rows, size]
  int64_t size, stride;
};

// out[row] = the sum over `top` experts of weight * y[place], in their order; a place below zero is left out.
template <typename T>
struct CombineExperts {
  const float* y;          // [places, size]
  const int64_t* places;   // [rows, top]
  const float* weights;    // [rows, top]
  T* out;                  // [rows, size], rows `stride` apart
  int64_t top, size, stride;
};

// The highest number of each row: the lowest id of it, and whether all numbers of the row are finite.
struct ArgmaxRows {
  const float* x;   // [rows, count], rows `stride` apart
  int64_t* ids;     // [rows]
  bool* is_finite;  // [rows]
  int64_t count, stride;
};

// Most query vectors that one pass over the keys serves, and the longest of them.
constexpr int64_t kMostQueries = 48;
constexpr int64_t kMostHeadDim = 256;

// How the cache holds keys and values: blocks of 16 slots, planes of blocks, `padded_dim` numbers a slot. Keys: for each dimension
// (two of them at 16 and 8 bits) one number of each slot, so that scores need no sums across a register. Values: the dimensions of a
// slot in order, at 16 and 8 bits those of two slots in turn, as a product of pairs wants them. Behind 8 bits lie 16 scales: a number
// is its byte times the scale of its slot (not a number, where the slot holds what is not finite).
constexpr int64_t kBlockSlots = 16;

template <typename T>
struct KvBlock {
  static constexpr bool has_scales = sizeof(T) == 1;
  static constexpr int64_t together = sizeof(T) == 4 ? 1 : 2;

  // Numbers of T from one block to the next.
  static constexpr int64_t size(int64_t padded_dim) {
    return kBlockSlots * padded_dim + (has_scales ? kBlockSlots * static_cast<int64_t>(sizeof(float)) : 0);
  }
  static constexpr int64_t key_place(int64_t slot, int64_t d) {
    return (d / together * kBlockSlots + slot) * together + d % together;
  }
  static constexpr int64_t value_place(int64_t slot, int64_t d, int64_t padded_dim) {
    return (slot / together * padded_dim + d) * together + slot % together;
  }
  static const float* scales(const T* block, int64_t padded_dim) {
    return reinterpret_cast<const float*>(block + kBlockSlots * padded_dim);
  }
};

// The new keys and values of some rows go to their slots. What is not finite makes the scale of an 8-bit row not a number.
template <typename T, typename Cache = T>
struct StoreKv {
  const T* k;  // [rows, heads, dim], rows `k_stride` apart
  const T* v;
  Cache* kv;             // as in PagedAttention
  const int64_t* slots;  // [rows]
  int64_t k_stride, v_stride, heads, dim, padded_dim, blocks;
};

// Attention of some rows of each request over its slots of the cache. Row r of request b is at `first_rows[b] + r`; it sees the
// keys up to its own, which is `lengths[b] - rows of b + r`, or what `tail_mask` says of the last `tail` ones.
template <typename T, typename Cache = T>
struct PagedAttention {
  const T* q;                  // [rows, heads, dim], rows `q_stride` apart
  const Cache* kv;             // [2 * kv heads, blocks, size of a block], as KvBlock says: all key heads, then all value heads
  const int64_t* table;        // [table rows, table_stride]: the slots of a request in order
  const int64_t* table_rows;   // [requests]
  const int64_t* first_rows;   // [requests + 1]
  const int64_t* lengths;      // [requests]
  const bool* tail_mask;       // [requests, width, tail], or null; then every request has `width` rows
  T* out;                      // [rows, heads * dim]
  int64_t requests, heads, kv_heads, dim, padded_dim, blocks, table_stride, q_stride, width, tail;
  float scale;
  float* pieces;  // where chunks of keys are computed apart: what each gave, `piece_size` floats (see attention.cpp); else null
};

// A token of each row of logits: the best one where top_k is 1, else a draw within the limits. A row with a number that is not finite
// has failure 1; where rows are masked, minus infinity is allowed, and a row from which nothing can be drawn has failure 2.
struct SampleRows {
  const float* logits;       // [.., vocab], rows `stride` apart
  const int64_t* places;     // [rows]: rows of the logits; null: in order
  const double* limits;      // [rows, temperature | top_k | top_p | min_p]; top_k <= 0 keeps all
  const int64_t* seeds;      // [rows]
  const int64_t* positions;  // [rows]: places in the streams of the seeds
  int64_t* ids;              // [rows]; of a row that failed 0
  int64_t* failures;         // [rows]
  int64_t vocab, stride;
  bool is_masked;
};

// Of some rows of logits divided by a temperature the logarithms of the probabilities: of given tokens, and of the best ones, the
// lower id first where two are equal.
struct TopLogprobs {
  const float* logits;      // [.., vocab], rows `stride` apart
  const int64_t* rows;      // [asked]: rows of the logits
  const float* divisors;    // [asked]
  const int64_t* ids;       // [ends[asked - 1]]: tokens, those of one row after another
  const int64_t* ends;      // [asked]: where those of a row end
  const int64_t* counts;    // [asked]: how many of the best, at most `most`
  float* own;               // as ids
  float* top;               // [asked, most], of which `counts` are written
  int64_t* top_ids;         // the same
  int64_t vocab, stride, most;
};

// The best tokens of each row of logits with their probabilities, the lower id first where two are equal.
struct TopProbs {
  const float* logits;  // [rows, vocab], rows `stride` apart
  int64_t* ids;         // [rows, count]
  float* probs;         // [rows, count]
  int64_t vocab, stride, count;
};

// Logits of tokens that are not allowed become minus infinity: those whose bit, from the lowest of a word, is 0.
struct TokenBitmask {
  float* logits;           // [.., vocab], rows `stride` apart
  const int32_t* bitmask;  // [masked rows, words]
  const int64_t* rows;     // [masked rows]: rows of the logits
  int64_t vocab, words, stride;
};

// Logits of a row that are looked at together; a power of two.
constexpr int64_t kSamplingBlock = 64;

// Bytes of scratch that a row needs: a weight for a token, a sum and two highest logits for a block.
constexpr int64_t logit_row_bytes(int64_t vocab) {
  return (vocab + kSamplingBlock - 1) / kSamplingBlock * (4 * kSamplingBlock + 16);
}

// The same with candidates: of a draw 16 bytes for a token, of the best tokens 8.
constexpr int64_t sample_scratch_bytes(int64_t vocab) { return logit_row_bytes(vocab) + 16 * vocab; }
constexpr int64_t logprob_scratch_bytes(int64_t vocab) { return logit_row_bytes(vocab) + 8 * vocab; }

// Kinds of numbers that pieces of tensors are reduced in; `bytes` is anything else, which is only moved.
enum class Number : uint32_t { bytes, boolean, uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64 };
enum class Reduce : uint32_t { sum, max, min };

// out[i] = the sum, maximum or minimum over the pieces at i, taken in the order of the pieces. Half precision is summed in float
// and rounded once. `out` may be one of the pieces.
struct Reduction {
  const void* const* pieces;
  void* out;
  int64_t num_pieces, count;
  Number number;
  Reduce op;
};

// Keys whose weighted values are summed for themselves, before the sums of all such chunks are joined in their order.
constexpr int64_t kChunkKeys = 256;

constexpr int64_t chunks_of(int64_t keys) { return (keys + kChunkKeys - 1) / kChunkKeys; }

// Floats that one chunk gives for one query: its weighted values, the highest score and the sum of the weights.
constexpr int64_t piece_size(int64_t padded_dim) { return padded_dim + 16; }

// Floats from the scores of one query to those of the next: a chunk, what rows beside it see beyond, and whole groups of 64.
constexpr int64_t score_stride(int64_t tail) { return (kChunkKeys + (tail > kMostQueries ? tail : kMostQueries) + 64 + 63) / 64 * 64; }

// Bytes of scratch that one share of attention needs: slots of the keys of a row, where blocks lie, scales of values, scores.
constexpr int64_t attention_scratch_bytes(int64_t tail) {
  return score_stride(tail) * (8 + 8 + 4 + 4 * kMostQueries);
}

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
  void paged_attention(const PagedAttention<float, int8_t>& call, void* scratch, int64_t part, int64_t parts);        \
  void paged_attention(const PagedAttention<bf16, int8_t>& call, void* scratch, int64_t part, int64_t parts);         \
  void join_attention(const PagedAttention<float>& call);                                                             \
  void join_attention(const PagedAttention<bf16>& call);                                                              \
  void join_attention(const PagedAttention<float, int8_t>& call);                                                     \
  void join_attention(const PagedAttention<bf16, int8_t>& call);                                                      \
  void store_kv(const StoreKv<uint32_t>& call, int64_t begin, int64_t end);                                           \
  void store_kv(const StoreKv<uint16_t>& call, int64_t begin, int64_t end);                                           \
  void store_kv(const StoreKv<float, int8_t>& call, int64_t begin, int64_t end);                                      \
  void store_kv(const StoreKv<bf16, int8_t>& call, int64_t begin, int64_t end);                                       \
  void linear_float(const Linear<float>& call, void* scratch, int64_t part, int64_t parts);                           \
  void linear_bf16(const Linear<bf16>& call, void* scratch, int64_t part, int64_t parts);                             \
  void linear_bf16(const Linear<bf16, float>& call, void* scratch, int64_t part, int64_t parts);                      \
  void linear_int8(const Linear<float>& call, void* scratch, int64_t part, int64_t parts);                            \
  void linear_int8(const Linear<bf16>& call, void* scratch, int64_t part, int64_t parts);                             \
  void linear_int8(const Linear<bf16, float>& call, void* scratch, int64_t part, int64_t parts);                      \
  void linear_blocks(const Linear<float>& call, Blocks form, void* scratch, int64_t part, int64_t parts);             \
  void linear_blocks(const Linear<bf16>& call, Blocks form, void* scratch, int64_t part, int64_t parts);              \
  void linear_blocks(const Linear<bf16, float>& call, Blocks form, void* scratch, int64_t part, int64_t parts);       \
  void rotary_cos_sin(const RotaryAngles<float>& call, int64_t begin, int64_t end);                                   \
  void rotary_cos_sin(const RotaryAngles<bf16>& call, int64_t begin, int64_t end);                                    \
  void rotate_heads(const RotateHeads<float>& call, int64_t begin, int64_t end);                                      \
  void rotate_heads(const RotateHeads<bf16>& call, int64_t begin, int64_t end);                                       \
  void silu_and_mul(const SiluAndMul<float>& call, int64_t begin, int64_t end);                                       \
  void silu_and_mul(const SiluAndMul<bf16>& call, int64_t begin, int64_t end);                                        \
  void combine_experts(const CombineExperts<float>& call, int64_t begin, int64_t end);                                \
  void combine_experts(const CombineExperts<bf16>& call, int64_t begin, int64_t end);                                 \
  void argmax_rows(const ArgmaxRows& call, int64_t begin, int64_t end);                                               \
  void reduce_pieces(const Reduction& call);                                                                          \
  void sample_rows(const SampleRows& call, void* scratch, int64_t begin, int64_t end);                                \
  void top_logprobs(const TopLogprobs& call, void* scratch, int64_t begin, int64_t end);                              \
  void top_probs(const TopProbs& call, void* scratch, int64_t begin, int64_t end);                                    \
  void apply_token_bitmask(const TokenBitmask& call, int64_t begin, int64_t end);                                     \
  }

SGL_DECLARE_KERNELS(base)
SGL_DECLARE_KERNELS(avx2)
SGL_DECLARE_KERNELS(avx512)
SGL_DECLARE_KERNELS(avx512_vnni_bf16)

}  // namespace sgl
