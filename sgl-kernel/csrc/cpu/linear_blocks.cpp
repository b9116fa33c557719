// Linear layers over quantized blocks, computed from the packed form. A record holds 32 inputs of 16 outputs: the numbers, a half
// float scale for each output, and in two of the forms a minimum for each. x is quantized to 8 bits, 32 inputs with one scale.
//
// Sums within a block are whole numbers, so all instruction sets agree on them; blocks are added from first to last, whatever the
// number of rows: a row gives the same bits alone and in a batch.
#include "linear.h"

#if defined(SGL_ISA_avx512) || defined(SGL_ISA_avx512_vnni_bf16)
#include "dot_avx512.h"
#elif defined(SGL_ISA_avx2)
#include "dot_avx2.h"
#else
#include "dot_scalar.h"
#endif

SGL_KERNEL_BEGIN

namespace {

constexpr int64_t kBlockRows = 8;

// Quantized rows of x; row r of block b is at r * blocks + b.
struct Quantized {
  int8_t* numbers;  // [rows, blocks * 32]
  float* scales;    // [rows, blocks]
  float* sums;      // [rows, blocks]: of the numbers times the scale
  int32_t* totals;  // [rows, blocks]: of the numbers
  int64_t blocks;

  Quantized(void* scratch, int64_t rows, int64_t blocks) : blocks(blocks) {
    numbers = static_cast<int8_t*>(scratch);
    scales = reinterpret_cast<float*>(numbers + rows * blocks * kBlock);
    sums = scales + rows * blocks;
    totals = reinterpret_cast<int32_t*>(sums + rows * blocks);
  }
};

template <typename T>
void quantize_block(const T* x, int64_t count, const Quantized& to, int64_t at) {
  float values[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) values[i] = i < count ? load_one(x + i) : 0.f;
  float most = 0.f;
  for (int64_t i = 0; i < kBlock; ++i) {
    const float size = __builtin_fabsf(values[i]);
    most = size > most ? size : most;
  }
  const float scale = most / 127.f;
  const float inverse = most > 0.f ? 127.f / most : 0.f;
  int32_t total = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const int32_t number = static_cast<int32_t>(__builtin_rintf(values[i] * inverse));
    to.numbers[at * kBlock + i] = static_cast<int8_t>(number);
    total += number;
  }
  to.scales[at] = scale;
  to.sums[at] = scale * static_cast<float>(total);
  to.totals[at] = total;
}

template <typename T, typename Out>
void quantize(const Linear<T, Out>& call, int64_t first, int64_t rows, const Quantized& to) {
  for (int64_t r = 0; r < rows; ++r) {
    const T* x = call.x + (first + r) * call.x_stride;
    for (int64_t b = 0; b < to.blocks; ++b) {
      const int64_t left = call.in - b * kBlock;
      quantize_block(x + b * kBlock, left < kBlock ? left : kBlock, to, r * to.blocks + b);
    }
  }
}

// Some rows times one group of outputs.
template <typename Numbers, bool HasMinimum, int32_t Offset, typename T, typename Out>
struct Block {
  const Linear<T, Out>& call;
  const Quantized& x;
  int64_t in_x, first_row, group;

  template <int64_t Rows>
  void run() const {
    constexpr int64_t record = Numbers::bytes + (HasMinimum ? 2 : 1) * kGroup * 2;
    const uint8_t* records = static_cast<const uint8_t*>(call.weight) + group * x.blocks * record;
    for (int64_t piece = 0; piece < kGroup / Vec::width; ++piece) {
      Vec sums[Rows][1];
      for (int64_t r = 0; r < Rows; ++r) sums[r][0] = Vec::zero();
      for (int64_t b = 0; b < x.blocks; ++b) {
        const uint8_t* at = records + b * record;
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(at + Numbers::bytes) + piece * Vec::width;
        const Numbers numbers = Numbers::load(at, piece);
        const Vec scale = load_half(halves);
        for (int64_t r = 0; r < Rows; ++r) {
          const int64_t place = (in_x + r) * x.blocks + b;
          const Vec dot = numbers.dot(x.numbers + place * kBlock, Offset * x.totals[place]);
          sums[r][0] = multiply_add(scale * Vec::same(x.scales[place]), dot, sums[r][0]);
          if constexpr (HasMinimum) {
            sums[r][0] = multiply_add(load_half(halves + kGroup), Vec::same(x.sums[place]), sums[r][0]);
          }
        }
      }
      for (int64_t r = 0; r < Rows; ++r) {
        write_sums(call, first_row + r, group * kGroup + piece * Vec::width, sums[r]);
      }
    }
  }
};

template <typename Numbers, bool HasMinimum, int32_t Offset, typename T, typename Out>
void multiply(const Linear<T, Out>& call, const Quantized& x, int64_t first_row, int64_t rows, Share groups) {
  for (int64_t group = groups.begin; group < groups.end; ++group) {
    for_blocks(rows, kBlockRows, [&](int64_t first, int64_t count) {
      with_rows<kBlockRows>(count, Block<Numbers, HasMinimum, Offset, T, Out>{call, x, first, first_row + first, group});
    });
  }
}

template <typename T, typename Out>
void multiply_form(const Linear<T, Out>& call, Blocks form, void* scratch, int64_t part, int64_t parts) {
  const Share groups = share_of((call.outputs + kGroup - 1) / kGroup, part, parts);
  for (int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    const int64_t rows = call.rows - row < kRowsAtOnce ? call.rows - row : kRowsAtOnce;
    const Quantized x(scratch, rows, (call.in + kBlock - 1) / kBlock);
    quantize(call, row, rows, x);
    switch (form) {
      case Blocks::q4: multiply<Nibbles, false, 8>(call, x, row, rows, groups); break;
      case Blocks::q4_min: multiply<Nibbles, true, 0>(call, x, row, rows, groups); break;
      case Blocks::q8: multiply<Octets, false, 128>(call, x, row, rows, groups); break;
      case Blocks::q8_min: multiply<Octets, true, 128>(call, x, row, rows, groups); break;
    }
  }
}

}  // namespace

void linear_blocks(const Linear<float>& call, Blocks form, void* scratch, int64_t part, int64_t parts) {
  multiply_form(call, form, scratch, part, parts);
}

void linear_blocks(const Linear<bf16>& call, Blocks form, void* scratch, int64_t part, int64_t parts) {
  multiply_form(call, form, scratch, part, parts);
}

void linear_blocks(const Linear<bf16, float>& call, Blocks form, void* scratch, int64_t part, int64_t parts) {
  multiply_form(call, form, scratch, part, parts);
}

SGL_KERNEL_END
