// The operators from logits to tokens as torch sees them: schemas and argument checks.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "ops.h"
#include "pick.h"
#include "record.h"
#include "scratch.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What a logit of a row costs.
constexpr double kNanosecondsOfDraw = 0.3, kNanosecondsOfMask = 0.1;

void check_logits(const Tensor& logits, const char* name) {
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.dim() == 2, name, ": logits is float32 [rows, vocab]");
  STD_TORCH_CHECK(logits.size(1) > 0 && logits.size(1) < (int64_t{1} << 31), name, ": vocab is 1 to 2^31 - 1, got ", logits.size(1));
  STD_TORCH_CHECK(logits.size(0) == 0 || logits.size(1) == 1 || logits.stride(1) == 1, name, ": each row of logits is contiguous");
}

// What is asked must be there: rows of the logits, tokens, and room for the best.
void check_asked(const sgl::TopLogprobs& call, int64_t num_rows, int64_t count, int64_t wanted) {
  int64_t end = 0;
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(call.rows[i] >= 0 && call.rows[i] < num_rows, "top_logprobs: rows are 0 to ", num_rows - 1, ", got ", call.rows[i]);
    STD_TORCH_CHECK(call.ends[i] >= end && call.ends[i] <= wanted, "top_logprobs: ends ascend up to ", wanted, ", got ", call.ends[i]);
    STD_TORCH_CHECK(call.counts[i] >= 0 && call.counts[i] <= call.most && call.counts[i] <= call.vocab, "top_logprobs: counts are 0 to ",
                    call.most < call.vocab ? call.most : call.vocab, ", got ", call.counts[i]);
    end = call.ends[i];
  }
  STD_TORCH_CHECK(end == wanted, "top_logprobs: the last end is ", wanted, ", got ", end);
  for (int64_t i = 0; i < wanted; ++i) {
    STD_TORCH_CHECK(call.ids[i] >= 0 && call.ids[i] < call.vocab, "top_logprobs: ids are 0 to ", call.vocab - 1, ", got ", call.ids[i]);
  }
}

bool is_row_of(const Tensor& tensor, ScalarType type, int64_t count) {
  return tensor.scalar_type() == type && tensor.dim() == 1 && tensor.size(0) == count && tensor.is_contiguous();
}

void sample_rows(Tensor logits, std::optional<Tensor> places, Tensor limits, Tensor streams, bool is_masked, Tensor out) {
  check_logits(logits, "sample_rows");
  const int64_t rows = places ? places->size(0) : logits.size(0), num_rows = logits.size(0);
  STD_TORCH_CHECK(!places || is_row_of(*places, ScalarType::Long, rows), "sample_rows: places is contiguous int64 [rows]");
  STD_TORCH_CHECK(limits.scalar_type() == ScalarType::Double && limits.dim() == 2 && limits.size(0) == rows && limits.size(1) == 4 &&
                      limits.is_contiguous(),
                  "sample_rows: limits is contiguous float64 [rows, temperature | top_k | top_p | min_p]");
  for (const Tensor& one : {streams, out}) {
    STD_TORCH_CHECK(one.scalar_type() == ScalarType::Long && one.dim() == 2 && one.size(0) == 2 && one.size(1) == rows && one.is_contiguous(),
                    "sample_rows: streams and out are contiguous int64 [2, rows]");
  }
  if (rows == 0) return;
  using Kernel = void (*)(const sgl::SampleRows&, void*, int64_t, int64_t);
  const Kernel kernel = SGL_PICK(Kernel, sample_rows);
  const auto* seeds = static_cast<const int64_t*>(streams.const_data_ptr());
  auto* results = static_cast<int64_t*>(out.mutable_data_ptr());
  const sgl::SampleRows call{static_cast<const float*>(logits.const_data_ptr()),
                             places ? static_cast<const int64_t*>(places->const_data_ptr()) : nullptr,
                             static_cast<const double*>(limits.const_data_ptr()),
                             seeds,
                             seeds + rows,
                             results,
                             results + rows,
                             logits.size(1),
                             logits.stride(0),
                             is_masked};
  sgl::submit([=] {
    for (int64_t i = 0; call.places != nullptr && i < rows; ++i) {
      STD_TORCH_CHECK(call.places[i] >= 0 && call.places[i] < num_rows, "sample_rows: places are 0 to ", num_rows - 1, ", got ",
                      call.places[i]);
    }
    const double nanoseconds = kNanosecondsOfDraw * static_cast<double>(call.vocab);
    sgl::for_rows(torch::stable::get_num_threads(), rows, nanoseconds, [&](int64_t begin, int64_t end) {
      kernel(call, sgl::scratch_of(sgl::sample_scratch_bytes(call.vocab)), begin, end);
    });
  });
}

