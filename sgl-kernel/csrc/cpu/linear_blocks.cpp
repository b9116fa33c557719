// Linear layers over quantized blocks, computed from the packed form. A record holds 32 inputs of 16 outputs, as
// `BlockLayout` tells. x is quantized to 8 bits, 32 inputs with one scale.
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

// Fours of inputs whose products of stored numbers, summed in pairs, fit 16 bits together: pairs of at most 15, 31 or 63 times 127.
template <int64_t Bits>
constexpr int64_t kFoursTogether = Bits == 4 ? 8 : Bits == 5 ? 4 : 2;

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
  // What sums of products start from: what the offset of the stored numbers adds, taken away. Of the whole block, or of its halves.
  int32_t start[2];
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
void quantize_block(const XVecs& x, const BlockLayout& layout, XBlock& to) {
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
  int32_t first = total;
  if (layout.scales == 2) {
    first = 0;
    for (int64_t i = 0; i < kBlock / 2; ++i) first += to.numbers[i];
  }
  const int32_t offset = static_cast<int32_t>(layout.offset);
  to.start[0] = -offset * first;
  to.start[1] = -offset * (total - first);
}

template <typename T, typename Out>
void quantize(const Linear<T, Out>& call, int64_t first, const BlockLayout& layout, const Quantized& to) {
  const int64_t whole = call.in / kBlock;
  for (int64_t r = 0; r < to.rows; ++r) {
    const T* x = call.x + (first + r) * call.x_stride;
    for (int64_t b = 0; b < whole; ++b) {
      quantize_block(load_x(x + b * kBlock), layout, to.blocks[b * to.rows + r]);
    }
    if (whole == to.count) continue;
    T rest[kBlock] = {};
    for (int64_t i = whole * kBlock; i < call.in; ++i) rest[i - whole * kBlock] = x[i];
    quantize_block(load_x(rest), layout, to.blocks[whole * to.rows + r]);
  }
}

// Writes the sums of a register of outputs of a row. Behind a pointer, so that products are not compiled once for each type of x.
struct Writer {
  const void* call;  // Linear<T, Out>
  void (*write)(const void* call, int64_t row, int64_t first, const Vec (&sums)[1]);
};

template <typename T, typename Out>
void write_of(const void* call, int64_t row, int64_t first, const Vec (&sums)[1]) {
  write_sums(*static_cast<const Linear<T, Out>*>(call), row, first, sums);
}

// Some rows times one group of outputs, or times two that lie `apart`.
template <Blocks Form>
struct Block {
  static constexpr BlockLayout layout{Form};
  static constexpr int64_t record_bytes = layout.record_bytes();
  const void* weight;
  const Quantized& x;
  const Writer& out;
  int64_t in_x, first_row, group, apart;

  template <int64_t Rows, int64_t Groups = 1>
  void run() const {
    const uint8_t* records = static_cast<const uint8_t*>(weight) + group * x.count * record_bytes;
    // Where one pass over the records serves a single row, it takes all outputs of a record; of more rows the sums would not fit.
    constexpr int64_t pieces = kGroup / Vec::width, at_once = Rows == 1 ? pieces : 1;
    for (int64_t piece = 0; piece < pieces; piece += at_once) {
      Vec sums[Groups][at_once][Rows][1];
      for (int64_t g = 0; g < Groups; ++g) {
        for (int64_t p = 0; p < at_once; ++p) {
          for (int64_t r = 0; r < Rows; ++r) sums[g][p][r][0] = Vec::zero();
        }
      }
      const XBlock* rows = x.blocks + in_x;
      for (int64_t b = 0; b < x.count; ++b, rows += x.rows) {
        for (int64_t g = 0; g < Groups; ++g) {
          const uint8_t* record = records + (g * apart * x.count + b) * record_bytes;
          for (int64_t p = 0; p < at_once; ++p) add_record<Rows>(record, piece + p, rows, sums[g][p]);
        }
      }
      for (int64_t g = 0; g < Groups; ++g) {
        for (int64_t p = 0; p < at_once; ++p) {
          const int64_t first = (group + g * apart) * kGroup + (piece + p) * Vec::width;
          for (int64_t r = 0; r < Rows; ++r) out.write(out.call, first_row + r, first, sums[g][p][r]);
        }
      }
    }
  }

