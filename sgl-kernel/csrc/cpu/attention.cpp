// Attention over the paged cache, for decode steps, rounds of drafts and prompts: some rows of each request, over its own slots.
//
// All scores of a row come first, then the highest, then weights and values in the order of the keys; a score is summed from the
// first dimension to the last. So what a row gives depends on nothing but the keys that it sees: not on its neighbours, nor on how
// its text was cut into forwards, nor on keys between them that it does not see (other branches of a tree).
#include "transpose.h"
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

// Registers of keys that are turned at once: where few queries read them, their sums together keep the processor busy.
constexpr int64_t kTiles = 4;
constexpr int64_t kTileKeys = kTiles * Vec::width;
// How far ahead rows of keys and of values are asked for.
constexpr int64_t kKeysAhead = 32;
constexpr int64_t kValuesAhead = 16;

// Keys of one kv head, as many as a register has lanes, a register a dimension; and the products of queries with them.
template <typename T>
struct KeyTile {
  using Query = float;
  float lanes[kMostHeadDim * Vec::width];

  static void take_query(const T* q, float* to, int64_t dim) {
    for (int64_t d = 0; d < dim; ++d) to[d] = load_one(q + d);
  }

  void fill(const T* const (&keys)[Vec::width], int64_t dim) {
    for (int64_t first = 0; first < dim; first += Vec::width) {
      Vec rows[Vec::width];
      for (int64_t i = 0; i < Vec::width; ++i) rows[i] = load_some(keys[i] + first, dim - first);
      transpose(rows);
      for (int64_t i = 0; i < Vec::width; ++i) rows[i].store(lanes + (first + i) * Vec::width);
    }
  }

  template <int64_t Count, int64_t Tiles>
  static void score(const KeyTile* tiles, const float* q, int64_t dim, Vec (&sums)[Count][Tiles]) {
    for (int64_t d = 0; d < dim; ++d) {
      for (int64_t i = 0; i < Count; ++i) {
        const Vec value = Vec::same(q[i * kMostHeadDim + d]);
        for (int64_t t = 0; t < Tiles; ++t) {
          sums[i][t] = multiply_add(value, Vec::load(tiles[t].lanes + d * Vec::width), sums[i][t]);
        }
      }
    }
  }

 private:
  static Vec load_some(const T* from, int64_t left) {
    if (left >= Vec::width) return Vec::load(from);
    float values[Vec::width] = {};
    for (int64_t i = 0; i < left; ++i) values[i] = load_one(from + i);
    return Vec::load(values);
  }
};

#if defined(SGL_ISA_avx512_vnni_bf16)

// Here a register holds two dimensions of each key.
template <>
struct KeyTile<bf16> {
  using Query = bf16;
  float pairs[kMostHeadDim / 2 * Vec::width];

  static void take_query(const bf16* q, bf16* to, int64_t dim) {
    __builtin_memcpy(to, q, dim * sizeof(bf16));
    if (dim % 2 != 0) to[dim] = bf16{0};  // dimensions are multiplied in pairs
  }

  void fill(const bf16* const (&keys)[Vec::width], int64_t dim) {
    for (int64_t first = 0; first < dim; first += 2 * Vec::width) {
      const int64_t left = dim - first;
      const __mmask32 some = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
      Vec rows[Vec::width];
      for (int64_t i = 0; i < Vec::width; ++i) {
        rows[i].lanes = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(some, keys[i] + first));
      }
      transpose(rows);
      for (int64_t i = 0; i < Vec::width; ++i) rows[i].store(pairs + (first / 2 + i) * Vec::width);
    }
  }

  template <int64_t Count, int64_t Tiles>
  static void score(const KeyTile* tiles, const bf16* q, int64_t dim, Vec (&sums)[Count][Tiles]) {
    for (int64_t pair = 0; 2 * pair < dim; ++pair) {
      for (int64_t i = 0; i < Count; ++i) {
        int32_t both;
        __builtin_memcpy(&both, q + i * kMostHeadDim + 2 * pair, sizeof(both));
        const __m512bh value = (__m512bh)_mm512_set1_epi32(both);
        for (int64_t t = 0; t < Tiles; ++t) {
          const __m512bh key = (__m512bh)_mm512_loadu_ps(tiles[t].pairs + pair * Vec::width);
          sums[i][t].lanes = _mm512_dpbf16_ps(sums[i][t].lanes, value, key);
        }
      }
    }
  }
};

#endif

