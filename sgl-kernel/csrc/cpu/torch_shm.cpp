// The operators of collectives over shared memory as torch sees them: schemas and argument checks.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <vector>

#include "record.h"
#include "shm.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using sgl::Number;

Number number_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Bool: return Number::boolean;
    case ScalarType::Byte: return Number::uint8;
    case ScalarType::Char: return Number::int8;
    case ScalarType::Short: return Number::int16;
    case ScalarType::Int: return Number::int32;
    case ScalarType::Long: return Number::int64;
    case ScalarType::Half: return Number::float16;
    case ScalarType::BFloat16: return Number::bfloat16;
    case ScalarType::Float: return Number::float32;
    case ScalarType::Double: return Number::float64;
    default: return Number::bytes;
  }
}

// What `shm_attach` gave, as the number that Python keeps.
sgl::ShmGroup* group_of(int64_t handle) {
  STD_TORCH_CHECK(handle != 0, "shared memory: this group was closed");
  return reinterpret_cast<sgl::ShmGroup*>(handle);
}

sgl::Reduce reduce_of(int64_t op, Number number, const char* name) {
  STD_TORCH_CHECK(number != Number::bytes, name, ": integers, bool and floats of 16 to 64 bits are reduced, no other dtype");
  STD_TORCH_CHECK(op >= 0 && op <= 2, name, ": op is 0 (sum), 1 (max) or 2 (min), got ", op);
  return static_cast<sgl::Reduce>(op);
}

// Numbers of each rank, from its rows. `rows` is the tensor that holds all of them, `own` the one with those of this rank.
std::vector<int64_t> counts_of(int64_t handle, const Tensor& rows, const Tensor& own, const std::vector<int64_t>& sizes,
                               const char* name) {
  const sgl::ShmGroup* group = group_of(handle);
  STD_TORCH_CHECK(rows.is_contiguous() && own.is_contiguous(), name, ": both tensors are contiguous; call .contiguous() first");
  STD_TORCH_CHECK(rows.scalar_type() == own.scalar_type(), name, ": both tensors have one dtype");
  STD_TORCH_CHECK(rows.dim() >= 1 && rows.dim() == own.dim(), name, ": rows are dim 0 of both tensors");
  STD_TORCH_CHECK(static_cast<int64_t>(sizes.size()) == sgl::shm_world_size(group), name, ": sizes has an entry a rank, ",
                  sgl::shm_world_size(group));
  int64_t width = 1, total = 0;
  for (int64_t dim = 1; dim < rows.dim(); ++dim) {
    STD_TORCH_CHECK(rows.size(dim) == own.size(dim), name, ": rows have one shape in both tensors");
    width *= rows.size(dim);
  }
  std::vector<int64_t> counts;
  for (int64_t size : sizes) {
    STD_TORCH_CHECK(size >= 0, name, ": sizes are not negative, got ", size);
    total += size;
    counts.push_back(size * width);
  }
  const int64_t mine = sizes[static_cast<size_t>(sgl::shm_rank(group))];
  STD_TORCH_CHECK(rows.size(0) == total && own.size(0) == mine, name, ": sizes say ", total, " rows, ", mine,
                  " of this rank, and the tensors have ", rows.size(0), " and ", own.size(0));
  return counts;
}

int64_t shm_attach(int64_t fd, int64_t rank, std::vector<int64_t> names, int64_t part_bytes, int64_t cookie, double timeout_s) {
  const int64_t world_size = static_cast<int64_t>(names.size());
  STD_TORCH_CHECK(world_size >= 1 && world_size <= sgl::kMostShmRanks && rank >= 0 && rank < world_size,
                  "shm_attach: 1 to ", sgl::kMostShmRanks, " ranks, got rank ", rank, " of ", world_size);
  STD_TORCH_CHECK(part_bytes >= 64 * sgl::kMostShmRanks && part_bytes % 64 == 0,
                  "shm_attach: part_bytes is a multiple of 64, at least ", 64 * sgl::kMostShmRanks, ", got ", part_bytes);
  STD_TORCH_CHECK(timeout_s > 0, "shm_attach: timeout_s is positive, got ", timeout_s);
  return reinterpret_cast<int64_t>(
      sgl::shm_attach(static_cast<int>(fd), rank, names, part_bytes, static_cast<uint64_t>(cookie), timeout_s));
}

