// The operators between the products of a layer as torch sees them: schemas and argument checks.
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

// What a number costs one thread, roughly, in nanoseconds.
constexpr double kCosine = 5;
constexpr double kTurned = 0.15;
constexpr double kGated = 0.15;

template <typename Call, typename Kernel>
void run_rows(const Call& call, Kernel kernel, int64_t rows, int64_t numbers_of_row, double nanoseconds_of_number) {
  const double nanoseconds = static_cast<double>(numbers_of_row) * nanoseconds_of_number;
  sgl::submit([=] {
    sgl::for_rows(torch::stable::get_num_threads(), rows, nanoseconds,
                  [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  });
}

// Calls run<type>() for float32 and bfloat16.
template <typename Run>
void dispatch(const Tensor& x, const char* name, const Run& run) {
  if (x.scalar_type() == ScalarType::Float) return run.template operator()<float>();
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, name, ": float32 and bfloat16 are served, no other dtype");
  run.template operator()<sgl::bf16>();
}

template <typename T>
const T* const_data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* data(Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

void rotary_cos_sin(Tensor positions, Tensor frequencies, Tensor cos, Tensor sin) {
  STD_TORCH_CHECK(positions.scalar_type() == ScalarType::Long && positions.dim() == 1 && positions.is_contiguous(),
                  "rotary_cos_sin: positions is contiguous int64 [rows]");
  STD_TORCH_CHECK(frequencies.scalar_type() == ScalarType::Float && frequencies.dim() == 1 && frequencies.is_contiguous(),
                  "rotary_cos_sin: frequencies is contiguous float32 [dim / 2]");
  const int64_t rows = positions.size(0), half = frequencies.size(0);
  for (const Tensor& out : {cos, sin}) {
    STD_TORCH_CHECK(out.is_contiguous() && out.numel() == rows * 2 * half && out.scalar_type() == cos.scalar_type(),
                    "rotary_cos_sin: cos and sin are contiguous [rows, dim] of one dtype");
  }
  if (rows * half == 0) return;
  dispatch(cos, "rotary_cos_sin", [&]<typename T>() {
    using Call = sgl::RotaryAngles<T>;
    using Kernel = void (*)(const Call&, int64_t, int64_t);
    const Call call{const_data<int64_t>(positions), const_data<float>(frequencies), data<T>(cos), data<T>(sin), half};
    run_rows(call, SGL_PICK(Kernel, rotary_cos_sin), rows, half, kCosine);
  });
}

void rotate_heads(Tensor x, Tensor cos, Tensor sin) {
  STD_TORCH_CHECK(x.dim() == 3 && x.size(2) % 2 == 0, "rotate_heads: x is [rows, heads, dim] with an even dim");
  const int64_t rows = x.size(0), heads = x.size(1), dim = x.size(2);
  STD_TORCH_CHECK(rows == 0 || (x.stride(2) == 1 && x.stride(1) == dim), "rotate_heads: the heads of a row lie side by side");
  for (const Tensor& one : {cos, sin}) {
    STD_TORCH_CHECK(one.is_contiguous() && one.numel() == rows * dim && one.scalar_type() == x.scalar_type(),
                    "rotate_heads: cos and sin are contiguous [rows, dim] of the dtype of x");
  }
  if (rows * heads * dim == 0) return;
  dispatch(x, "rotate_heads", [&]<typename T>() {
    using Call = sgl::RotateHeads<T>;
    using Kernel = void (*)(const Call&, int64_t, int64_t);
    const Call call{data<T>(x), const_data<T>(cos), const_data<T>(sin), heads, dim / 2, x.stride(0)};
    run_rows(call, SGL_PICK(Kernel, rotate_heads), rows, heads * dim, kTurned);
  });
}

void silu_and_mul(Tensor x, Tensor out) {
  STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 2 && out.size(0) == x.size(0) && 2 * out.size(1) == x.size(1),
                  "silu_and_mul: x is [rows, gate and up] and out [rows, half of it]");
  STD_TORCH_CHECK(out.is_contiguous() && (x.numel() == 0 || x.stride(1) == 1), "silu_and_mul: out and each row of x are contiguous");
  STD_TORCH_CHECK(out.scalar_type() == x.scalar_type(), "silu_and_mul: x and out have one dtype");
  if (out.numel() == 0) return;
  dispatch(x, "silu_and_mul", [&]<typename T>() {
    using Call = sgl::SiluAndMul<T>;
    using Kernel = void (*)(const Call&, int64_t, int64_t);
    const Call call{const_data<T>(x), data<T>(out), out.size(1), x.stride(0)};
    run_rows(call, SGL_PICK(Kernel, silu_and_mul), x.size(0), out.size(1), kGated);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def("rotary_cos_sin(Tensor positions, Tensor frequencies, Tensor(a!) cos, Tensor(b!) sin) -> ()");
  m.def("rotate_heads(Tensor(a!) x, Tensor cos, Tensor sin) -> ()");
  m.def("silu_and_mul(Tensor x, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("rotary_cos_sin", TORCH_BOX(&rotary_cos_sin));
  m.impl("rotate_heads", TORCH_BOX(&rotate_heads));
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
}
