// The operator of a mixture of experts as torch sees it: schema, argument checks, and who computes what.
//
// Rows are put in the order of their experts, so that each expert multiplies its rows together, with the kernels of the linear layers.
// A row of those gives the same bits alone and among others, and what its experts gave is added in the order of `topk_ids`: no answer
// depends on the other rows of a batch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstring>

#include "linear_cost.h"
#include "ops.h"
#include "pick.h"
#include "record.h"
#include "scratch.h"
#include "team.h"

namespace {

using sgl::up_to;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Pairs of a row and an expert that are computed together: what lies between the products stays in tens of megabytes.
constexpr int64_t kMostPairs = 4096;
// What a number costs one thread, roughly, in nanoseconds.
constexpr double kMoved = 0.1, kGated = 0.15, kCombined = 0.1;

template <typename T, typename Out>
using LinearKernel = void (*)(const sgl::Linear<T, Out>&, void*, int64_t, int64_t);

template <typename T>
struct Experts {
  const T* x;              // [rows, in], rows `x_stride` apart
  const char* gate_up;     // of each expert a packed weight [2 * inner, in], `gate_up_bytes` long
  const char* down;        // of each expert a packed weight [outputs, inner], `down_bytes` long
  const float* weights;    // [rows, top]
  const int64_t* ids;      // [rows, top], -1 for none
  T* out;                  // [rows, outputs], rows `out_stride` apart
  int64_t rows, in, inner, outputs, experts, top, x_stride, out_stride, gate_up_bytes, down_bytes;
  LinearKernel<T, T> multiply_gate_up;
  LinearKernel<T, float> multiply_down;
  void (*gate)(const sgl::SiluAndMul<T>&, int64_t, int64_t);
  void (*combine)(const sgl::CombineExperts<T>&, int64_t, int64_t);
};

// Some rows of one expert.
struct Task {
  int64_t expert, first, rows;
};

// Where some rows and their experts lie: everything that a call needs between x and out, in one piece of memory.
template <typename T>
struct Sorted {
  int64_t* firsts;  // [experts + 1]: where the pairs of an expert begin
  int64_t* places;  // [rows, top]: the place of a pair among all, or -1
  Task* tasks;
  T* h;       // [pairs, 2 * inner]
  T* gated;   // [pairs, inner]
  T* x;       // [pairs, in]; no longer read when y is written
  float* y;   // [pairs, outputs], where x lies
  int64_t pairs = 0, num_tasks = 0, active = 0;

  Sorted(const Experts<T>& call, int64_t rows) {
    const int64_t most = rows * call.top, size = static_cast<int64_t>(sizeof(T));
    const int64_t words = (call.experts + 1 + most) * 8, tasks_bytes = (call.experts + most / sgl::kRowsOfShare) * sizeof(Task);
    const int64_t of_x = call.in * size, of_y = call.outputs * 4;
    const int64_t sizes[] = {words, tasks_bytes, most * 2 * call.inner * size, most * call.inner * size, most * (of_x > of_y ? of_x : of_y)};
    int64_t all = 0;
    for (int64_t bytes : sizes) all += up_to(bytes, 64);
    char* at = static_cast<char*>(sgl::scratch_of<sgl::Scratch::of_call>(all));
    const auto take = [&](int64_t bytes) {
      char* taken = at;
      at += up_to(bytes, 64);
      return taken;
    };
    firsts = reinterpret_cast<int64_t*>(take(sizes[0]));
    places = firsts + call.experts + 1;
    tasks = reinterpret_cast<Task*>(take(sizes[1]));
    h = reinterpret_cast<T*>(take(sizes[2]));
    gated = reinterpret_cast<T*>(take(sizes[3]));
    x = reinterpret_cast<T*>(take(sizes[4]));
    y = reinterpret_cast<float*>(x);
  }