void top_logprobs(Tensor logits, Tensor asked, Tensor divisors, Tensor ids, Tensor own, Tensor top, Tensor top_ids) {
  check_logits(logits, "top_logprobs");
  const int64_t count = divisors.size(0), wanted = ids.size(0), most = top.dim() == 2 ? top.size(1) : 0;
  STD_TORCH_CHECK(asked.scalar_type() == ScalarType::Long && asked.dim() == 2 && asked.size(0) == 3 && asked.size(1) == count &&
                      asked.is_contiguous(),
                  "top_logprobs: asked is contiguous int64 [row | end of its ids | count of the best, asked rows]");
  STD_TORCH_CHECK(is_row_of(divisors, ScalarType::Float, count), "top_logprobs: divisors is contiguous float32 [asked rows]");
  STD_TORCH_CHECK(is_row_of(ids, ScalarType::Long, wanted) && is_row_of(own, ScalarType::Float, wanted),
                  "top_logprobs: ids and own are contiguous int64 and float32 [tokens]");
  STD_TORCH_CHECK(top.scalar_type() == ScalarType::Float && top.dim() == 2 && top.size(0) == count && top.is_contiguous() &&
                      top_ids.scalar_type() == ScalarType::Long && top_ids.dim() == 2 && top_ids.size(0) == count &&
                      top_ids.size(1) == most && top_ids.is_contiguous(),
                  "top_logprobs: top and top_ids are contiguous float32 and int64 [asked rows, most]");
  if (count == 0) return;
  using Kernel = void (*)(const sgl::TopLogprobs&, void*, int64_t, int64_t);
  const Kernel kernel = SGL_PICK(Kernel, top_logprobs);
  const auto* numbers = static_cast<const int64_t*>(asked.const_data_ptr());
  const sgl::TopLogprobs call{static_cast<const float*>(logits.const_data_ptr()),
                              numbers,
                              static_cast<const float*>(divisors.const_data_ptr()),
                              static_cast<const int64_t*>(ids.const_data_ptr()),
                              numbers + count,
                              numbers + 2 * count,
                              static_cast<float*>(own.mutable_data_ptr()),
                              static_cast<float*>(top.mutable_data_ptr()),
                              static_cast<int64_t*>(top_ids.mutable_data_ptr()),
                              logits.size(1),
                              logits.stride(0),
                              most};
  const int64_t num_rows = logits.size(0);
  sgl::submit([=] {
    check_asked(call, num_rows, count, wanted);
    const double nanoseconds = kNanosecondsOfDraw * static_cast<double>(call.vocab);
    sgl::for_rows(torch::stable::get_num_threads(), count, nanoseconds, [&](int64_t begin, int64_t end) {
      kernel(call, sgl::scratch_of(sgl::logprob_scratch_bytes(call.vocab)), begin, end);
    });
  });
}

void top_probs(Tensor logits, Tensor ids, Tensor probs) {
  check_logits(logits, "top_probs");
  const int64_t rows = logits.size(0), count = ids.dim() == 2 ? ids.size(1) : 0;
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long && ids.dim() == 2 && ids.size(0) == rows && ids.is_contiguous() &&
                      probs.scalar_type() == ScalarType::Float && probs.dim() == 2 && probs.size(0) == rows &&
                      probs.size(1) == count && probs.is_contiguous(),
                  "top_probs: ids and probs are contiguous int64 and float32 [rows, count]");
  STD_TORCH_CHECK(count <= logits.size(1), "top_probs: ", count, " of ", logits.size(1), " tokens");
  if (rows == 0 || count == 0) return;
  using Kernel = void (*)(const sgl::TopProbs&, void*, int64_t, int64_t);
  const Kernel kernel = SGL_PICK(Kernel, top_probs);
  const sgl::TopProbs call{static_cast<const float*>(logits.const_data_ptr()), static_cast<int64_t*>(ids.mutable_data_ptr()),
                           static_cast<float*>(probs.mutable_data_ptr()), logits.size(1), logits.stride(0), count};
  sgl::submit([=] {
    const double nanoseconds = kNanosecondsOfDraw * static_cast<double>(call.vocab);
    sgl::for_rows(torch::stable::get_num_threads(), rows, nanoseconds, [&](int64_t begin, int64_t end) {
      kernel(call, sgl::scratch_of(sgl::logprob_scratch_bytes(call.vocab)), begin, end);
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
  m.def("sample_rows(Tensor logits, Tensor? places, Tensor limits, Tensor streams, bool is_masked, Tensor(a!) out) -> ()");
  m.def(
      "top_logprobs(Tensor logits, Tensor asked, Tensor divisors, Tensor ids, Tensor(a!) own, Tensor(b!) top, Tensor(c!) top_ids) -> ()");
  m.def("top_probs(Tensor logits, Tensor(a!) ids, Tensor(b!) probs) -> ()");
  m.def("apply_token_bitmask(Tensor(a!) logits, Tensor bitmask, Tensor rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("sample_rows", TORCH_BOX(&sample_rows));
  m.impl("top_logprobs", TORCH_BOX(&top_logprobs));
  m.impl("top_probs", TORCH_BOX(&top_probs));
  m.impl("apply_token_bitmask", TORCH_BOX(&apply_token_bitmask));
}
