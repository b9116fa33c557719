// What the linear kernels share: how outputs are cut into shares, rows into blocks, and how a block of sums is written out.
#pragma once

#include "vec.h"

SGL_KERNEL_BEGIN

// Rows of one block: the most whose sums stay in registers beside the weights.
#if defined(SGL_ISA_avx512) || defined(SGL_ISA_avx512_vnni_bf16)
constexpr int64_t kMostRows = 12;
constexpr int64_t kSums = 28;
#elif defined(SGL_ISA_avx2)
constexpr int64_t kMostRows = 6;
constexpr int64_t kSums = 12;
#else
constexpr int64_t kMostRows = 4;
constexpr int64_t kSums = 8;
#endif

// The part of `count` things that share number `part` of `parts` has.
struct Share {
  int64_t begin, end;
};

inline Share share_of(int64_t count, int64_t part, int64_t parts) {
  return Share{count * part / parts, count * (part + 1) / parts};
}

// Calls visit(first, count) for blocks of at most `most` rows of nearly equal size.
template <typename Visit>
inline void for_blocks(int64_t rows, int64_t most, Visit visit) {
  const int64_t blocks = (rows + most - 1) / most;
  for (int64_t block = 0; block < blocks; ++block) {
    const Share share = share_of(rows, block, blocks);
    visit(share.begin, share.end - share.begin);
  }
}

// Calls body.run<rows>() for a number of rows that is known only now.
template <int64_t Most, typename Body>
inline void with_rows(int64_t rows, const Body& body) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, body);
  }
  body.template run<Most>();
}

// Adds the bias to sums of one row, and writes those that are outputs.
template <typename T, typename Out, int64_t Lanes>
inline void write_sums(const Linear<T, Out>& call, int64_t row, int64_t first, const Vec (&sums)[Lanes]) {
  Out* out = call.out + row * call.out_stride;
  const int64_t left = call.outputs - first;
  if (left >= Lanes * Vec::width) {
    for (int64_t j = 0; j < Lanes; ++j) {
      const int64_t at = first + j * Vec::width;
      (call.bias == nullptr ? sums[j] : sums[j] + Vec::load(call.bias + at)).store(out + at);
    }
    return;
  }
  float values[Lanes * Vec::width];
  for (int64_t j = 0; j < Lanes; ++j) sums[j].store(values + j * Vec::width);
  for (int64_t i = 0; i < left; ++i) {
    store_one(out + first + i, call.bias == nullptr ? values[i] : values[i] + load_one(call.bias + first + i));
  }
}

SGL_KERNEL_END
