// Packs weights for the linear kernels, straight into the packed form: no copy of the weight is made on the way.
//
// Every form has words of four bytes of a weight's rows, those of some outputs side by side. The layouts are those that
// sgl_kernel/linear.py and linear_int8.py tell; what is missing of the last outputs or inputs is zeros.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstring>
#include <optional>

#include "block_form.h"
#include "ops.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What a byte of a weight costs one thread, roughly, in nanoseconds.
constexpr double kNanosecondsOfByte = 0.25;
// Words of one row that are taken at once: a cache line.
constexpr int64_t kLine = 16;

// A weight [outputs, in], its rows `stride` bytes apart; `bytes` of them are numbers.
struct Rows {
  const uint8_t* data;
  int64_t outputs, bytes, stride;

  explicit Rows(const Tensor& weight)
      : data(static_cast<const uint8_t*>(weight.const_data_ptr())),
        outputs(weight.size(0)),
        bytes(weight.size(1) * weight.element_size()),
        stride(weight.stride(0) * weight.element_size()) {}

  const uint8_t* at(int64_t output) const { return data + output * stride; }
};

bool has_whole_rows(const Tensor& x) { return x.dim() == 2 && (x.size(1) <= 1 || x.stride(1) == 1); }

int64_t pieces_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// The next word of which only `bytes` bytes may be there; of a constant size the copy is one load.
inline uint32_t word_at(const uint8_t* from, int64_t bytes) {
  uint32_t word = 0;
  if (bytes >= 4) {
    std::memcpy(&word, from, 4);
  } else {
    std::memcpy(&word, from, bytes);
  }
  return word;
}

void put(uint8_t* to, uint32_t word) { std::memcpy(to, &word, sizeof(word)); }

// The words of up to a panel of outputs: those of word 0 first.
void pack_panel(const Rows& rows, int64_t first, uint8_t* to) {
  const int64_t count = rows.outputs - first < sgl::kPanel ? rows.outputs - first : sgl::kPanel;
  const int64_t words = pieces_of(rows.bytes, 4);
  if (count < sgl::kPanel) std::memset(to, 0, words * sgl::kPanel * 4);
  for (int64_t line = 0; line < words; line += kLine) {
    const int64_t end = line + kLine < words ? line + kLine : words;
    for (int64_t row = 0; row < count; ++row) {
      const uint8_t* from = rows.at(first + row);
      for (int64_t word = line; word < end; ++word) {
        put(to + (word * sgl::kPanel + row) * 4, word_at(from + word * 4, rows.bytes - word * 4));
      }
    }
  }
}

// Calls pack(first output, where it goes) for each piece of `size` outputs, which takes `piece_bytes` of `out`.
template <typename Pack>
void for_pieces(int64_t outputs, int64_t size, int64_t piece_bytes, Tensor& out, const Pack& pack) {
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  sgl::for_rows(torch::stable::get_num_threads(), pieces_of(outputs, size), kNanosecondsOfByte * static_cast<double>(piece_bytes),
                [&](int64_t begin, int64_t end) {
                  for (int64_t piece = begin; piece < end; ++piece) pack(piece * size, to + piece * piece_bytes);
                });
}

void check_out(const char* name, const Tensor& out, int64_t bytes) {
  const int64_t room = out.numel() * static_cast<int64_t>(out.element_size());
  STD_TORCH_CHECK(out.is_contiguous() && room == bytes, name, ": out takes ", bytes, " bytes, and has ", room);
}

void pack_panels(Tensor weight, Tensor out) {
  STD_TORCH_CHECK(has_whole_rows(weight), "pack_panels: weight is [outputs, in], the numbers of a row side by side");
  const ScalarType type = weight.scalar_type();
  STD_TORCH_CHECK((type == ScalarType::Float || type == ScalarType::BFloat16) && out.scalar_type() == type,
                  "pack_panels: float32 and bfloat16 are served, and out has the dtype of weight");
  const Rows rows(weight);
  const int64_t panel = pieces_of(rows.bytes, 4) * sgl::kPanel * 4;
  check_out("pack_panels", out, pieces_of(rows.outputs, sgl::kPanel) * panel);
  for_pieces(rows.outputs, sgl::kPanel, panel, out, [&](int64_t first, uint8_t* to) { pack_panel(rows, first, to); });
}

// The head of a panel: the scales of its outputs, and -128 times the sums of their numbers.
void pack_int8_head(const Rows& rows, const float* scales, int64_t first, uint8_t* to) {
  std::memset(to, 0, sgl::kPanel * 8);
  for (int64_t row = 0; row < sgl::kPanel && first + row < rows.outputs; ++row) {
    const int8_t* numbers = reinterpret_cast<const int8_t*>(rows.at(first + row));
    int32_t sum = 0;
    for (int64_t i = 0; i < rows.bytes; ++i) sum += numbers[i];
    std::memcpy(to + row * 4, scales + first + row, 4);
    put(to + (sgl::kPanel + row) * 4, static_cast<uint32_t>(sum * -128));
  }
}

void pack_int8(Tensor numbers, Tensor scales, Tensor out) {
  STD_TORCH_CHECK(has_whole_rows(numbers) && numbers.scalar_type() == ScalarType::Char,
                  "pack_int8: numbers is int8 [outputs, in], those of a row side by side");
  STD_TORCH_CHECK(scales.is_contiguous() && scales.scalar_type() == ScalarType::Float && scales.numel() == numbers.size(0),
                  "pack_int8: scales is contiguous float32 [outputs]");
  STD_TORCH_CHECK(numbers.size(1) <= sgl::kMostInt8Inputs, "pack_int8: a sum holds ", sgl::kMostInt8Inputs, " inputs at most");
  const Rows rows(numbers);
  constexpr int64_t head = sgl::kPanel * 8;
  const int64_t panel = head + pieces_of(rows.bytes, 4) * sgl::kPanel * 4;
  check_out("pack_int8", out, pieces_of(rows.outputs, sgl::kPanel) * panel);
  const float* data = static_cast<const float*>(scales.const_data_ptr());
  for_pieces(rows.outputs, sgl::kPanel, panel, out, [&](int64_t first, uint8_t* to) {
    pack_int8_head(rows, data, first, to);
    pack_panel(rows, first, to + head);
  });
}

