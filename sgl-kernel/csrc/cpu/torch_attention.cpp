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
// So many passes for each thread are even enough without a cut through them.
constexpr int64_t kPassesOfThread = 8;

const int64_t* numbers_of(const Tensor& tensor, const char* name, int64_t dims) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous() && tensor.dim() == dims,
                  "attention: ", name, " is contiguous int64 with ", dims, " dimensions");
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

// A cache for heads of `dim` numbers, as KvBlock says.
void check_cache(const Tensor& kv, int64_t dim, const char* name) {
  const int64_t size = kv.scalar_type() == ScalarType::Char ? sgl::KvBlock<int8_t>::size(padded(dim)) : padded(dim) * sgl::kBlockSlots;
  STD_TORCH_CHECK(kv.dim() == 3 && kv.is_contiguous() && kv.size(0) > 0 && kv.size(0) % 2 == 0 && kv.size(2) == size, name,
                  ": kv is contiguous [2 * kv heads, blocks, 16 * dim], dim rounded up to 16; of int8 with 64 more a block");
}

// What the kernel would read outside of its arguments is refused, at each run of a recorded call too; the table's slots are the
// caller's word.
template <typename Call>
void check_requests(const Call& call, int64_t rows, int64_t table_size) {
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

// Floats for what chunks of keys give, where these are computed apart; 0 where there are passes enough for all threads, or no
// request has more than one chunk. A request must be one pass for each kv head.
template <typename Call>
int64_t floats_of_pieces(const Call& call, int64_t threads) {
  int64_t pieces = 0, passes = 0, most_chunks = 0;
  for (int64_t b = 0; b < call.requests; ++b) {
    const int64_t rows = call.first_rows[b + 1] - call.first_rows[b], chunks = sgl::chunks_of(call.lengths[b]);
    if (rows * (call.heads / call.kv_heads) > sgl::kMostQueries) return 0;
    pieces += rows * call.heads * chunks;
    passes += rows > 0 ? call.kv_heads : 0;
    most_chunks = rows > 0 && chunks > most_chunks ? chunks : most_chunks;
  }
  const bool is_needed = passes % threads != 0 && passes < kPassesOfThread * threads && most_chunks > 1;
  return is_needed ? pieces * sgl::piece_size(call.padded_dim) : 0;
}

template <typename T, typename Cache>
void attend(sgl::PagedAttention<T, Cache> call) {
  using Call = sgl::PagedAttention<T, Cache>;
  using Kernel = void (*)(const Call&, void*, int64_t, int64_t);
  using Join = void (*)(const Call&);
  int64_t products = 0;
  for (int64_t b = 0; b < call.requests; ++b) {
    products += 2 * (call.first_rows[b + 1] - call.first_rows[b]) * call.lengths[b] * call.heads * call.dim;
  }
  const Kernel kernel = SGL_PICK(Kernel, paged_attention);
  const int64_t bytes = sgl::attention_scratch_bytes(call.tail);
  const double nanoseconds = static_cast<double>(products) / kProductsANanosecond;
  const int64_t threads = sgl::threads_worth(torch::stable::get_num_threads(), nanoseconds);
  if (threads == 1) return kernel(call, sgl::scratch_of(bytes), 0, 1);
  const int64_t floats = floats_of_pieces(call, threads);
  if (floats > 0) call.pieces = static_cast<float*>(sgl::scratch_of<sgl::Scratch::of_call>(floats * static_cast<int64_t>(sizeof(float))));
  const int64_t wanted = static_cast<int64_t>(nanoseconds / kNanosecondsOfShare);
  const int64_t shares = wanted < threads ? threads : wanted < 8 * threads ? wanted : 8 * threads;
  sgl::for_shares(threads, shares, [&](int64_t share) { kernel(call, sgl::scratch_of(bytes), share, shares); });
  if (floats > 0) SGL_PICK(Join, join_attention)(call);
}

template <typename T, typename Cache = T>
void run(const Tensor& q, const Tensor& kv, const Tensor& table, const Tensor& table_rows, const Tensor& first_rows,
         const Tensor& lengths, const std::optional<Tensor>& tail_mask, Tensor& out, double scale) {
  sgl::PagedAttention<T, Cache> call{};
  call.q = static_cast<const T*>(q.const_data_ptr());
  call.kv = static_cast<const Cache*>(kv.const_data_ptr());
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
  call.padded_dim = padded(call.dim);
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

// A call of rows that go to slots, which are looked at again at each run of a recorded call.
template <typename T, typename Cache = T>
void store(const Tensor& k, const Tensor& v, Tensor& kv, const Tensor& slots) {
  sgl::StoreKv<T, Cache> call{};
  call.k = static_cast<const T*>(k.const_data_ptr());
  call.v = static_cast<const T*>(v.const_data_ptr());
  call.kv = static_cast<Cache*>(kv.mutable_data_ptr());
  call.slots = numbers_of(slots, "slots", 1);
  call.k_stride = k.stride(0);
  call.v_stride = v.stride(0);
  call.heads = k.size(1);
  call.dim = k.size(2);
  call.padded_dim = padded(call.dim);
  call.blocks = kv.size(1);
  const double nanoseconds = static_cast<double>(2 * call.heads * call.dim * k.element_size()) / kBytesANanosecond;
  sgl::submit([call, nanoseconds, rows = k.size(0)] {
    const int64_t room = call.blocks * sgl::kBlockSlots;
    for (int64_t row = 0; row < rows; ++row) {
      STD_TORCH_CHECK(call.slots[row] >= 0 && call.slots[row] < room, "store_kv: slot ", call.slots[row], " of ", room);
    }
    using Kernel = void (*)(const sgl::StoreKv<T, Cache>&, int64_t, int64_t);
    const Kernel kernel = SGL_PICK(Kernel, store_kv);
    sgl::for_rows(torch::stable::get_num_threads(), rows, nanoseconds, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  });
}

// The new keys and values of each row go to its slot: as they are, or rounded to 8 bits.
void store_kv(Tensor k, Tensor v, Tensor kv, Tensor slots) {
  STD_TORCH_CHECK(k.dim() == 3 && v.dim() == 3 && v.size(0) == k.size(0) && v.size(1) == k.size(1) && v.size(2) == k.size(2),
                  "store_kv: k and v are [rows, kv heads, dim]");
  check_cache(kv, k.size(2), "store_kv");
  const int64_t dim = k.size(2), rows = k.size(0);
  const bool is_int8 = kv.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(kv.size(0) == 2 * k.size(1), "store_kv: kv has planes of keys and of values of each kv head");
  STD_TORCH_CHECK(k.scalar_type() == v.scalar_type() && (is_int8 || k.scalar_type() == kv.scalar_type()) &&
                      (k.element_size() == 2 || k.element_size() == 4),
                  "store_kv: k, v and kv have one dtype, of 16 or 32 bits; or kv is int8");
  STD_TORCH_CHECK(rows == 0 || (k.stride(2) == 1 && v.stride(2) == 1 && k.stride(1) == dim && v.stride(1) == dim),
                  "store_kv: the heads of a row of k and of v lie side by side");
  STD_TORCH_CHECK(slots.dim() == 1 && slots.size(0) == rows, "store_kv: slots has an entry a row");
  if (!is_int8) return k.element_size() == 2 ? store<uint16_t>(k, v, kv, slots) : store<uint32_t>(k, v, kv, slots);
  STD_TORCH_CHECK(dim <= sgl::kMostHeadDim, "store_kv: heads of up to ", sgl::kMostHeadDim, " in int8, got ", dim);
  switch (k.scalar_type()) {
    case ScalarType::Float: return store<float, int8_t>(k, v, kv, slots);
    case ScalarType::BFloat16: return store<sgl::bf16, int8_t>(k, v, kv, slots);
    default: STD_TORCH_CHECK(false, "store_kv: float32 and bfloat16 are stored as int8, no other dtype");
  }
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
  const bool is_int8 = kv.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK((is_int8 || kv.scalar_type() == q.scalar_type()) && out.scalar_type() == q.scalar_type(),
                  "paged_attention: q, kv and out have one dtype, or kv is int8");
  switch (q.scalar_type()) {
    case ScalarType::Float:
      return (is_int8 ? run<float, int8_t> : run<float>)(q, kv, table, table_rows, first_rows, lengths, tail_mask, out, scale);
    case ScalarType::BFloat16:
      return (is_int8 ? run<sgl::bf16, int8_t> : run<sgl::bf16>)(q, kv, table, table_rows, first_rows, lengths, tail_mask, out, scale);
    default: STD_TORCH_CHECK(false, "paged_attention: float32 and bfloat16 are served, no other dtype");
  }
}

template <typename T>
void move_slots(T* kv, int64_t planes, int64_t blocks, int64_t padded_dim, const int64_t* sources, const int64_t* targets, int64_t count) {
  using Block = sgl::KvBlock<T>;
  constexpr int64_t scale = Block::has_scales ? sizeof(float) : 0;
  const auto each = [&](const int64_t* slots, T* at, const auto& copy) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = slots[i] / sgl::kBlockSlots, slot = slots[i] % sgl::kBlockSlots;
      for (int64_t plane = 0; plane < planes; ++plane, at += padded_dim + scale) {
        T* numbers = kv + (plane * blocks + block) * Block::size(padded_dim);
        for (int64_t d = 0; d < padded_dim; ++d) {
          copy(numbers[2 * plane < planes ? Block::key_place(slot, d) : Block::value_place(slot, d, padded_dim)], at[d]);
        }
        T* own_scale = numbers + sgl::kBlockSlots * padded_dim + slot * scale;
        for (int64_t byte = 0; byte < scale; ++byte) copy(own_scale[byte], at[padded_dim + byte]);
      }
    }
  };
  T* kept = static_cast<T*>(sgl::scratch_of(count * planes * (padded_dim + scale) * static_cast<int64_t>(sizeof(T))));
  each(sources, kept, [](T& stored, T& out) { out = stored; });  // all before any is written: a slot may be in both
  each(targets, kept, [](T& stored, T& out) { stored = out; });
}

// What lies in some slots goes to others, bit for bit.
void move_kv(Tensor kv, Tensor sources, Tensor targets) {
  const int64_t bytes = kv.element_size();
  STD_TORCH_CHECK(kv.dim() == 3 && kv.is_contiguous() && kv.size(0) % 2 == 0 && (bytes == 1 || bytes == 2 || bytes == 4),
                  "move_kv: kv is a contiguous cache [2 * kv heads, blocks, numbers of a block] of 8, 16 or 32 bits");
  const int64_t numbers = kv.size(2) - (bytes == 1 ? sgl::kBlockSlots * static_cast<int64_t>(sizeof(float)) : 0);
  STD_TORCH_CHECK(numbers > 0 && numbers % (sgl::kBlockSlots * 16) == 0, "move_kv: a block has ", kv.size(2), " numbers, which is no cache");
  const int64_t *from = numbers_of(sources, "sources", 1), *to = numbers_of(targets, "targets", 1);
  const int64_t count = sources.size(0), planes = kv.size(0), blocks = kv.size(1), padded_dim = numbers / sgl::kBlockSlots;
  STD_TORCH_CHECK(targets.size(0) == count, "move_kv: ", count, " sources and ", targets.size(0), " targets");
  void* cache = kv.mutable_data_ptr();
  sgl::submit([=] {
    for (int64_t i = 0; i < 2 * count; ++i) {
      const int64_t slot = i < count ? from[i] : to[i - count];
      STD_TORCH_CHECK(slot >= 0 && slot < blocks * sgl::kBlockSlots, "move_kv: slot ", slot, " of ", blocks * sgl::kBlockSlots);
    }
    const auto move = [&]<typename T>(T* typed) { move_slots(typed, planes, blocks, padded_dim, from, to, count); };
    bytes == 1   ? move(static_cast<uint8_t*>(cache))
    : bytes == 2 ? move(static_cast<uint16_t*>(cache))
                 : move(static_cast<uint32_t*>(cache));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def("move_kv(Tensor(a!) kv, Tensor sources, Tensor targets) -> ()");
  m.def(
      "paged_attention(Tensor q, Tensor kv, Tensor table, Tensor table_rows, Tensor first_rows, Tensor lengths, "
      "Tensor? tail_mask, Tensor(a!) out, float scale) -> ()");
  m.def("store_kv(Tensor k, Tensor v, Tensor(a!) kv, Tensor slots) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("move_kv", TORCH_BOX(&move_kv));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("store_kv", TORCH_BOX(&store_kv));
}