  // Counts the pairs of each expert, and gives each pair its place behind those of earlier experts and earlier rows.
  void order(const Experts<T>& call, const int64_t* ids, int64_t count) {
    std::memset(firsts, 0, (call.experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < count; ++i) {
      STD_TORCH_CHECK(ids[i] >= -1 && ids[i] < call.experts, "fused_experts: topk_ids are -1 to ", call.experts - 1, ", got ", ids[i]);
      if (ids[i] >= 0) ++firsts[ids[i] + 1];
    }
    for (int64_t e = 0; e < call.experts; ++e) {
      const int64_t first = firsts[e], end = first + firsts[e + 1];
      active += end > first;
      for (int64_t at = first; at < end; at += sgl::kRowsOfShare) {
        const int64_t left = end - at;
        tasks[num_tasks++] = {e, at, left < sgl::kRowsOfShare ? left : sgl::kRowsOfShare};
      }
      firsts[e + 1] = end;
    }
    pairs = firsts[call.experts];
    for (int64_t i = 0; i < count; ++i) places[i] = ids[i] < 0 ? -1 : firsts[ids[i]]++;
  }
};

// The rows of each expert times its own weight.
template <typename T, typename From, typename Out>
void multiply(const Sorted<T>& sorted, LinearKernel<From, Out> kernel, const From* x, int64_t in, const char* weights, int64_t bytes,
              Out* out, int64_t outputs) {
  const double nanoseconds = sgl::linear_nanoseconds(static_cast<double>(sorted.active * bytes),
                                                     static_cast<double>(sorted.pairs * in * outputs));
  const int64_t threads = sgl::threads_worth(torch::stable::get_num_threads(), nanoseconds);
  const int64_t wanted = threads == 1 ? 1 : sgl::shares_worth(threads, nanoseconds);
  const int64_t parts = (wanted + sorted.num_tasks - 1) / sorted.num_tasks;
  sgl::for_shares(threads, sorted.num_tasks * parts, [&](int64_t share) {
    const Task& task = sorted.tasks[share / parts];
    const sgl::Linear<From, Out> some{x + task.first * in, weights + task.expert * bytes, nullptr, out + task.first * outputs,
                                      task.rows, in, outputs, in, outputs};
    kernel(some, sgl::scratch_of(sgl::linear_scratch_bytes(task.rows, in)), share % parts, parts);
  });
}

template <typename T>
void compute(const Experts<T>& call, int64_t first, int64_t rows) {
  const int64_t count = rows * call.top, threads = torch::stable::get_num_threads();
  Sorted<T> sorted(call, rows);
  sorted.order(call, call.ids + first * call.top, count);
  if (sorted.pairs > 0) {
    sgl::for_rows(threads, rows, static_cast<double>(call.top * call.in) * kMoved, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin * call.top; i < end * call.top; ++i) {
        if (sorted.places[i] < 0) continue;
        std::memcpy(sorted.x + sorted.places[i] * call.in, call.x + (first + i / call.top) * call.x_stride, call.in * sizeof(T));
      }
    });
    multiply<T>(sorted, call.multiply_gate_up, sorted.x, call.in, call.gate_up, call.gate_up_bytes, sorted.h, 2 * call.inner);
    const sgl::SiluAndMul<T> gate{sorted.h, sorted.gated, call.inner, 2 * call.inner};
    sgl::for_rows(threads, sorted.pairs, static_cast<double>(call.inner) * kGated,
                  [&](int64_t begin, int64_t end) { call.gate(gate, begin, end); });
    multiply<T>(sorted, call.multiply_down, sorted.gated, call.inner, call.down, call.down_bytes, sorted.y, call.outputs);
  }
  const sgl::CombineExperts<T> combine{sorted.y, sorted.places, call.weights + first * call.top, call.out + first * call.out_stride,
                                       call.top, call.outputs, call.out_stride};
  sgl::for_rows(threads, rows, static_cast<double>(call.top * call.outputs) * kCombined,
                [&](int64_t begin, int64_t end) { call.combine(combine, begin, end); });
}

// Numbers or bytes of the packed weight of one expert.
int64_t packed_size(ScalarType type, int64_t outputs, int64_t in) {
  const int64_t panels = up_to(outputs, sgl::kPanel);
  if (type == ScalarType::Byte) return panels * (8 + up_to(in, 4));
  return panels * up_to(in, type == ScalarType::Float ? 1 : 2);
}

