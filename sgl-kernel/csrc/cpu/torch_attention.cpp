// The operators of attention as torch sees them: schema, argument checks, and who computes which share.
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

// Products that one thread makes in a nanosecond, and bytes that it copies, roughly.
constexpr double kProductsANanosecond = 50;
constexpr double kBytesANanosecond = 10;
// A share is short enough that a late thread holds nobody long.
constexpr double kNanosecondsOfShare = 10e3;

const int64_t* numbers_of(const Tensor& tensor, const char* name, int64_t dims) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous() && tensor.dim() == dims,
                  "attention: ", name, " is contiguous int64 with ", dims, " dimensions");
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

// What the kernel would read outside of its arguments is refused, at each run of a recorded call too; the table's slots are the
// caller's word.
template <typename T>
void check_requests(const sgl::PagedAttention<T>& call, int64_t rows, int64_t table_size) {
  STD_TORCH_CHECK(call.first_rows[0] == 0 && call.first_rows[call.requests] == rows,
                  "paged_attention: first_rows goes from 0 to the ", rows, " rows of q");
  for (int64_t b = 0; b < call.requests; ++b) {
    const int64_t own = call.first_rows[b + 1] - call.first_rows[b];
    STD_TORCH_CHECK(own >= 0 && call.lengths[b] >= own && call.lengths[b] <= call.table_stride,
                    "paged_attention: request ", b, " has ", own, " rows and ", call.lengths[b], " keys, and the table ",
                    call.table_stride, " places");
    STD_TORCH_CHECK(call.table_rows[b] >= 0 && call.table_rows[b] < table_size, "paged_attention: request ", b, " has row ",
                    call.table_rows[b], " of a table of ", table_size);
    STD_TORCH_CHECK(call.tail_mask == nullptr || (own == call.width && call.lengths[b] >= call.tail),
                    "paged_attention: request ", b, " has other rows than the mask, or fewer keys than its tail");
  }
}

template <typename T>
void attend(const sgl::PagedAttention<T>& call) {
  int64_t products = 0, most_keys = 0;
  for (int64_t b = 0; b < call.requests; ++b) {
    most_keys = call.lengths[b] > most_keys ? call.lengths[b] : most_keys;
    products += 2 * (call.first_rows[b + 1] - call.first_rows[b]) * call.lengths[b] * call.heads * call.dim;
  }
  using Kernel = void (*)(const sgl::PagedAttention<T>&, void*, int64_t, int64_t);
  const Kernel kernel = SGL_PICK(Kernel, paged_attention);
  const int64_t bytes = sgl::attention_scratch_bytes(most_keys, call.heads / call.kv_heads);
  const double nanoseconds = static_cast<double>(products) / kProductsANanosecond;
  const int64_t threads = sgl::threads_worth(torch::stable::get_num_threads(), nanoseconds);
  if (threads == 1) return kernel(call, sgl::scratch_of(bytes), 0, 1);
  const int64_t wanted = static_cast<int64_t>(nanoseconds / kNanosecondsOfShare);
  const int64_t shares = wanted < threads ? threads : wanted < 8 * threads ? wanted : 8 * threads;
  sgl::for_shares(threads, shares, [&](int64_t share) { kernel(call, sgl::scratch_of(bytes), share, shares); });
}

