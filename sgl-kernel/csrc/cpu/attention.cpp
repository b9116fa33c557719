// Attention over the paged cache, for decode steps, rounds of drafts and prompts: some rows of each request, over its own slots.
//
// All scores of a row come first, then the highest, then weights and values in the order of the keys; a score is summed from the
// first dimension to the last. The keys that a row sees are counted through, and sums depend on that count alone: not on the row's
// neighbours, nor on how its text was cut into forwards, nor on keys between them that it does not see (other branches of a tree),
// nor on the slots. The cache holds keys so that a register has one dimension of many of them (see KvBlock in ops.h); where the
// slots of a request do not lie in blocks as its keys do, keys are put in order first and the same sums follow.
#include "kv_tiles.h"
#include "vec_math.h"

SGL_KERNEL_BEGIN

namespace {

constexpr float kNothing = -__builtin_inff();
// Scores of so many queries, or so many registers of their values, stay in registers.
constexpr int64_t kQueriesAtOnce = 6;
#if defined(SGL_ISA_avx2) || defined(SGL_ISA_base)
constexpr int64_t kVecsAtOnce = 2;
#else
constexpr int64_t kVecsAtOnce = 4;
#endif

// Calls run<n>() for a number of queries that is known only now.
template <int64_t Most, typename Run>
inline void with_count(int64_t count, const Run& run) {
  if constexpr (Most > 1) {
    if (count < Most) return with_count<Most - 1>(count, run);
  }
  run.template operator()<Most>();
}

// Blocks of keys that are scored at once, and registers of keys in them.
constexpr int64_t kTiles = 4;
constexpr int64_t kTileKeys = kTiles * kBlockSlots;
constexpr int64_t kStripsOfBlock = kBlockSlots / Vec::width;
// How far ahead blocks are asked for: main memory takes longer than the work on one.
constexpr int64_t kKeysAhead = 4 * kBlockSlots;
// Registers of keys that few queries take together: their sums keep the processor busy.
constexpr int64_t kStrips = 4;

// Turns the scores of one query into weights against the highest and returns their sum; behind the last one zeros follow, up to
// a whole register, for which there is room. Where it sees no key, the sum is zero.
template <typename T>
inline float weigh(float* scores, int64_t count) {
  int64_t padded = count;
  for (; padded % Vec::width != 0; ++padded) scores[padded] = kNothing;
  Vec highest_of = Vec::same(kNothing);
  for (int64_t k = 0; k < padded; k += Vec::width) highest_of = max(Vec::load(scores + k), highest_of);
  float most = highest(highest_of);
  if (most == kNothing) most = 0.f;
  using Weight = typename Values<T>::Weight;
  Weight* weights = reinterpret_cast<Weight*>(scores);
  Vec total = Vec::zero();
  for (int64_t k = 0; k < padded; k += Vec::width) {
    exp_of_negative(Vec::load(scores + k) - Vec::same(most)).store(weights + k);
    total = total + Vec::load(weights + k);  // as they were rounded
  }
  return total.sum();
}

// What a thread needs besides the scores.
template <typename T>
struct Workspace {
  alignas(64) uint32_t tiles[kTiles][kMostHeadDim * kBlockSlots];  // keys that were put in order
  T q[kMostQueries][kMostHeadDim];
  float sums[kMostQueries][kMostHeadDim];
  float totals[kMostQueries];  // of the weights
  T nothing[2 * kMostHeadDim];  // zeros, in place of the value that the last one of an odd number is paired with
  int64_t* runs;               // of each block of keys: the slot of its first key where they fill a block of slots, else -1
  float* scores;               // [queries, keys], `stride` apart
  int64_t stride;
};

// One kv head of some rows of one request. A query is one head of one row.
template <typename T>
struct Pass {
  const PagedAttention<T>& call;
  Workspace<T>& work;
  int64_t request, head, first, rows;  // rows: from `first` on, counted within the request

  using Weight = typename Values<T>::Weight;
  using Block = KvBlock<T>;

