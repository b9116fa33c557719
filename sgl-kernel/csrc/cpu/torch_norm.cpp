// The operators of norms as torch sees them, and the module itself. Of the files here only the torch_*.cpp know torch, and only
// through its stable interface.
#include <Python.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <string>

#include "isa.h"
#include "ops.h"
#include "pick.h"
#include "record.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
using AddNorm = void (*)(T*, T*, const T*, int64_t, int64_t, float);

template <typename T>
AddNorm<T> pick_fused_add_rmsnorm() {
  return SGL_PICK(AddNorm<T>, fused_add_rmsnorm);
}

// Runs body(begin, end) over the rows; a number of a row costs one thread so many nanoseconds, roughly.
template <typename Body>
void run_rows(int64_t rows, int64_t numbers_of_row, const Body& body) {
  constexpr double nanoseconds = 0.1;
  sgl::submit([=] {
    sgl::for_rows(torch::stable::get_num_threads(), rows, nanoseconds * static_cast<double>(numbers_of_row), body);
  });
}

template <typename T>
void run_fused_add_rmsnorm(Tensor& input, Tensor& residual, const Tensor& weight, int64_t rows, int64_t hidden, float eps) {
  const AddNorm<T> kernel = pick_fused_add_rmsnorm<T>();
  T* in = static_cast<T*>(input.mutable_data_ptr());
  T* res = static_cast<T*>(residual.mutable_data_ptr());
  const T* w = static_cast<const T*>(weight.const_data_ptr());
  run_rows(rows, hidden, [=](int64_t begin, int64_t end) {
    kernel(in + begin * hidden, res + begin * hidden, w, end - begin, hidden, eps);
  });
}

void fused_add_rmsnorm(Tensor input, Tensor residual, Tensor weight, double eps) {
  STD_TORCH_CHECK(input.dim() == 2, "fused_add_rmsnorm: input is [rows, hidden], got ", input.dim(), " dimensions");
  const int64_t rows = input.size(0);
  const int64_t hidden = input.size(1);
  STD_TORCH_CHECK(residual.dim() == 2 && residual.size(0) == rows && residual.size(1) == hidden,
                  "fused_add_rmsnorm: residual has the shape of input, [", rows, ", ", hidden, "]");
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == hidden, "fused_add_rmsnorm: weight is [", hidden, "]");
  STD_TORCH_CHECK(input.is_contiguous() && residual.is_contiguous() && weight.is_contiguous(),
                  "fused_add_rmsnorm: all tensors are contiguous; call .contiguous() first");
  STD_TORCH_CHECK(residual.scalar_type() == input.scalar_type() && weight.scalar_type() == input.scalar_type(),
                  "fused_add_rmsnorm: input, residual and weight have one dtype");
  STD_TORCH_CHECK(rows * hidden == 0 || input.const_data_ptr() != residual.const_data_ptr(),
                  "fused_add_rmsnorm: input and residual are both written, so they are two tensors");
  if (rows * hidden == 0) return;
  switch (input.scalar_type()) {
    case ScalarType::Float:
      return run_fused_add_rmsnorm<float>(input, residual, weight, rows, hidden, static_cast<float>(eps));
    case ScalarType::BFloat16:
      return run_fused_add_rmsnorm<sgl::bf16>(input, residual, weight, rows, hidden, static_cast<float>(eps));
    default: STD_TORCH_CHECK(false, "fused_add_rmsnorm: float32 and bfloat16 are served, no other dtype");
  }
}

template <typename T>
void run_rmsnorm(const Tensor& input, const Tensor& weight, Tensor& out, float eps) {
  using Kernel = void (*)(const T*, const T*, T*, int64_t, int64_t, float);
  const Kernel kernel = SGL_PICK(Kernel, rmsnorm);
  const int64_t hidden = input.size(1);
  const T* in = static_cast<const T*>(input.const_data_ptr());
  const T* w = static_cast<const T*>(weight.const_data_ptr());
  T* to = static_cast<T*>(out.mutable_data_ptr());
  const int64_t rows = input.size(0);
  run_rows(rows, hidden, [=](int64_t begin, int64_t end) {
    kernel(in + begin * hidden, w, to + begin * hidden, end - begin, hidden, eps);
  });
}