template <typename T>
void run(const Tensor& q, const Tensor& kv, const Tensor& table, const Tensor& table_rows, const Tensor& first_rows,
         const Tensor& lengths, const std::optional<Tensor>& tail_mask, Tensor& out, double scale) {
  sgl::PagedAttention<T> call{};
  call.q = static_cast<const T*>(q.const_data_ptr());
  call.kv = static_cast<const T*>(kv.const_data_ptr());
  call.table = numbers_of(table, "table", 2);
  call.table_rows = numbers_of(table_rows, "table_rows", 1);
  call.first_rows = numbers_of(first_rows, "first_rows", 1);
  call.lengths = numbers_of(lengths, "lengths", 1);
  call.out = static_cast<T*>(out.mutable_data_ptr());
  call.requests = lengths.size(0);
  call.heads = q.size(1);
  call.kv_heads = kv.size(0) / 2;
  call.dim = q.size(2);
  call.blocks = kv.size(1);
  call.padded_dim = kv.size(2) / sgl::kBlockSlots;
  call.table_stride = table.size(1);
  call.q_stride = q.stride(0);
  call.scale = static_cast<float>(scale);
  STD_TORCH_CHECK(table_rows.size(0) == call.requests && first_rows.size(0) == call.requests + 1,
                  "paged_attention: table_rows has an entry a request, first_rows one more");
  if (tail_mask.has_value()) {
    STD_TORCH_CHECK(tail_mask->scalar_type() == ScalarType::Bool && tail_mask->dim() == 3 && tail_mask->is_contiguous() &&
                        tail_mask->size(0) == call.requests && tail_mask->size(0) * tail_mask->size(1) == q.size(0),
                    "paged_attention: tail_mask is contiguous bool [requests, rows of each, tail]");
    call.tail_mask = static_cast<const bool*>(tail_mask->const_data_ptr());
    call.width = tail_mask->size(1);
    call.tail = tail_mask->size(2);
  }
  sgl::submit([call, rows = q.size(0), table_size = table.size(0)] {
    check_requests(call, rows, table_size);
    attend(call);
  });
}

// A cache of `heads` kv heads of `dim` numbers, as KvBlock says.
void check_cache(const Tensor& kv, int64_t dim, const char* name) {
  STD_TORCH_CHECK(kv.dim() == 3 && kv.is_contiguous() && kv.size(0) > 0 && kv.size(0) % 2 == 0 &&
                      kv.size(2) == (dim + 15) / 16 * 16 * sgl::kBlockSlots,
                  name, ": kv is contiguous [2 * kv heads, blocks, 16 * dim], dim rounded up to 16");
}

template <typename T>
void store_rows(const T* k, const T* v, int64_t k_stride, int64_t v_stride, T* kv, const int64_t* slots, int64_t rows, int64_t heads,
                int64_t dim, int64_t padded_dim, int64_t blocks) {
  using Block = sgl::KvBlock<T>;
  const int64_t size = sgl::kBlockSlots * padded_dim;
  for (int64_t row = 0; row < rows; ++row) {
    STD_TORCH_CHECK(slots[row] >= 0 && slots[row] < blocks * sgl::kBlockSlots, "store_kv: slot ", slots[row], " of ",
                    blocks * sgl::kBlockSlots);
    const int64_t block = slots[row] / sgl::kBlockSlots, slot = slots[row] % sgl::kBlockSlots;
    for (int64_t head = 0; head < heads; ++head) {
      const T *key = k + row * k_stride + head * dim, *value = v + row * v_stride + head * dim;
      T* keys = kv + (head * blocks + block) * size + Block::key_place(slot, 0);
      T* values = kv + ((heads + head) * blocks + block) * size + Block::value_place(slot, 0, padded_dim);
      for (int64_t d = 0; d < padded_dim; d += Block::together) {  // behind the last dimension zeros
        for (int64_t i = 0; i < Block::together; ++i) {
          keys[Block::key_place(0, d) + i] = d + i < dim ? key[d + i] : T{};
          values[(d + i) * Block::together] = d + i < dim ? value[d + i] : T{};
        }
      }
    }
  }
}

