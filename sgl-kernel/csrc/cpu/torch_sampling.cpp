// The operators from logits to tokens as torch sees them: schemas and argument checks.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "ops.h"
#include "pick.h"
#include "record.h"
#include "scratch.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What a logit of a row costs.
constexpr double kNanosecondsOfDraw = 1.0, kNanosecondsOfMask = 0.1;

void check_logits(const Tensor& logits, const char* name) {
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.dim() == 2, name, ": logits is float32 [rows, vocab]");
  STD_TORCH_CHECK(logits.size(1) > 0 && logits.size(1) < (int64_t{1} << 31), name, ": vocab is 1 to 2^31 - 1, got ", logits.size(1));
  STD_TORCH_CHECK(logits.size(0) == 0 || logits.size(1) == 1 || logits.stride(1) == 1, name, ": each row of logits is contiguous");
}

bool is_row_of(const Tensor& tensor, ScalarType type, int64_t count) {
  return tensor.scalar_type() == type && tensor.dim() == 1 && tensor.size(0) == count && tensor.is_contiguous();
}

void draw_tokens(Tensor logits, Tensor limits, Tensor seeds, Tensor positions, Tensor ids) {
  check_logits(logits, "draw_tokens");
  const int64_t rows = logits.size(0);
  STD_TORCH_CHECK(limits.scalar_type() == ScalarType::Double && limits.dim() == 2 && limits.size(0) == rows && limits.size(1) == 4 &&
                      limits.is_contiguous(),
                  "draw_tokens: limits is contiguous float64 [rows, temperature | top_k | top_p | min_p]");
  for (const Tensor& one : {seeds, positions, ids}) {
    STD_TORCH_CHECK(is_row_of(one, ScalarType::Long, rows), "draw_tokens: seeds, positions and ids are contiguous int64 [rows]");
  }
  if (rows == 0) return;
  using Kernel = void (*)(const sgl::DrawTokens&, void*, int64_t, int64_t);
  const Kernel kernel = SGL_PICK(Kernel, draw_tokens);
  const sgl::DrawTokens call{static_cast<const float*>(logits.const_data_ptr()),
                             static_cast<const double*>(limits.const_data_ptr()),
                             static_cast<const int64_t*>(seeds.const_data_ptr()),
                             static_cast<const int64_t*>(positions.const_data_ptr()),
                             static_cast<int64_t*>(ids.mutable_data_ptr()),
                             logits.size(1),
                             logits.stride(0)};
  sgl::submit([=] {
    const double nanoseconds = kNanosecondsOfDraw * static_cast<double>(call.vocab);
    sgl::for_rows(torch::stable::get_num_threads(), rows, nanoseconds, [&](int64_t begin, int64_t end) {
      kernel(call, sgl::scratch_of(sgl::draw_scratch_bytes(call.vocab)), begin, end);
    });
  });
}

void apply_token_bitmask(Tensor logits, Tensor bitmask, Tensor rows) {
  check_logits(logits, "apply_token_bitmask");
  const int64_t count = rows.size(0), words = bitmask.dim() == 2 ? bitmask.size(1) : 0;
  STD_TORCH_CHECK(is_row_of(rows, ScalarType::Long, count), "apply_token_bitmask: rows is contiguous int64 [masked rows]");
  STD_TORCH_CHECK(bitmask.scalar_type() == ScalarType::Int && bitmask.dim() == 2 && bitmask.size(0) == count && bitmask.is_contiguous(),
                  "apply_token_bitmask: bitmask is contiguous int32 [masked rows, words]");
  STD_TORCH_CHECK(words * 32 >= logits.size(1), "apply_token_bitmask: ", words, " words hold no bit for each of ", logits.size(1),
                  " tokens");
  if (count == 0) return;
  using Kernel = void (*)(const sgl::TokenBitmask&, int64_t, int64_t);
  const Kernel kernel = SGL_PICK(Kernel, apply_token_bitmask);
  const sgl::TokenBitmask call{static_cast<float*>(logits.mutable_data_ptr()),
                               static_cast<const int32_t*>(bitmask.const_data_ptr()),
                               static_cast<const int64_t*>(rows.const_data_ptr()),
                               logits.size(1),
                               words,
                               logits.stride(0)};
  const int64_t num_rows = logits.size(0);
  sgl::submit([=] {
    for (int64_t i = 0; i < count; ++i) {
      STD_TORCH_CHECK(call.rows[i] >= 0 && call.rows[i] < num_rows, "apply_token_bitmask: rows are 0 to ", num_rows - 1, ", got ",
                      call.rows[i]);
    }
    const double nanoseconds = kNanosecondsOfMask * static_cast<double>(call.vocab);
    sgl::for_rows(torch::stable::get_num_threads(), count, nanoseconds,
                  [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def("draw_tokens(Tensor logits, Tensor limits, Tensor seeds, Tensor positions, Tensor(a!) ids) -> ()");
  m.def("apply_token_bitmask(Tensor(a!) logits, Tensor bitmask, Tensor rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("draw_tokens", TORCH_BOX(&draw_tokens));
  m.impl("apply_token_bitmask", TORCH_BOX(&apply_token_bitmask));
}
