// Rows of an embedding table as torch sees them: from the table itself, or from the packed weight of a head that is tied to it.
//
// A row of a packed weight lies in many places, which costs some microseconds; holding the numbers twice would cost megabytes.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>

#include "block_form.h"
#include "ops.h"
#include "record.h"
#include "team.h"

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What a byte of a row costs one thread, roughly, in nanoseconds: side by side, strewn over a panel, computed from a block.
constexpr double kCopied = 0.1;
constexpr double kGathered = 1;
constexpr double kComputed = 1;

// Calls copy(row of out, id within the table) for each row; a row of another share of the table is zeros.
template <typename Copy>
void look_up(const char* name, const Tensor& ids, Tensor& out, int64_t count, int64_t first_id, bool is_share,
             double nanoseconds_of_byte, Copy copy) {
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long && ids.dim() == 1 && ids.is_contiguous(), name,
                  ": ids is contiguous int64 [rows]");
  STD_TORCH_CHECK(out.dim() == 2 && out.is_contiguous() && out.size(0) == ids.size(0), name, ": out is contiguous [rows, hidden]");
  const int64_t rows = ids.size(0), bytes = out.size(1) * out.element_size();
  const int64_t* numbers = static_cast<const int64_t*>(ids.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  sgl::submit([=] {
    const double nanoseconds = static_cast<double>(bytes) * nanoseconds_of_byte;
    sgl::for_rows(torch::stable::get_num_threads(), rows, nanoseconds, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t id = numbers[row] - first_id;
        const bool is_here = id >= 0 && id < count;
        STD_TORCH_CHECK(is_here || is_share, name, ": id ", numbers[row], " of a table of ", count);
        if (is_here) {
          copy(to + row * bytes, id);
        } else {
          std::memset(to + row * bytes, 0, bytes);
        }
      }
    });
  });
}

void embed_rows(Tensor ids, Tensor table, Tensor out, int64_t first_id, bool is_share) {
  STD_TORCH_CHECK(table.dim() == 2 && table.is_contiguous() && out.dim() == 2 && out.size(1) == table.size(1) &&
                      out.scalar_type() == table.scalar_type(),
                  "embed_rows: table is contiguous [ids, hidden], and out [rows, hidden] of its dtype");
  const int64_t bytes = table.size(1) * table.element_size();
  const char* from = static_cast<const char*>(table.const_data_ptr());
  look_up("embed_rows", ids, out, table.size(0), first_id, is_share, kCopied,
          [=](char* to, int64_t id) { std::memcpy(to, from + id * bytes, bytes); });
}

// Steps of a panel hold one float, or two bf16, of each of its outputs: four bytes either way.
void embed_panels(Tensor ids, Tensor packed, Tensor out, int64_t count, int64_t first_id, bool is_share) {
  STD_TORCH_CHECK(packed.is_contiguous() && out.dim() == 2 && packed.scalar_type() == out.scalar_type() &&
                      (out.element_size() == 4 || out.element_size() == 2),
                  "embed_panels: packed is what pack_panels made of [ids, hidden], and out [rows, hidden] of its dtype");
  const int64_t size = out.element_size(), row_bytes = out.size(1) * size;
  const int64_t steps = (row_bytes + 3) / 4, panel = steps * sgl::kPanel * 4;
  STD_TORCH_CHECK(packed.numel() * size == (count + sgl::kPanel - 1) / sgl::kPanel * panel,
                  "embed_panels: packed has another number of rows than ", count, ", or another length of one");
  const char* from = static_cast<const char*>(packed.const_data_ptr());
  look_up("embed_panels", ids, out, count, first_id, is_share, kGathered, [=](char* to, int64_t id) {
    const char* at = from + id / sgl::kPanel * panel + id % sgl::kPanel * 4;
    for (int64_t byte = 0; byte < row_bytes; byte += 4, at += sgl::kPanel * 4) {
      std::memcpy(to + byte, at, row_bytes - byte < 4 ? row_bytes - byte : 4);
    }
  });
}

inline float half_at(const uint8_t* record, int64_t at) {
  Half half;
  std::memcpy(&half, record + at, sizeof(half));
  return static_cast<float>(half);
}

// One row of packed blocks: a value is its scale times the number, plus the minimum of its block where there is one.
template <typename T>
void copy_block_row(const uint8_t* group, int64_t output, int64_t blocks, const sgl::BlockLayout& layout, T* to) {
  const int64_t scaled = sgl::kBlock / layout.scales;
  for (int64_t block = 0; block < blocks; ++block) {
    const uint8_t* record = group + block * layout.record_bytes();
    const float minimum = layout.has_minimum ? half_at(record, layout.minimum_at(output)) : 0.f;
    float scale = 0.f;
    for (int64_t i = 0; i < sgl::kBlock; ++i) {
      if (i % scaled == 0) scale = half_at(record, layout.scale_at(output, i));
      const int64_t value = layout.stored(record, output, i) - layout.offset;
      to[block * sgl::kBlock + i] = static_cast<T>(static_cast<float>(value) * scale + minimum);
    }
  }
}

void embed_blocks(Tensor ids, Tensor packed, Tensor out, int64_t form, int64_t count, int64_t first_id, bool is_share) {
  STD_TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == ScalarType::Byte && out.dim() == 2 && out.size(1) % sgl::kBlock == 0,
                  "embed_blocks: packed is what pack_blocks made of [ids, hidden], and out [rows, hidden]");
  const sgl::BlockLayout layout(sgl::block_form("embed_blocks", form));
  const int64_t blocks = out.size(1) / sgl::kBlock, group = blocks * layout.record_bytes();
  STD_TORCH_CHECK(packed.numel() == (count + sgl::kGroup - 1) / sgl::kGroup * group,
                  "embed_blocks: packed has another number of rows than ", count, ", or another length of one");
  const uint8_t* from = static_cast<const uint8_t*>(packed.const_data_ptr());
  const ScalarType type = out.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, "embed_blocks: out is float32 or bfloat16");
  look_up("embed_blocks", ids, out, count, first_id, is_share, kComputed, [=](char* to, int64_t id) {
    const uint8_t* at = from + id / sgl::kGroup * group;
    if (type == ScalarType::Float) {
      copy_block_row(at, id % sgl::kGroup, blocks, layout, reinterpret_cast<float*>(to));
    } else {
      copy_block_row(at, id % sgl::kGroup, blocks, layout, reinterpret_cast<BFloat16*>(to));
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def("embed_rows(Tensor ids, Tensor table, Tensor(a!) out, int first_id, bool is_share) -> ()");
  m.def("embed_panels(Tensor ids, Tensor packed, Tensor(a!) out, int count, int first_id, bool is_share) -> ()");
  m.def("embed_blocks(Tensor ids, Tensor packed, Tensor(a!) out, int form, int count, int first_id, bool is_share) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("embed_rows", TORCH_BOX(&embed_rows));
  m.impl("embed_panels", TORCH_BOX(&embed_panels));
  m.impl("embed_blocks", TORCH_BOX(&embed_blocks));
}