// The new keys and values of each row go to its slot; nothing is computed, so 16 and 32 bits are all that matters.
void store_kv(Tensor k, Tensor v, Tensor kv, Tensor slots) {
  STD_TORCH_CHECK(k.dim() == 3 && v.dim() == 3 && v.size(0) == k.size(0) && v.size(1) == k.size(1) && v.size(2) == k.size(2),
                  "store_kv: k and v are [rows, kv heads, dim]");
  check_cache(kv, k.size(2), "store_kv");
  STD_TORCH_CHECK(kv.size(0) == 2 * k.size(1), "store_kv: kv has planes of keys and of values of each kv head");
  STD_TORCH_CHECK(k.scalar_type() == kv.scalar_type() && v.scalar_type() == kv.scalar_type() &&
                      (k.element_size() == 2 || k.element_size() == 4),
                  "store_kv: k, v and kv have one dtype, of 16 or 32 bits");
  const int64_t dim = k.size(2), rows = k.size(0), heads = k.size(1), blocks = kv.size(1);
  const int64_t padded_dim = kv.size(2) / sgl::kBlockSlots, k_stride = k.stride(0), v_stride = v.stride(0);
  STD_TORCH_CHECK(rows == 0 || (k.stride(2) == 1 && v.stride(2) == 1 && k.stride(1) == dim && v.stride(1) == dim),
                  "store_kv: the heads of a row of k and of v lie side by side");
  const int64_t* numbers = numbers_of(slots, "slots", 1);
  STD_TORCH_CHECK(slots.size(0) == rows, "store_kv: slots has an entry a row");
  const bool narrow = k.element_size() == 2;
  const void *key = k.const_data_ptr(), *value = v.const_data_ptr();
  void* cache = kv.mutable_data_ptr();
  const double nanoseconds = static_cast<double>(2 * heads * dim * k.element_size()) / kBytesANanosecond;
  sgl::submit([=] {
    const auto store = [&]<typename T>(T*) {
      sgl::for_rows(torch::stable::get_num_threads(), rows, nanoseconds, [&](int64_t begin, int64_t end) {
        store_rows(static_cast<const T*>(key) + begin * k_stride, static_cast<const T*>(value) + begin * v_stride, k_stride, v_stride,
                   static_cast<T*>(cache), numbers + begin, end - begin, heads, dim, padded_dim, blocks);
      });
    };
    narrow ? store(static_cast<uint16_t*>(nullptr)) : store(static_cast<uint32_t*>(nullptr));
  });
}

void paged_attention(Tensor q, Tensor kv, Tensor table, Tensor table_rows, Tensor first_rows, Tensor lengths,
                     std::optional<Tensor> tail_mask, Tensor out, double scale) {
  STD_TORCH_CHECK(q.dim() == 3, "paged_attention: q is [rows, heads, dim]");
  check_cache(kv, q.size(2), "paged_attention");
  const int64_t heads = q.size(1), kv_heads = kv.size(0) / 2, dim = q.size(2);
  STD_TORCH_CHECK(heads % kv_heads == 0 && heads / kv_heads <= sgl::kMostQueries, "paged_attention: ", heads,
                  " heads over ", kv_heads, " kv heads; up to ", sgl::kMostQueries, " of them share one");
  STD_TORCH_CHECK(dim > 0 && dim <= sgl::kMostHeadDim, "paged_attention: heads of 1 to ", sgl::kMostHeadDim, ", got ", dim);
  STD_TORCH_CHECK((q.size(0) == 0 || (q.stride(2) == 1 && q.stride(1) == dim)) && out.is_contiguous(),
                  "paged_attention: out and each row of q are contiguous");
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == q.size(0) && out.size(1) == heads * dim,
                  "paged_attention: out is [rows, heads * dim]");
  STD_TORCH_CHECK(kv.scalar_type() == q.scalar_type() && out.scalar_type() == q.scalar_type(),
                  "paged_attention: q, kv and out have one dtype");
  switch (q.scalar_type()) {
    case ScalarType::Float:
      return run<float>(q, kv, table, table_rows, first_rows, lengths, tail_mask, out, scale);
    case ScalarType::BFloat16:
      return run<sgl::bf16>(q, kv, table, table_rows, first_rows, lengths, tail_mask, out, scale);
    default: STD_TORCH_CHECK(false, "paged_attention: float32 and bfloat16 are served, no other dtype");
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def(
      "paged_attention(Tensor q, Tensor kv, Tensor table, Tensor table_rows, Tensor first_rows, Tensor lengths, "
      "Tensor? tail_mask, Tensor(a!) out, float scale) -> ()");
  m.def("store_kv(Tensor k, Tensor v, Tensor(a!) kv, Tensor slots) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("store_kv", TORCH_BOX(&store_kv));
}