void shm_detach(int64_t group) { sgl::shm_detach(group_of(group)); }

int64_t shm_segment_bytes(int64_t world_size, int64_t part_bytes) { return sgl::shm_segment_bytes(world_size, part_bytes); }

void shm_all_reduce(int64_t group, Tensor input, Tensor out, int64_t op) {
  STD_TORCH_CHECK(input.is_contiguous() && out.is_contiguous(),
                  "shm_all_reduce: both tensors are contiguous; call .contiguous() first");
  STD_TORCH_CHECK(input.scalar_type() == out.scalar_type() && input.numel() == out.numel(),
                  "shm_all_reduce: out has the dtype and the size of input");
  const Number number = number_of(input);
  const sgl::ShmAllReduce call{group_of(group),  input.const_data_ptr(), out.mutable_data_ptr(),
                               input.numel(), number,                 reduce_of(op, number, "shm_all_reduce")};
  sgl::submit([=] { sgl::shm_all_reduce(call); });
}

void shm_all_gather(int64_t group, Tensor input, std::vector<int64_t> sizes, Tensor out) {
  sgl::ShmAllGather call{group_of(group), input.const_data_ptr(), out.mutable_data_ptr(), nullptr,
                         static_cast<int64_t>(input.element_size()), number_of(input)};
  sgl::submit([call, counts = counts_of(group, out, input, sizes, "shm_all_gather")]() mutable {
    call.counts = counts.data();
    sgl::shm_all_gather(call);
  });
}

void shm_reduce_scatter(int64_t group, Tensor input, std::vector<int64_t> sizes, Tensor out, int64_t op) {
  const Number number = number_of(input);
  sgl::ShmReduceScatter call{group_of(group), input.const_data_ptr(), out.mutable_data_ptr(), nullptr, number,
                             reduce_of(op, number, "shm_reduce_scatter")};
  sgl::submit([call, counts = counts_of(group, input, out, sizes, "shm_reduce_scatter")]() mutable {
    call.counts = counts.data();
    sgl::shm_reduce_scatter(call);
  });
}

void shm_broadcast(int64_t group, Tensor tensor, int64_t src) {
  STD_TORCH_CHECK(tensor.is_contiguous(), "shm_broadcast: the tensor is contiguous; call .contiguous() first");
  STD_TORCH_CHECK(src >= 0 && src < sgl::shm_world_size(group_of(group)), "shm_broadcast: src is a rank of the group, got ", src);
  const sgl::ShmBroadcast call{group_of(group), tensor.mutable_data_ptr(),
                               tensor.numel() * static_cast<int64_t>(tensor.element_size()), src, number_of(tensor)};
  sgl::submit([=] { sgl::shm_broadcast(call); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def("shm_attach(int fd, int rank, int[] names, int part_bytes, int cookie, float timeout_s) -> int");
  m.def("shm_detach(int group) -> ()");
  m.def("shm_segment_bytes(int world_size, int part_bytes) -> int");
  m.def("shm_all_reduce(int group, Tensor input, Tensor(a!) out, int op) -> ()");
  m.def("shm_all_gather(int group, Tensor input, int[] sizes, Tensor(a!) out) -> ()");
  m.def("shm_reduce_scatter(int group, Tensor input, int[] sizes, Tensor(a!) out, int op) -> ()");
  m.def("shm_broadcast(int group, Tensor(a!) tensor, int src) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("shm_all_reduce", TORCH_BOX(&shm_all_reduce));
  m.impl("shm_all_gather", TORCH_BOX(&shm_all_gather));
  m.impl("shm_reduce_scatter", TORCH_BOX(&shm_reduce_scatter));
  m.impl("shm_broadcast", TORCH_BOX(&shm_broadcast));
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CompositeExplicitAutograd, m) {
  m.impl("shm_attach", TORCH_BOX(&shm_attach));
  m.impl("shm_detach", TORCH_BOX(&shm_detach));
  m.impl("shm_segment_bytes", TORCH_BOX(&shm_segment_bytes));
}