// Turns the scores of one query into weights against the highest; where it sees no key, all are zero.
inline void weigh(float* scores, int64_t count) {
  Vec highest_of = Vec::same(kNothing);
  const int64_t even = count - count % Vec::width;
  for (int64_t k = 0; k < even; k += Vec::width) highest_of = max(Vec::load(scores + k), highest_of);
  float most = highest(highest_of);
  for (int64_t k = even; k < count; ++k) most = scores[k] > most ? scores[k] : most;
  if (most == kNothing) most = 0.f;
  for (int64_t k = 0; k < count; k += Vec::width) {  // there is room for a whole register behind the last one
    exp_of_negative(Vec::load(scores + k) - Vec::same(most)).store(scores + k);
  }
}

// What a thread needs besides the scores.
template <typename T>
struct Workspace {
  KeyTile<T> tiles[kTiles];
  typename KeyTile<T>::Query q[kMostQueries][kMostHeadDim];
  float sums[kMostQueries][kMostHeadDim];
  float totals[kMostQueries];  // of the weights
  float* scores;               // [queries, keys], `stride` apart
  int64_t stride;
};

// One kv head of some rows of one request. A query is one head of one row.
template <typename T>
struct Pass {
  const PagedAttention<T>& call;
  Workspace<T>& work;
  int64_t request, head, first, rows;  // rows: from `first` on, counted within the request

  int64_t groups() const { return call.heads / call.kv_heads; }
  int64_t queries() const { return rows * groups(); }
  int64_t rows_of_request() const { return call.first_rows[request + 1] - call.first_rows[request]; }
  // Keys up to and with its own, of row `first + r`.
  int64_t end_of(int64_t r) const { return call.lengths[request] - rows_of_request() + first + r + 1; }
  // Keys that a row of these sees, and keys that all of them see from the first on.
  int64_t end() const { return call.tail_mask == nullptr ? end_of(rows - 1) : call.lengths[request]; }
  int64_t common_end() const { return call.tail_mask == nullptr ? end_of(0) : call.lengths[request] - call.tail; }

  const T* at(int64_t plane, int64_t key) const {
    const int64_t slot = call.table[call.table_rows[request] * call.table_stride + key];
    return call.kv + (plane * call.slots + slot) * call.dim;
  }

  bool sees(int64_t r, int64_t key) const {
    const int64_t behind = key - (call.lengths[request] - call.tail);
    if (call.tail_mask == nullptr || behind < 0) return call.tail_mask != nullptr || key < end_of(r);
    return call.tail_mask[(request * call.width + first + r) * call.tail + behind];
  }

  int64_t row_of(int64_t query) const { return call.first_rows[request] + first + query / groups(); }
  int64_t head_of(int64_t query) const { return head * groups() + query % groups(); }

  void run() const {
    for (int64_t i = 0; i < queries(); ++i) {
      KeyTile<T>::take_query(call.q + row_of(i) * call.q_stride + head_of(i) * call.dim, work.q[i], call.dim);
    }
    const int64_t keys = end();
    for (int64_t key = 0; key < keys; key += kTileKeys) score(key, keys - key);
    for (int64_t i = 0; i < queries(); ++i) {
      hide(i, keys);
      weigh(work.scores + i * work.stride, keys);
    }
    for (int64_t i = 0; i < queries(); i += kQueriesAtOnce) {
      const int64_t left = queries() - i;
      with_count<kQueriesAtOnce>(left < kQueriesAtOnce ? left : kQueriesAtOnce, [&]<int64_t Count>() { add_values<Count>(i, keys); });
    }
    store();
  }

  // Asks for the row of a key before it is needed: the slots of a request need not lie together.
  void fetch(int64_t plane, int64_t key) const {
    const char* row = reinterpret_cast<const char*>(at(plane, key));
    for (int64_t at = 0; at < call.dim * static_cast<int64_t>(sizeof(T)); at += 64) __builtin_prefetch(row + at);
  }