// The numbers of one block of up to 16 outputs, each `offset` above its value. An output that is missing has the value 0.
void pack_block(const Rows& rows, int64_t first, int64_t block, const sgl::BlockLayout& layout, uint8_t* to) {
  constexpr int64_t words = sgl::kBlock / 4;
  constexpr uint32_t each = 0x01010101u;
  const uint32_t offset = each * static_cast<uint32_t>(layout.offset);
  const int64_t high = layout.bits - 4;
  for (int64_t row = 0; row < sgl::kGroup; ++row) {
    uint32_t word[words] = {};
    if (first + row < rows.outputs) std::memcpy(word, rows.at(first + row) + block * sgl::kBlock, sizeof(word));
    // An offset is half of the range: adding it turns the highest bit.
    for (uint32_t& four : word) four ^= offset;
    if (layout.bits == 8) {
      for (int64_t j = 0; j < words; ++j) put(to + layout.low_at(row, 4 * j), word[j]);
      continue;
    }
    const uint32_t low = each * 15u;
    for (int64_t j = 0; j < words / 2; ++j) {
      put(to + layout.low_at(row, 4 * j), (word[j] & low) | (word[j + words / 2] & low) << 4);
    }
    if (high == 0) continue;
    const uint32_t upper = each * ((1u << high) - 1);
    for (int64_t j = 0; j < words; j += 8 / high) {
      uint32_t plane = 0;
      for (int64_t k = j; k < j + 8 / high; ++k) plane |= (word[k] >> 4 & upper) << layout.high_shift(4 * k);
      put(to + layout.high_at(row, 4 * j), plane);
    }
  }
}

// Half floats of each output of a group, those at `column` of their rows.
void pack_halves(const Rows& halves, int64_t first, int64_t column, uint8_t* to) {
  for (int64_t row = 0; row < sgl::kGroup; ++row) {
    if (first + row < halves.outputs) {
      std::memcpy(to + 2 * row, halves.at(first + row) + 2 * column, 2);
    } else {
      std::memset(to + 2 * row, 0, 2);
    }
  }
}

void check_halves(const char* name, const Tensor& halves, int64_t outputs, int64_t count) {
  STD_TORCH_CHECK(has_whole_rows(halves) && halves.scalar_type() == ScalarType::Half && halves.size(0) == outputs &&
                      halves.size(1) == count,
                  "pack_blocks: ", name, " is float16 [", outputs, ", ", count, "], those of a row side by side");
}

void pack_blocks(Tensor numbers, Tensor scales, std::optional<Tensor> minima, Tensor out, int64_t form) {
  const sgl::BlockLayout layout(sgl::block_form("pack_blocks", form));
  STD_TORCH_CHECK(has_whole_rows(numbers) && numbers.scalar_type() == ScalarType::Char && numbers.size(1) % sgl::kBlock == 0,
                  "pack_blocks: numbers is int8 [outputs, in], those of a row side by side, in a multiple of ", sgl::kBlock);
  STD_TORCH_CHECK(minima.has_value() == layout.has_minimum, "pack_blocks: form ", form,
                  layout.has_minimum ? " has minima, and none are given" : " has no minima, and some are given");
  const int64_t outputs = numbers.size(0), blocks = numbers.size(1) / sgl::kBlock, record = layout.record_bytes();
  check_halves("scales", scales, outputs, blocks * layout.scales);
  if (layout.has_minimum) check_halves("minima", *minima, outputs, blocks);
  const Rows rows(numbers), scale_rows(scales), minimum_rows(layout.has_minimum ? *minima : scales);
  check_out("pack_blocks", out, pieces_of(outputs, sgl::kGroup) * blocks * record);
  for_pieces(outputs, sgl::kGroup, blocks * record, out, [&](int64_t first, uint8_t* to) {
    for (int64_t block = 0; block < blocks; ++block, to += record) {
      pack_block(rows, first, block, layout, to);
      for (int64_t part = 0; part < layout.scales; ++part) {
        const int64_t at = layout.scale_at(0, part * sgl::kBlock / layout.scales);
        pack_halves(scale_rows, first, block * layout.scales + part, to + at);
      }
      if (layout.has_minimum) pack_halves(minimum_rows, first, block, to + layout.minimum_at(0));
    }
  });
}

// What a record takes: 32 inputs of 16 outputs.
int64_t block_record_bytes(int64_t form) { return sgl::BlockLayout(sgl::block_form("block_record_bytes", form)).record_bytes(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def("pack_panels(Tensor weight, Tensor(a!) out) -> ()");
  m.def("pack_int8(Tensor numbers, Tensor scales, Tensor(a!) out) -> ()");
  m.def("pack_blocks(Tensor numbers, Tensor scales, Tensor? minima, Tensor(a!) out, int form) -> ()");
  m.def("block_record_bytes(int form) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("pack_panels", TORCH_BOX(&pack_panels));
  m.impl("pack_int8", TORCH_BOX(&pack_int8));
  m.impl("pack_blocks", TORCH_BOX(&pack_blocks));
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CompositeExplicitAutograd, m) {
  m.impl("block_record_bytes", TORCH_BOX(&block_record_bytes));
}