  static Vec halves(const uint8_t* record, int64_t at) { return load_half(reinterpret_cast<const uint16_t*>(record + at)); }

  template <int64_t Rows>
  [[gnu::always_inline]] static void add_record(const uint8_t* record, int64_t piece, const XBlock* rows, Vec (&sums)[Rows][1]) {
    const int64_t first = piece * Vec::width;
    const Numbers<layout.bits> numbers = Numbers<layout.bits>::load(record, piece);
    const Vec scale = halves(record, layout.scale_at(first, 0));
    const Vec other = layout.scales == 2 ? halves(record, layout.scale_at(first, kBlock / 2)) : Vec::zero();
    const Vec minimum = layout.has_minimum ? halves(record, layout.minimum_at(first)) : Vec::zero();
    for (int64_t r = 0; r < Rows; ++r) {
      const XBlock& x_block = rows[r];
      const int32_t start = layout.offset == 0 ? 0 : x_block.start[0];
      Vec& sum = sums[r][0];
      if constexpr (layout.scales == 2) {
        const Vec in_scale = Vec::same(x_block.scale);
        sum = multiply_add(scale * in_scale, numbers.first_half(x_block.numbers, start), sum);
        sum = multiply_add(other * in_scale, numbers.second_half(x_block.numbers, x_block.start[1]), sum);
      } else {
        sum = multiply_add(scale * Vec::same(x_block.scale), numbers.dot(x_block.numbers, start), sum);
      }
      if constexpr (layout.has_minimum) sum = multiply_add(minimum, Vec::same(x_block.sum), sum);
    }
  }
};

// `rows` quantized rows, the first of which is row `row` of the call, times some groups of outputs.
template <Blocks Form>
void multiply(const void* weight, const Quantized& x, const Writer& out, int64_t row, Share groups) {
  int64_t group = groups.begin;
  if (x.rows == 1) {
    // Of a single row, which waits for memory, two places of the weight are read at a time: more comes than from one.
    const int64_t half = (groups.end - groups.begin) / 2;
    for (; group < groups.begin + half; ++group) Block<Form>{weight, x, out, 0, row, group, half}.template run<1, 2>();
    group += half;
  }
  for (; group < groups.end; ++group) {
    for_blocks(x.rows, kBlockRows, [&](int64_t first, int64_t count) {
      with_rows<kBlockRows>(count, Block<Form>{weight, x, out, first, row + first, group, 0});
    });
  }
}

void multiply_form(const void* weight, Blocks form, const Quantized& x, const Writer& out, int64_t row, Share groups) {
  switch (form) {
    case Blocks::q4: return multiply<Blocks::q4>(weight, x, out, row, groups);
    case Blocks::q4_min: return multiply<Blocks::q4_min>(weight, x, out, row, groups);
    case Blocks::q5: return multiply<Blocks::q5>(weight, x, out, row, groups);
    case Blocks::q5_min: return multiply<Blocks::q5_min>(weight, x, out, row, groups);
    case Blocks::q6: return multiply<Blocks::q6>(weight, x, out, row, groups);
    case Blocks::q8: return multiply<Blocks::q8>(weight, x, out, row, groups);
  }
}

template <typename T, typename Out>
void multiply_rows(const Linear<T, Out>& call, Blocks form, void* scratch, int64_t part, int64_t parts) {
  const Share groups = share_of((call.outputs + kGroup - 1) / kGroup, part, parts);
  const Writer out{&call, write_of<T, Out>};
  for (int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    const int64_t rows = call.rows - row < kRowsAtOnce ? call.rows - row : kRowsAtOnce;
    const Quantized x{static_cast<XBlock*>(scratch), rows, (call.in + kBlock - 1) / kBlock};
    quantize(call, row, BlockLayout(form), x);
    multiply_form(call.weight, form, x, out, row, groups);
  }
}

}  // namespace

void linear_blocks(const Linear<float>& call, Blocks form, void* scratch, int64_t part, int64_t parts) {
  multiply_rows(call, form, scratch, part, parts);
}

void linear_blocks(const Linear<bf16>& call, Blocks form, void* scratch, int64_t part, int64_t parts) {
  multiply_rows(call, form, scratch, part, parts);
}

void linear_blocks(const Linear<bf16, float>& call, Blocks form, void* scratch, int64_t part, int64_t parts) {
  multiply_rows(call, form, scratch, part, parts);
}

SGL_KERNEL_END