  int64_t groups() const { return call.heads / call.kv_heads; }
  int64_t queries() const { return rows * groups(); }
  int64_t rows_of_request() const { return call.first_rows[request + 1] - call.first_rows[request]; }
  // Keys up to and with its own, of row `first + r`.
  int64_t end_of(int64_t r) const { return call.lengths[request] - rows_of_request() + first + r + 1; }
  // Keys that a row of these sees, and keys that all of them see from the first on.
  int64_t end() const { return call.tail_mask == nullptr ? end_of(rows - 1) : call.lengths[request]; }
  int64_t common_end() const { return call.tail_mask == nullptr ? end_of(0) : call.lengths[request] - call.tail; }

  const int64_t* slots() const { return call.table + call.table_rows[request] * call.table_stride; }

  const T* block_of(int64_t plane, int64_t slot) const {
    return call.kv + (plane * call.blocks + slot / kBlockSlots) * kBlockSlots * call.padded_dim;
  }

  // Where the value of a slot begins; numbers of it lie Block::together apart.
  const T* value_of(int64_t slot) const {
    return block_of(call.kv_heads + head, slot) + Block::value_place(slot % kBlockSlots, 0, call.padded_dim);
  }

  // Of a key from the common end on.
  bool sees(int64_t r, int64_t key) const {
    if (call.tail_mask == nullptr) return key < end_of(r);
    const int64_t behind = key - (call.lengths[request] - call.tail);
    return call.tail_mask[(request * call.width + first + r) * call.tail + behind];
  }

  int64_t row_of(int64_t query) const { return call.first_rows[request] + first + query / groups(); }
  int64_t head_of(int64_t query) const { return head * groups() + query % groups(); }

  void run() const {
    for (int64_t i = 0; i < queries(); ++i) {
      __builtin_memcpy(work.q[i], call.q + row_of(i) * call.q_stride + head_of(i) * call.dim, call.dim * sizeof(T));
      if (call.dim % 2 != 0) work.q[i][call.dim] = T{};  // dimensions may be multiplied in pairs
    }
    const int64_t keys = end();
    for (int64_t key = 0; key < keys; key += kTileKeys) score(key, keys - key);
    for (int64_t key = 0; key < kKeysAhead; key += kBlockSlots) fetch(call.kv_heads + head, key);
    for (int64_t i = 0; i < queries(); ++i) {
      work.totals[i] = weigh<T>(work.scores + i * work.stride, draw_together(i, keys));
    }
    const int64_t common = common_end() / 2 * 2;
    for (int64_t i = 0; i < queries(); i += kQueriesAtOnce) {
      const int64_t left = queries() - i;
      with_count<kQueriesAtOnce>(left < kQueriesAtOnce ? left : kQueriesAtOnce, [&]<int64_t Count>() { add_values<Count>(i, common); });
    }
    for (int64_t r = 0; r < rows; ++r) add_own_values(r, common, keys);
    store();
  }

  // Asks for the block of a key of this request, where there is such a key.
  void fetch(int64_t plane, int64_t key) const {
    if (key >= call.lengths[request]) return;
    const char* block = reinterpret_cast<const char*>(block_of(plane, slots()[key]));
    for (int64_t at = 0; at < kBlockSlots * call.padded_dim * static_cast<int64_t>(sizeof(T)); at += 64) __builtin_prefetch(block + at);
  }

  // Keys from `key` on, of which `left` are there, as a block: where they lie, or put in order in `room`.
  const T* tile(int64_t key, int64_t left, uint32_t* room) const {
    const int64_t* own = slots() + key;
    const int64_t count = left < kBlockSlots ? left : kBlockSlots;
    bool in_place = own[0] % kBlockSlots == 0;
    for (int64_t i = 1; i < count; ++i) in_place &= own[i] == own[0] + i;
    work.runs[key / kBlockSlots] = in_place ? own[0] : -1;
    fetch(head, key + kKeysAhead);
    if (in_place) return block_of(head, own[0]);
    const uint32_t* blocks[kBlockSlots];
    for (int64_t i = 0; i < kBlockSlots; ++i) {
      blocks[i] = reinterpret_cast<const uint32_t*>(block_of(head, own[i < count ? i : count - 1]));
    }
    put_in_order(blocks, own, count, (call.dim + Block::together - 1) / Block::together, room);
    return reinterpret_cast<const T*>(room);
  }

