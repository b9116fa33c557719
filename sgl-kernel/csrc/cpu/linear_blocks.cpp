// Linear layers over quantized blocks, computed from the packed form. A record holds 32 inputs of 16 outputs: the numbers, a half
// float scale for each output, and in two of the forms a minimum for each. x is quantized to 8 bits, 32 inputs with one scale.
//
// Sums within a block are whole numbers, so all instruction sets agree on them; blocks are added from first to last, whatever the
// number of rows: a row gives the same bits alone and in a batch.
#include "linear.h"

SGL_KERNEL_BEGIN

// 32 inputs of a row of x, in registers.
struct XVecs {
  Vec part[kBlock / Vec::width];
};

template <typename T>
inline XVecs load_x(const T* x) {
  XVecs out;
  for (int64_t i = 0; i < kBlock / Vec::width; ++i) out.part[i] = Vec::load(x + i * Vec::width);
  return out;
}

SGL_KERNEL_END

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
constexpr uint32_t kInfinite = 0x7f800000u;

// 32 inputs of a row of x, and what a product with them needs beside.
struct XBlock {
  int8_t numbers[kBlock];
  float scale;
  float sum;      // of the numbers, times the scale
  int32_t start;  // of the sums of products: what the offset of the stored numbers adds, taken away
};

// Quantized rows of x. Those of one block lie side by side, so that a pass over some rows walks a single pointer.
struct Quantized {
  XBlock* blocks;  // [count, rows]
  int64_t rows, count;
};

float of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// A block with a number that is not finite gets the scale NaN: its row gives NaN for every output, and harms no other row.
void quantize_block(const XVecs& x, int32_t offset, XBlock& to) {
  const uint32_t most_bits = largest_size(x);
  const float most = of_bits(most_bits), inverse = 127.f / most;
  to.scale = most_bits < kInfinite ? most / 127.f : __builtin_nanf("");
  // The inverse of a size below 2^-121 is not finite: such numbers count as zeros.
  int32_t total = 0;
  if (most_bits < kInfinite && inverse < of_bits(kInfinite)) {
    total = round_block(x, inverse, to.numbers);
  } else {
    __builtin_memset(to.numbers, 0, kBlock);
  }
  to.sum = to.scale * static_cast<float>(total);
  to.start = -offset * total;
}

template <typename T, typename Out>
void quantize(const Linear<T, Out>& call, int64_t first, int32_t offset, const Quantized& to) {
  const int64_t whole = call.in / kBlock;
  for (int64_t r = 0; r < to.rows; ++r) {
    const T* x = call.x + (first + r) * call.x_stride;
    for (int64_t b = 0; b < whole; ++b) {
      quantize_block(load_x(x + b * kBlock), offset, to.blocks[b * to.rows + r]);
    }
    if (whole == to.count) continue;
    T rest[kBlock] = {};
    for (int64_t i = whole * kBlock; i < call.in; ++i) rest[i - whole * kBlock] = x[i];
    quantize_block(load_x(rest), offset, to.blocks[whole * to.rows + r]);
  }
}

// Some rows times one group of outputs, or times two that lie `apart`.
template <typename Numbers, bool HasMinimum, int32_t Offset, typename T, typename Out>
struct Block {
  const Linear<T, Out>& call;
  const Quantized& x;
  int64_t in_x, first_row, group, apart;

  template <int64_t Rows, int64_t Groups = 1>
  void run() const {
    constexpr int64_t record = Numbers::bytes + (HasMinimum ? 2 : 1) * kGroup * 2;
    const uint8_t* records = static_cast<const uint8_t*>(call.weight) + group * x.count * record;
    for (int64_t piece = 0; piece < kGroup / Vec::width; ++piece) {
      Vec sums[Groups][Rows][1];
      for (int64_t g = 0; g < Groups; ++g) {
        for (int64_t r = 0; r < Rows; ++r) sums[g][r][0] = Vec::zero();
      }
      const XBlock* rows = x.blocks + in_x;
      for (int64_t b = 0; b < x.count; ++b, rows += x.rows) {
        for (int64_t g = 0; g < Groups; ++g) {
          add_record<Rows>(records + (g * apart * x.count + b) * record, piece, rows, sums[g]);
        }
      }
      for (int64_t g = 0; g < Groups; ++g) {
        for (int64_t r = 0; r < Rows; ++r) {
          write_sums(call, first_row + r, (group + g * apart) * kGroup + piece * Vec::width, sums[g][r]);
        }
      }
    }
  }

  template <int64_t Rows>
  static void add_record(const uint8_t* record, int64_t piece, const XBlock* rows, Vec (&sums)[Rows][1]) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(record + Numbers::bytes) + piece * Vec::width;
    const Numbers numbers = Numbers::load(record, piece);
    const Vec scale = load_half(halves);
    const Vec minimum = HasMinimum ? load_half(halves + kGroup) : Vec::zero();
    for (int64_t r = 0; r < Rows; ++r) {
      const Vec dot = numbers.dot(rows[r].numbers, Offset == 0 ? 0 : rows[r].start);
      sums[r][0] = multiply_add(scale * Vec::same(rows[r].scale), dot, sums[r][0]);
      if constexpr (HasMinimum) sums[r][0] = multiply_add(minimum, Vec::same(rows[r].sum), sums[r][0]);
    }
  }
};

template <typename Numbers, bool HasMinimum, int32_t Offset, typename T, typename Out>
void multiply(const Linear<T, Out>& call, void* scratch, Share groups) {
  using Some = Block<Numbers, HasMinimum, Offset, T, Out>;
  for (int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    const int64_t rows = call.rows - row < kRowsAtOnce ? call.rows - row : kRowsAtOnce;
    const Quantized x{static_cast<XBlock*>(scratch), rows, (call.in + kBlock - 1) / kBlock};
    quantize(call, row, Offset, x);
    int64_t group = groups.begin;
    if (rows == 1) {
      // Of a single row, which waits for memory, two places of the weight are read at a time: more comes than from one.
      const int64_t half = (groups.end - groups.begin) / 2;
      for (; group < groups.begin + half; ++group) Some{call, x, 0, row, group, half}.template run<1, 2>();
      group += half;
    }
    for (; group < groups.end; ++group) {
      for_blocks(rows, kBlockRows, [&](int64_t first, int64_t count) {
        with_rows<kBlockRows>(count, Some{call, x, first, row + first, group, 0});
      });
    }
  }
}

template <typename T, typename Out>
void multiply_form(const Linear<T, Out>& call, Blocks form, void* scratch, int64_t part, int64_t parts) {
  const Share groups = share_of((call.outputs + kGroup - 1) / kGroup, part, parts);
  switch (form) {
    case Blocks::q4: return multiply<Nibbles, false, 8>(call, scratch, groups);
    case Blocks::q4_min: return multiply<Nibbles, true, 0>(call, scratch, groups);
    case Blocks::q8: return multiply<Octets, false, 128>(call, scratch, groups);
    case Blocks::q8_min: return multiply<Octets, true, 128>(call, scratch, groups);
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
