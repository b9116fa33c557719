// The greedy choice of rows of logits as torch sees it: schema and argument checks.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "ops.h"
#include "pick.h"
#include "record.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr double kNanosecondsOfNumber = 0.1;

void argmax_rows(Tensor x, Tensor ids, Tensor is_finite) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.dim() == 2 && x.size(1) > 0 && x.stride(1) == 1,
                  "argmax_rows: x is float32 [rows, numbers] with a number a row at least, those of a row side by side");
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long && ids.dim() == 1 && ids.is_contiguous() && ids.size(0) == x.size(0),
                  "argmax_rows: ids is contiguous int64 [rows]");
  STD_TORCH_CHECK(is_finite.scalar_type() == ScalarType::Bool && is_finite.dim() == 1 && is_finite.is_contiguous() &&
                      is_finite.size(0) == x.size(0),
                  "argmax_rows: is_finite is contiguous bool [rows]");
  const sgl::ArgmaxRows call{static_cast<const float*>(x.const_data_ptr()), static_cast<int64_t*>(ids.mutable_data_ptr()),
                             static_cast<bool*>(is_finite.mutable_data_ptr()), x.size(1), x.stride(0)};
  using Kernel = void (*)(const sgl::ArgmaxRows&, int64_t, int64_t);
  const Kernel kernel = SGL_PICK(Kernel, argmax_rows);
  const double nanoseconds = kNanosecondsOfNumber * static_cast<double>(x.size(1));
  sgl::submit([=, rows = x.size(0)] {
    sgl::for_rows(torch::stable::get_num_threads(), rows, nanoseconds,
                  [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) { m.def("argmax_rows(Tensor x, Tensor(a!) ids, Tensor(b!) is_finite) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) { m.impl("argmax_rows", TORCH_BOX(&argmax_rows)); }