  // Products of all queries with the keys from `key` on, of which `left` are there.
  void score(int64_t key, int64_t left) const {
    const int64_t tiles = left >= kTileKeys ? kTiles : (left + kBlockSlots - 1) / kBlockSlots;
    const T* strips[kTiles * kStripsOfBlock];
    for (int64_t t = 0; t < tiles; ++t) {
      const T* keys = tile(key + t * kBlockSlots, left - t * kBlockSlots, work.tiles[t]);
      for (int64_t s = 0; s < kStripsOfBlock; ++s) strips[t * kStripsOfBlock + s] = keys + s * Vec::width * Block::together;
    }
    for (int64_t i = 0; i < queries(); i += kQueriesAtOnce) {
      const int64_t count = queries() - i < kQueriesAtOnce ? queries() - i : kQueriesAtOnce;
      with_count<kQueriesAtOnce>(count, [&]<int64_t Count>() { score_strips<Count>(i, key, strips, tiles * kStripsOfBlock); });
    }
  }

  template <int64_t Count>
  void score_strips(int64_t query, int64_t key, const T* const* strips, int64_t count) const {
    constexpr int64_t together = 2 * Count > kQueriesAtOnce ? 2 : kStrips;
    int64_t strip = 0;
    for (; strip + together <= count; strip += together) score_some<Count, together>(query, key, strips, strip);
    for (; strip < count; ++strip) score_some<Count, 1>(query, key, strips, strip);
  }

  // Not inlined, like the values below: within the loops around it g++ 12 runs out of registers for the sums.
  template <int64_t Count, int64_t Strips>
  [[gnu::noinline]] void score_some(int64_t query, int64_t key, const T* const* strips, int64_t strip) const {
    Vec sums[Count][Strips];
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
#pragma GCC unroll 8
      for (int64_t t = 0; t < Strips; ++t) sums[i][t] = Vec::zero();
    }
    add_products<Count, Strips>(strips + strip, work.q[query], call.dim, sums);
    const Vec scale = Vec::same(call.scale);
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
      float* to = work.scores + (query + i) * work.stride + key + strip * Vec::width;
#pragma GCC unroll 8
      for (int64_t t = 0; t < Strips; ++t) (sums[i][t] * scale).store(to + t * Vec::width);
    }
  }

  // Leaves of a query's scores those of keys that it sees, side by side, and says how many they are.
  int64_t draw_together(int64_t query, int64_t keys) const {
    float* scores = work.scores + query * work.stride;
    int64_t count = common_end();
    for (int64_t key = count; key < keys; ++key) {
      if (sees(query / groups(), key)) scores[count++] = scores[key];
    }
    return count;
  }

  // Weighted values of `Count` queries, of the first `common` keys, which all of them see; the values go in pairs.
  template <int64_t Count>
  void add_values(int64_t query, int64_t common) const {
    const int64_t step = kVecsAtOnce * Vec::width;
    int64_t d = 0;
    for (; d + step <= call.padded_dim; d += step) add_values_at<Count, kVecsAtOnce>(query, common, d);
    for (; d < call.padded_dim; d += Vec::width) add_values_at<Count, 1>(query, common, d);
  }

  template <int64_t Count, int64_t Vecs>
  [[gnu::noinline]] void add_values_at(int64_t query, int64_t common, int64_t d) const {
    const Weight* weights = weights_of(query);
    const int64_t stride = work.stride * static_cast<int64_t>(sizeof(float) / sizeof(Weight));
    Vec sums[Count][Vecs];
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
#pragma GCC unroll 8
      for (int64_t j = 0; j < Vecs; ++j) sums[i][j] = Vec::zero();
    }
    for (int64_t key = 0; key < common; key += kBlockSlots) {
      const int64_t end = key + kBlockSlots < common ? key + kBlockSlots : common;
      const int64_t run = work.runs[key / kBlockSlots];
      if (d == 0 && query == 0) fetch(call.kv_heads + head, key + kKeysAhead);
      if (run >= 0) {
        const T* value = value_of(run) + d * Block::together;
        for (int64_t at = key; at < end; at += 2, value += 2 * call.padded_dim) {
          Values<T> values[Vecs];
#pragma GCC unroll 8
          for (int64_t j = 0; j < Vecs; ++j) values[j] = Values<T>::neighbours(value + j * Vec::width * Block::together, call.padded_dim);
          add_pair(values, weights + at, stride, sums);
        }
      } else {
        for (int64_t at = key; at < end; at += 2) {
          const int64_t slot = slots()[at], next = slots()[at + 1];
          const T *one = value_of(slot) + d * Block::together, *other = value_of(next) + d * Block::together;
          Values<T> values[Vecs];
#pragma GCC unroll 8
          for (int64_t j = 0; j < Vecs; ++j) {
            values[j] = Values<T>::apart(one + j * Vec::width * Block::together, slot, other + j * Vec::width * Block::together, next);
          }
          add_pair(values, weights + at, stride, sums);
        }
      }
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
#pragma GCC unroll 8
      for (int64_t j = 0; j < Vecs; ++j) sums[i][j].store(work.sums[query + i] + d + j * Vec::width);
    }
  }

  template <int64_t Count, int64_t Vecs>
  static void add_pair(const Values<T> (&values)[Vecs], const Weight* weights, int64_t stride, Vec (&sums)[Count][Vecs]) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
      const auto weight = Values<T>::weight(weights + i * stride);