  // Products of all queries with the keys from `key` on, of which `left` are there.
  void score(int64_t key, int64_t left) const {
    const int64_t tiles = left >= kTileKeys ? kTiles : (left + Vec::width - 1) / Vec::width;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const T* keys[Vec::width];
      for (int64_t i = 0; i < Vec::width; ++i) {
        const int64_t place = tile * Vec::width + i;
        keys[i] = at(head, key + (place < left ? place : left - 1));
        if (place + kKeysAhead < left) fetch(head, key + place + kKeysAhead);
      }
      work.tiles[tile].fill(keys, call.dim);
    }
    for (int64_t i = 0; i < queries(); i += kQueriesAtOnce) {
      const int64_t count = queries() - i < kQueriesAtOnce ? queries() - i : kQueriesAtOnce;
      with_count<kQueriesAtOnce>(count, [&]<int64_t Count>() { score_tiles<Count>(i, key, tiles); });
    }
  }

  template <int64_t Count>
  void score_tiles(int64_t query, int64_t key, int64_t tiles) const {
    constexpr int64_t together = 2 * Count > kQueriesAtOnce ? 2 : kTiles;
    int64_t tile = 0;
    for (; tile + together <= tiles; tile += together) score_some<Count, together>(query, key, tile);
    for (; tile < tiles; ++tile) score_some<Count, 1>(query, key, tile);
  }

  template <int64_t Count, int64_t Tiles>
  void score_some(int64_t query, int64_t key, int64_t tile) const {
    Vec sums[Count][Tiles];
    for (int64_t i = 0; i < Count; ++i) {
      for (int64_t t = 0; t < Tiles; ++t) sums[i][t] = Vec::zero();
    }
    KeyTile<T>::template score<Count, Tiles>(work.tiles + tile, work.q[query], call.dim, sums);
    const Vec scale = Vec::same(call.scale);
    for (int64_t i = 0; i < Count; ++i) {
      float* to = work.scores + (query + i) * work.stride + key + tile * Vec::width;
      for (int64_t t = 0; t < Tiles; ++t) (sums[i][t] * scale).store(to + t * Vec::width);
    }
  }

  // Takes out what a query does not see, and what lies behind the last key in its register.
  void hide(int64_t query, int64_t keys) const {
    float* scores = work.scores + query * work.stride;
    for (int64_t key = common_end(); key < keys; ++key) {
      if (!sees(query / groups(), key)) scores[key] = kNothing;
    }
    for (int64_t key = keys; key % Vec::width != 0; ++key) scores[key] = kNothing;
  }

  // Weighted values of `Count` queries. Up to `common_end` all of them see every key; behind it a weight of zero may stand for a
  // key that a query does not see, whose value may be anything, also no number.
  template <int64_t Count>
  void add_values(int64_t query, int64_t keys) const {
    const float* scores = work.scores + query * work.stride;
    const int64_t common = common_end();
    const int64_t step = kVecsAtOnce * Vec::width;
    int64_t d = 0;
    for (; d + step <= call.dim; d += step) add_values_at<Count, kVecsAtOnce>(query, scores, common, keys, d);
    for (; d + Vec::width <= call.dim; d += Vec::width) add_values_at<Count, 1>(query, scores, common, keys, d);
    float totals[Count] = {};
    for (int64_t key = 0; key < keys; ++key) {
      for (int64_t i = 0; i < Count; ++i) totals[i] += scores[i * work.stride + key];
    }
    for (int64_t i = 0; i < Count; ++i) {
      work.totals[query + i] = totals[i];
      for (int64_t rest = d; rest < call.dim; ++rest) {
        float sum = 0.f;
        for (int64_t key = 0; key < keys; ++key) {
          const float weight = scores[i * work.stride + key];
          if (weight != 0.f) sum += weight * load_one(at(call.kv_heads + head, key) + rest);
        }
        work.sums[query + i][rest] = sum;
      }
    }
  }

  template <int64_t Count, int64_t Vecs>
  void add_values_at(int64_t query, const float* scores, int64_t common, int64_t keys, int64_t d) const {
    Vec sums[Count][Vecs];
    for (int64_t i = 0; i < Count; ++i) {
      for (int64_t j = 0; j < Vecs; ++j) sums[i][j] = Vec::zero();
    }
    for (int64_t key = 0; key < common; ++key) {
      const T* value = at(call.kv_heads + head, key) + d;
      if (d == 0 && query == 0 && key + kValuesAhead < common) fetch(call.kv_heads + head, key + kValuesAhead);
      Vec values[Vecs];
      for (int64_t j = 0; j < Vecs; ++j) values[j] = Vec::load(value + j * Vec::width);
      for (int64_t i = 0; i < Count; ++i) {
        const Vec weight = Vec::same(scores[i * work.stride + key]);
        for (int64_t j = 0; j < Vecs; ++j) sums[i][j] = multiply_add(weight, values[j], sums[i][j]);
      }
    }
    for (int64_t key = common; key < keys; ++key) {
      const T* value = at(call.kv_heads + head, key) + d;
      for (int64_t i = 0; i < Count; ++i) {
        const float weight = scores[i * work.stride + key];
        if (weight == 0.f) continue;
        for (int64_t j = 0; j < Vecs; ++j) sums[i][j] = multiply_add(Vec::same(weight), Vec::load(value + j * Vec::width), sums[i][j]);
      }
    }
    for (int64_t i = 0; i < Count; ++i) {
      for (int64_t j = 0; j < Vecs; ++j) sums[i][j].store(work.sums[query + i] + d + j * Vec::width);
    }
  }

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
  work.scores = static_cast<float*>(scratch);
  int64_t unit = 0;
  for (int64_t request = 0; request < call.requests; ++request) {
    const int64_t rows = call.first_rows[request + 1] - call.first_rows[request];
    const int64_t at_once = attention_queries(call.lengths[request], call.heads / call.kv_heads) / (call.heads / call.kv_heads);
    work.stride = score_stride(call.lengths[request]);
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
