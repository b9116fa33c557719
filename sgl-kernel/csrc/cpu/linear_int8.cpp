// Linear layers over int8 weights with one scale an output; x is quantized row by row to int8 with one scale a row. A panel holds 32
// outputs: their scales, -128 times the sums of their weights, then for each four inputs the numbers of all 32 side by side.
//
// Sums are whole numbers, and what follows them is two products and a sum, each rounded for itself: this file is compiled without
// fused multiply-adds (CMakeLists.txt). So every instruction set, every number of rows and the torch reference give the same bits.
#include "dot_int8.h"
#include "linear.h"

SGL_KERNEL_BEGIN

namespace {

constexpr int64_t kHead = kPanel * 8;  // bytes before the numbers of a panel
constexpr uint32_t kSmallest = 0x0d800000u;  // bits of 2^-100: a row whose largest size is below it counts as zeros
constexpr uint32_t kInfinite = 0x7f800000u;
constexpr int32_t kNoSums[kPanel] = {};

// Quantized rows of x, `stride` bytes apart, a multiple of four.
struct Quantized {
  int8_t* numbers;  // [rows, stride]
  float* scales;    // [rows]
  int64_t stride;

  Quantized(void* scratch, int64_t rows, int64_t in) : stride((in + 3) / 4 * 4) {
    scales = static_cast<float*>(scratch);
    numbers = reinterpret_cast<int8_t*>(scales + rows);
  }
};

template <typename T>
uint32_t largest_size(const T* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = load_one(x + i);
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    bits &= 0x7fffffffu;  // sizes are ordered as their bits are, and NaN lies above them all
    most = bits > most ? bits : most;
  }
  return most;
}

// A row with a number that is not finite gets the scale NaN: it gives NaN for every output, and harms no other row.
template <typename T>
void quantize_row(const T* x, int64_t count, int8_t* numbers, float* scale) {
  constexpr int32_t above = Int8Step::above ? 128 : 0;
  const uint32_t most_bits = largest_size(x, count);
  float most;
  __builtin_memcpy(&most, &most_bits, sizeof(most));
  const bool is_used = most_bits >= kSmallest && most_bits < kInfinite;
  *scale = most_bits >= kInfinite ? __builtin_nanf("") : is_used ? most / 127.f : 0.f;
  if (!is_used) {
    __builtin_memset(numbers, above, count);
  } else {
    // Behind 1.5 * 2^23 a float has no room for a fraction: the sum is rounded to nearest, ties to even, on any processor.
    const float inverse = 127.f / most;
    constexpr float whole = 12582912.f;
    for (int64_t i = 0; i < count; ++i) {
      const float shifted = load_one(x + i) * inverse + whole;
      int32_t bits;
      __builtin_memcpy(&bits, &shifted, sizeof(bits));
      numbers[i] = static_cast<int8_t>(bits - 0x4b400000 + above);
    }
  }
  for (int64_t i = count; i % 4 != 0; ++i) numbers[i] = 0;
}

// Some rows times one panel.
template <typename T, typename Out>
struct Block {
  const Linear<T, Out>& call;
  const Quantized& x;
  int64_t in_x, first_row, panel;

  template <int64_t Rows>
  void run() const {
    constexpr int64_t all = kPanel / Vec::width;
    // Where the sums of a whole panel do not fit in registers, it is walked in pieces of two.
    constexpr int64_t lanes = Rows * all <= Int8Step::sums ? all : 2;
    const int64_t bytes = kHead + kPanel * x.stride;
    const uint8_t* record = static_cast<const uint8_t*>(call.weight) + panel * bytes;
    const float* scales = reinterpret_cast<const float*>(record);
    const int32_t* starts = Int8Step::above ? reinterpret_cast<const int32_t*>(record + kPanel * 4) : kNoSums;
    for (int64_t piece = 0; piece < all; piece += lanes) {
      Whole sums[Rows][lanes];
#pragma GCC unroll 16
      for (int64_t r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (int64_t j = 0; j < lanes; ++j) sums[r][j] = load_whole(starts + (piece + j) * Vec::width);
      }
      const int8_t* at = reinterpret_cast<const int8_t*>(record) + kHead + 4 * piece * Vec::width;
      const int8_t* row = x.numbers + in_x * x.stride;
      for (int64_t k = 0; k < x.stride; k += 4) {
        if constexpr (Rows > 1) {
          // The next panel comes while this one is multiplied; of a single row that only steals from its own stream.
          for (int64_t line = 0; line < 4 * lanes * Vec::width; line += 64) __builtin_prefetch(at + bytes + line, 0, 2);
        }
        Int8Step::add<Rows, lanes>(row + k, x.stride, at, sums);
        at += 4 * kPanel;
      }
      // A copy by constant places: sums that were also read by a counted one would live in memory from the start.
      Whole totals[Rows][lanes];
#pragma GCC unroll 16
      for (int64_t r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
        for (int64_t j = 0; j < lanes; ++j) totals[r][j] = sums[r][j];
      }
      for (int64_t r = 0; r < Rows; ++r) {
        const Vec scale = Vec::same(x.scales[in_x + r]);
        Vec out[lanes];
        for (int64_t j = 0; j < lanes; ++j) {
          out[j] = to_vec(totals[r][j]) * (scale * Vec::load(scales + (piece + j) * Vec::width));
        }
        write_sums(call, first_row + r, panel * kPanel + piece * Vec::width, out);
      }
    }
  }
};

template <typename T, typename Out>
void multiply(const Linear<T, Out>& call, void* scratch, int64_t part, int64_t parts) {
  const Share panels = share_of((call.outputs + kPanel - 1) / kPanel, part, parts);
  for (int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    const int64_t rows = call.rows - row < kRowsAtOnce ? call.rows - row : kRowsAtOnce;
    const Quantized x(scratch, rows, call.in);
    for (int64_t r = 0; r < rows; ++r) {
      quantize_row(call.x + (row + r) * call.x_stride, call.in, x.numbers + r * x.stride, x.scales + r);
    }
    for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
      for_blocks(rows, Int8Step::rows, [&](int64_t first, int64_t count) {
        with_rows<Int8Step::rows>(count, Block<T, Out>{call, x, first, row + first, panel});
      });
    }
  }
}

}  // namespace

void linear_int8(const Linear<float>& call, void* scratch, int64_t part, int64_t parts) { multiply(call, scratch, part, parts); }
void linear_int8(const Linear<bf16>& call, void* scratch, int64_t part, int64_t parts) { multiply(call, scratch, part, parts); }
void linear_int8(const Linear<bf16, float>& call, void* scratch, int64_t part, int64_t parts) {
  multiply(call, scratch, part, parts);
}

SGL_KERNEL_END