#pragma GCC unroll 8
      for (int64_t j = 0; j < Vecs; ++j) sums[i][j] = values[j].add(weight, sums[i][j]);
    }
  }

  // The rest of what one row sees from key `from` on, an even number. What is not seen may be anything, also no number.
  void add_own_values(int64_t r, int64_t from, int64_t keys) const {
    int64_t count = from, slot = -1;
    for (int64_t key = from; key < keys; ++key) {
      if (key >= common_end() && !sees(r, key)) continue;
      if (count++ % 2 == 0) {
        slot = slots()[key];
        continue;
      }
      add_own_pair(r, count - 2, slot, value_of(slots()[key]), slots()[key]);
    }
    if (count % 2 != 0) add_own_pair(r, count - 1, slot, work.nothing, 0);
  }

  void add_own_pair(int64_t r, int64_t count, int64_t slot, const T* other, int64_t next) const {
    const T* one = value_of(slot);
    for (int64_t d = 0; d < call.padded_dim; d += Vec::width) {
      const Values<T> values = Values<T>::apart(one + d * Block::together, slot, other + d * Block::together, next);
      for (int64_t i = r * groups(); i < (r + 1) * groups(); ++i) {
        float* sum = work.sums[i] + d;
        values.add(Values<T>::weight(weights_of(i) + count), Vec::load(sum)).store(sum);
      }
    }
  }

  const Weight* weights_of(int64_t query) const { return reinterpret_cast<const Weight*>(work.scores + query * work.stride); }

  void store() const {
    for (int64_t i = 0; i < queries(); ++i) {
      T* out = call.out + row_of(i) * call.heads * call.dim + head_of(i) * call.dim;
      const float factor = work.totals[i] == 0.f ? 0.f : 1.f / work.totals[i];
      const int64_t even = call.dim - call.dim % Vec::width;
      for (int64_t d = 0; d < even; d += Vec::width) (Vec::load(work.sums[i] + d) * Vec::same(factor)).store(out + d);
      for (int64_t d = even; d < call.dim; ++d) store_one(out + d, work.sums[i][d] * factor);
    }
  }
};

template <typename T>
void attend(const PagedAttention<T>& call, void* scratch, int64_t part, int64_t parts) {
  Workspace<T> work;
  for (T& value : work.nothing) value = T{};
  int64_t unit = 0;
  for (int64_t request = 0; request < call.requests; ++request) {
    const int64_t rows = call.first_rows[request + 1] - call.first_rows[request];
    const int64_t at_once = attention_queries(call.lengths[request], call.heads / call.kv_heads) / (call.heads / call.kv_heads);
    work.stride = score_stride(call.lengths[request]);
    work.runs = static_cast<int64_t*>(scratch);
    work.scores = reinterpret_cast<float*>(work.runs + work.stride / kBlockSlots);
    for (int64_t first = 0; first < rows; first += at_once) {
      for (int64_t head = 0; head < call.kv_heads; ++head) {
        if (unit++ % parts != part) continue;
        const int64_t count = rows - first < at_once ? rows - first : at_once;
        Pass<T>{call, work, request, head, first, count}.run();
      }
    }
  }
}

}  // namespace

void paged_attention(const PagedAttention<float>& call, void* scratch, int64_t part, int64_t parts) {
  attend(call, scratch, part, parts);
}

void paged_attention(const PagedAttention<bf16>& call, void* scratch, int64_t part, int64_t parts) {
  attend(call, scratch, part, parts);
}

SGL_KERNEL_END