void rmsnorm(Tensor input, Tensor weight, Tensor out, double eps) {
  STD_TORCH_CHECK(input.dim() == 2, "rmsnorm: input is [rows, hidden], got ", input.dim(), " dimensions");
  const int64_t rows = input.size(0), hidden = input.size(1);
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == rows && out.size(1) == hidden,
                  "rmsnorm: out has the shape of input, [", rows, ", ", hidden, "]");
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == hidden, "rmsnorm: weight is [", hidden, "]");
  STD_TORCH_CHECK(input.is_contiguous() && out.is_contiguous() && weight.is_contiguous(),
                  "rmsnorm: all tensors are contiguous; call .contiguous() first");
  STD_TORCH_CHECK(out.scalar_type() == input.scalar_type() && weight.scalar_type() == input.scalar_type(),
                  "rmsnorm: input, weight and out have one dtype");
  if (rows * hidden == 0) return;
  switch (input.scalar_type()) {
    case ScalarType::Float: return run_rmsnorm<float>(input, weight, out, static_cast<float>(eps));
    case ScalarType::BFloat16: return run_rmsnorm<sgl::bf16>(input, weight, out, static_cast<float>(eps));
    default: STD_TORCH_CHECK(false, "rmsnorm: float32 and bfloat16 are served, no other dtype");
  }
}

template <typename T>
void run_rmsnorm_heads(Tensor& x, const Tensor& weight, float eps) {
  using Kernel = void (*)(const T*, const T*, T*, int64_t, int64_t, float);
  const Kernel kernel = SGL_PICK(Kernel, rmsnorm);
  const int64_t rows = x.size(0), heads = x.size(1), dim = x.size(2), stride = x.stride(0);
  const T* w = static_cast<const T*>(weight.const_data_ptr());
  T* at = static_cast<T*>(x.mutable_data_ptr());
  run_rows(rows, heads * dim, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) kernel(at + row * stride, w, at + row * stride, heads, dim, eps);
  });
}

void rmsnorm_heads(Tensor x, Tensor weight, double eps) {
  STD_TORCH_CHECK(x.dim() == 3 && weight.dim() == 1 && weight.size(0) == x.size(2) && weight.is_contiguous(),
                  "rmsnorm_heads: x is [rows, heads, dim] and weight contiguous [dim]");
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "rmsnorm_heads: x and weight have one dtype");
  if (x.numel() == 0) return;
  STD_TORCH_CHECK(x.stride(2) == 1 && x.stride(1) == x.size(2), "rmsnorm_heads: the heads of a row lie side by side");
  switch (x.scalar_type()) {
    case ScalarType::Float: return run_rmsnorm_heads<float>(x, weight, static_cast<float>(eps));
    case ScalarType::BFloat16: return run_rmsnorm_heads<sgl::bf16>(x, weight, static_cast<float>(eps));
    default: STD_TORCH_CHECK(false, "rmsnorm_heads: float32 and bfloat16 are served, no other dtype");
  }
}

std::string isa_level() { return sgl::isa_name(sgl::isa()); }

}  // namespace

STABLE_TORCH_LIBRARY(sgl_kernel, m) {
  m.def("fused_add_rmsnorm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps) -> ()");
  m.def("rmsnorm(Tensor input, Tensor weight, Tensor(a!) out, float eps) -> ()");
  m.def("rmsnorm_heads(Tensor(a!) x, Tensor weight, float eps) -> ()");
  m.def("isa_level() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("fused_add_rmsnorm", TORCH_BOX(&fused_add_rmsnorm));
  m.impl("rmsnorm", TORCH_BOX(&rmsnorm));
  m.impl("rmsnorm_heads", TORCH_BOX(&rmsnorm_heads));
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CompositeExplicitAutograd, m) { m.impl("isa_level", TORCH_BOX(&isa_level)); }

// Importing the module is what registers the operators; it has no names of its own.
extern "C" PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