void check(const Tensor& x, const Tensor& gate_up, const Tensor& down, int64_t inner, const Tensor& weights, const Tensor& ids,
           const Tensor& out) {
  const ScalarType type = x.scalar_type(), packed = gate_up.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16,
                  "fused_experts: float32 and bfloat16 are served, no other dtype");
  STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 2 && out.size(0) == x.size(0) && out.scalar_type() == type,
                  "fused_experts: x is [rows, in] and out [rows, outputs] of its dtype");
  STD_TORCH_CHECK((x.numel() == 0 || x.stride(1) == 1) && (out.numel() == 0 || out.stride(1) == 1),
                  "fused_experts: the numbers of a row of x and of out lie side by side");
  STD_TORCH_CHECK(down.scalar_type() == packed && (packed == type || packed == ScalarType::Byte),
                  "fused_experts: the packed weights have the dtype of x, or are uint8 (int8 weights)");
  STD_TORCH_CHECK(gate_up.dim() > 0 && down.dim() > 0 && gate_up.is_contiguous() && down.is_contiguous() &&
                      gate_up.size(0) == down.size(0),
                  "fused_experts: gate_up and down hold the packed weights of the same experts, one behind another");
  STD_TORCH_CHECK(inner >= 1 && gate_up.numel() == gate_up.size(0) * packed_size(packed, 2 * inner, x.size(1)) &&
                      down.numel() == down.size(0) * packed_size(packed, out.size(1), inner),
                  "fused_experts: the weights are not packed for x, intermediate_size ", inner, " and out; use pack_experts");
  STD_TORCH_CHECK(packed != ScalarType::Byte || (x.size(1) <= sgl::kMostInt8Inputs && inner <= sgl::kMostInt8Inputs),
                  "fused_experts: a sum of int8 products holds ", sgl::kMostInt8Inputs, " inputs at most");
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long && weights.scalar_type() == ScalarType::Float && ids.dim() == 2 &&
                      weights.dim() == 2 && ids.size(0) == x.size(0) && weights.size(0) == x.size(0) && ids.size(1) >= 1 &&
                      weights.size(1) == ids.size(1) && ids.is_contiguous() && weights.is_contiguous(),
                  "fused_experts: topk_weights is contiguous float32 [rows, top], and topk_ids int64 of that shape");
}

template <typename T>
void run(const Experts<T>& call) {
  sgl::submit([=] {
    const int64_t at_once = kMostPairs / call.top > 1 ? kMostPairs / call.top : 1;
    for (int64_t first = 0; first < call.rows; first += at_once) {
      compute(call, first, call.rows - first < at_once ? call.rows - first : at_once);
    }
  });
}

void fused_experts(Tensor x, Tensor gate_up, Tensor down, int64_t intermediate_size, Tensor topk_weights, Tensor topk_ids, Tensor out) {
  check(x, gate_up, down, intermediate_size, topk_weights, topk_ids, out);
  if (out.numel() == 0) return;
  const bool is_int8 = gate_up.scalar_type() == ScalarType::Byte;
  const auto described = [&]<typename T>(LinearKernel<T, T> multiply_gate_up, LinearKernel<T, float> multiply_down) {
    using Gate = void (*)(const sgl::SiluAndMul<T>&, int64_t, int64_t);
    using Combine = void (*)(const sgl::CombineExperts<T>&, int64_t, int64_t);
    const int64_t experts = gate_up.size(0), each = experts > 0 ? experts : 1;
    run(Experts<T>{static_cast<const T*>(x.const_data_ptr()),
                   static_cast<const char*>(gate_up.const_data_ptr()),
                   static_cast<const char*>(down.const_data_ptr()),
                   static_cast<const float*>(topk_weights.const_data_ptr()),
                   static_cast<const int64_t*>(topk_ids.const_data_ptr()),
                   static_cast<T*>(out.mutable_data_ptr()),
                   x.size(0), x.size(1), intermediate_size, out.size(1), experts, topk_ids.size(1), x.stride(0), out.stride(0),
                   gate_up.numel() / each * static_cast<int64_t>(gate_up.element_size()),
                   down.numel() / each * static_cast<int64_t>(down.element_size()),
                   multiply_gate_up, multiply_down, SGL_PICK(Gate, silu_and_mul), SGL_PICK(Combine, combine_experts)});
  };
  using Float = LinearKernel<float, float>;
  using Bf16 = LinearKernel<sgl::bf16, sgl::bf16>;
  using Widened = LinearKernel<sgl::bf16, float>;
  if (x.scalar_type() == ScalarType::Float) {
    const Float kernel = is_int8 ? SGL_PICK(Float, linear_int8) : SGL_PICK(Float, linear_float);
    described.template operator()<float>(kernel, kernel);
  } else if (is_int8) {
    described.template operator()<sgl::bf16>(SGL_PICK(Bf16, linear_int8), SGL_PICK(Widened, linear_int8));
  } else {
    described.template operator()<sgl::bf16>(SGL_PICK(Bf16, linear_bf16), SGL_PICK(Widened, linear_bf16));
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def(
      "fused_experts(Tensor x, Tensor gate_up, Tensor down, int intermediate_size, Tensor topk_weights, Tensor topk_ids, "
      "Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) { m.impl("fused_experts", TORCH_BOX(&fused_experts)); }
