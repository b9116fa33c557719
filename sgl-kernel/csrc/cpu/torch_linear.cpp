// The operators of linear layers as torch sees them: schemas, argument checks, and who computes which share.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <type_traits>

#include "block_form.h"
#include "linear_cost.h"
#include "ops.h"
#include "pick.h"
#include "record.h"
#include "scratch.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using sgl::up_to;

// A call is cut by its rows where there are many, since each share makes something of its rows first, and by its outputs otherwise.
struct Cut {
  int64_t rows = 1, outputs = 1;

  Cut(int64_t num_rows, int64_t threads, double nanoseconds) {
    if (num_rows >= threads * sgl::kRowsOfShare / 2) {
      rows = up_to((num_rows + sgl::kRowsOfShare - 1) / sgl::kRowsOfShare, threads);
    } else {
      outputs = sgl::shares_worth(threads, nanoseconds);
    }
  }
};

template <typename T, typename Out, typename Kernel>
void run_shares(const sgl::Linear<T, Out>& call, const Tensor& weight, const Kernel& kernel) {
  const double nanoseconds = sgl::linear_nanoseconds(static_cast<double>(weight.numel() * weight.element_size()),
                                                     static_cast<double>(call.rows * call.in * call.outputs));
  sgl::submit([=] {
    const int64_t threads = sgl::threads_worth(torch::stable::get_num_threads(), nanoseconds);
    if (threads == 1) return kernel(call, sgl::scratch_of(sgl::linear_scratch_bytes(call.rows, call.in)), 0, 1);
    const Cut cut(call.rows, threads, nanoseconds);
    sgl::for_shares(threads, cut.rows * cut.outputs, [&](int64_t share) {
      const int64_t part = share / cut.outputs, first = call.rows * part / cut.rows;
      sgl::Linear<T, Out> some = call;
      some.rows = call.rows * (part + 1) / cut.rows - first;
      some.x += first * call.x_stride;
      some.out += first * call.out_stride;
      kernel(some, sgl::scratch_of(sgl::linear_scratch_bytes(some.rows, call.in)), share % cut.outputs, cut.outputs);
    });
  });
}

bool has_whole_rows(const Tensor& x) { return x.size(1) <= 1 || x.stride(1) == 1; }

void check_type(const Tensor& tensor, ScalarType type, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, "linear: ", name, " has another dtype than x");
}

template <typename T, typename Out>
sgl::Linear<T, Out> described(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, Tensor& out) {
  STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 2, "linear: x is [rows, in] and out is [rows, outputs]");
  STD_TORCH_CHECK(out.size(0) == x.size(0), "linear: out has ", out.size(0), " rows, and x has ", x.size(0));
  STD_TORCH_CHECK(has_whole_rows(x) && has_whole_rows(out), "linear: the numbers of a row of x and of out lie side by side");
  STD_TORCH_CHECK(weight.is_contiguous(), "linear: the packed weight is contiguous");
  const T* bias_data = nullptr;
  if (bias.has_value()) {
    check_type(*bias, x.scalar_type(), "bias");
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == out.size(1) && bias->is_contiguous(), "linear: bias is [outputs]");
    bias_data = static_cast<const T*>(bias->const_data_ptr());
  }
  return sgl::Linear<T, Out>{static_cast<const T*>(x.const_data_ptr()),
                        weight.const_data_ptr(),
                        bias_data,
                        static_cast<Out*>(out.mutable_data_ptr()),
                        x.size(0),
                        x.size(1),
                        out.size(1),
                        x.stride(0),
                        out.stride(0)};
}

// Calls run<type of x, type of out>(): out has the type of x, or is float32.
template <typename Run>
void dispatch(const Tensor& x, const Tensor& out, const Run& run) {
  const ScalarType from = x.scalar_type(), to = out.scalar_type();
  STD_TORCH_CHECK(from == ScalarType::Float || from == ScalarType::BFloat16,
                  "linear: float32 and bfloat16 are served, no other dtype");
  STD_TORCH_CHECK(to == from || to == ScalarType::Float, "linear: out has the dtype of x, or is float32");
  if (from == ScalarType::Float) return run.template operator()<float, float>();
  if (to == ScalarType::Float) return run.template operator()<sgl::bf16, float>();
  run.template operator()<sgl::bf16, sgl::bf16>();
}

void linear_packed(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out) {
  check_type(weight, x.scalar_type(), "weight");
  const int64_t step = x.scalar_type() == ScalarType::Float ? 1 : 2;
  STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 2 && weight.numel() == up_to(out.size(1), sgl::kPanel) * up_to(x.size(1), step),
                  "linear_packed: the weight is not packed for x and out; use pack_panels on [outputs, in]");
  if (x.size(0) * out.size(1) == 0) return;
  dispatch(x, out, [&]<typename T, typename Out>() {
    using Kernel = void (*)(const sgl::Linear<T, Out>&, void*, int64_t, int64_t);
    if constexpr (std::is_same_v<T, float>) {
      run_shares(described<T, Out>(x, weight, bias, out), weight, SGL_PICK(Kernel, linear_float));
    } else {
      run_shares(described<T, Out>(x, weight, bias, out), weight, SGL_PICK(Kernel, linear_bf16));
    }
  });
}

void linear_blocks(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, int64_t form_number) {
  const sgl::Blocks form = sgl::block_form("linear_blocks", form_number);
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Byte, "linear_blocks: the packed weight is uint8");
  STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 2 && weight.numel() == up_to(out.size(1), sgl::kGroup) / sgl::kGroup *
                                                                          (up_to(x.size(1), sgl::kBlock) / sgl::kBlock) *
                                                                          sgl::BlockLayout(form).record_bytes(),
                  "linear_blocks: the weight is not packed for x and out; use pack_blocks");
  if (x.size(0) * out.size(1) == 0) return;
  dispatch(x, out, [&]<typename T, typename Out>() {
    using Kernel = void (*)(const sgl::Linear<T, Out>&, sgl::Blocks, void*, int64_t, int64_t);
    const Kernel kernel = SGL_PICK(Kernel, linear_blocks);
    run_shares(described<T, Out>(x, weight, bias, out), weight,
               [=](const sgl::Linear<T, Out>& share, void* scratch, int64_t part, int64_t parts) {
                 kernel(share, form, scratch, part, parts);
               });
  });
}

void linear_int8(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out) {
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Byte, "linear_int8: the packed weight is uint8");
  STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 2 &&
                      weight.numel() == up_to(out.size(1), sgl::kPanel) * (8 + up_to(x.size(1), 4)),
                  "linear_int8: the weight is not packed for x and out; use pack_int8");
  STD_TORCH_CHECK(x.size(1) <= sgl::kMostInt8Inputs, "linear_int8: a sum holds ", sgl::kMostInt8Inputs,
                  " inputs at most, and x has ", x.size(1));
  if (x.size(0) * out.size(1) == 0) return;
  dispatch(x, out, [&]<typename T, typename Out>() {
    using Kernel = void (*)(const sgl::Linear<T, Out>&, void*, int64_t, int64_t);
    run_shares(described<T, Out>(x, weight, bias, out), weight, SGL_PICK(Kernel, linear_int8));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def("linear_packed(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()");
  m.def("linear_blocks(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, int form) -> ()");
  m.def("linear_int8(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("linear_packed", TORCH_BOX(&linear_packed));
  m.impl("linear_blocks", TORCH_BOX(&linear_blocks));
  m.impl("linear_int8", TORCH_BOX(&linear_int8));
}
