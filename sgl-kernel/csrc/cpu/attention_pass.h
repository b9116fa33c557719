// One kv head of some rows of one request: scores, weights and values of its keys, chunk by chunk. Read by attention.cpp, which says
// why sums come out alike. It must not know which thread computes what.
#pragma once

#include "attention_sums.h"
#include "kv_tiles.h"

SGL_KERNEL_BEGIN

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

// Calls run<n>(first) for all of `queries`, as many at once as registers hold.
template <typename Run>
inline void for_queries(int64_t first, int64_t queries, const Run& run) {
  for (int64_t i = 0; i < queries; i += kQueriesAtOnce) {
    const int64_t left = queries - i;
    with_count<kQueriesAtOnce>(left < kQueriesAtOnce ? left : kQueriesAtOnce, [&]<int64_t Count>() {
      run.template operator()<Count>(first + i);
    });
  }
}

// Blocks of keys that are scored at once, and registers of keys in them.
constexpr int64_t kTiles = 4;
constexpr int64_t kTileKeys = kTiles * kBlockSlots;
constexpr int64_t kStripsOfBlock = kBlockSlots / Vec::width;
// How far ahead blocks are asked for: main memory takes longer than the work on one.
constexpr int64_t kKeysAhead = 4 * kBlockSlots;
// Registers of keys that few queries take together: their sums keep the processor busy.
constexpr int64_t kStrips = 4;
// What a thread needs besides the scores.
template <typename Cache>
struct Workspace {
  alignas(64) uint32_t tiles[kTiles][kMostHeadDim * kBlockSlots];  // keys that were put in order
  typename Scores<Cache>::Query q[kMostQueries][kMostHeadDim];
  float factors[kMostQueries];                            // of the scores of a query
  float key_scales[kTileKeys];                            // of keys that were put in order
  float pieces[kMostQueries][piece_size(kMostHeadDim)];   // of this chunk
  float joined[kMostQueries][piece_size(kMostHeadDim)];   // of all so far
  int64_t counts[kMostQueries];                           // keys that a row sees, from where the span begins
  Cache nothing[2 * kMostHeadDim];  // zeros, in place of the value that the last one of an odd number is paired with
  int64_t* runs;                    // of each block of keys: the slot of its first key where they fill a block of slots, else -1
  int64_t* own;                     // slots of keys that one row sees, and not all
  float* value_scales;              // of a cache of 8 bits
  float* scores;                    // [queries, keys], `stride` apart
  int64_t stride;

  Workspace(void* scratch, int64_t tail) : stride(score_stride(tail)) {
    for (Cache& value : nothing) value = Cache{};
    runs = static_cast<int64_t*>(scratch);
    own = runs + stride;
    value_scales = reinterpret_cast<float*>(own + stride);
    scores = value_scales + stride;
  }
};

// One kv head of some rows of one request. A query is one head of one row. A span are the keys of a chunk that all rows see, or those
// behind all such chunks; places in it are counted from where it begins.
template <typename T, typename Cache>
struct Pass {
  const PagedAttention<T, Cache>& call;
  Workspace<Cache>& work;
  int64_t request, head, first, rows;  // rows: from `first` on, counted within the request
  float* pieces;                       // [queries, chunks, piece], or null: then they are joined here

  using Block = KvBlock<Cache>;
  using Query = typename Scores<Cache>::Query;
  using Score = typename Scores<Cache>::Sum;
  using Weight = typename Values<Cache>::Weight;
  using Sum = typename Values<Cache>::Sum;

  int64_t groups() const { return call.heads / call.kv_heads; }
  int64_t queries() const { return rows * groups(); }
  int64_t rows_of_request() const { return call.first_rows[request + 1] - call.first_rows[request]; }
  // Keys up to and with its own, of row `first + r`.
  int64_t end_of(int64_t r) const { return call.lengths[request] - rows_of_request() + first + r + 1; }
  // Keys that a row of these sees, and keys that all of them see from the first on.
  int64_t end() const { return call.tail_mask == nullptr ? end_of(rows - 1) : call.lengths[request]; }
  int64_t common_end() const { return call.tail_mask == nullptr ? end_of(0) : call.lengths[request] - call.tail; }
  int64_t whole_chunks() const { return common_end() / kChunkKeys; }
  int64_t spans() const { return whole_chunks() + (whole_chunks() * kChunkKeys < end() ? 1 : 0); }

  const int64_t* slots() const { return call.table + call.table_rows[request] * call.table_stride; }

  const Cache* block_of(int64_t plane, int64_t slot) const {
    return call.kv + (plane * call.blocks + slot / kBlockSlots) * Block::size(call.padded_dim);
  }

  // Where the value of a slot begins; numbers of it lie Block::together apart.
  const Cache* value_of(int64_t slot) const {
    return block_of(call.kv_heads + head, slot) + Block::value_place(slot % kBlockSlots, 0, call.padded_dim);
  }

  float scale_of(int64_t plane, int64_t slot) const {
    return Block::scales(block_of(plane, slot), call.padded_dim)[slot % kBlockSlots];
  }

  // Of a key from the common end on.
  bool sees(int64_t r, int64_t key) const {
    if (call.tail_mask == nullptr) return key < end_of(r);
    const int64_t behind = key - (call.lengths[request] - call.tail);
    return call.tail_mask[(request * call.width + first + r) * call.tail + behind];
  }

  int64_t row_of(int64_t query) const { return call.first_rows[request] + first + query / groups(); }
  int64_t head_of(int64_t query) const { return head * groups() + query % groups(); }

  // Computes all, where chunks are joined here.
  void run() const {
    for (int64_t i = 0; i < queries(); ++i) clear(work.joined[i], call.padded_dim);
    run(0, spans());
    for (int64_t i = 0; i < queries(); ++i) {
      store_query(work.joined[i], call.out + (row_of(i) * call.heads + head_of(i)) * call.dim, call.dim, call.padded_dim);
    }
  }

  void run(int64_t from, int64_t to) const {
    for (int64_t i = 0; i < queries(); ++i) load_query(i, call.q + row_of(i) * call.q_stride + head_of(i) * call.dim);
    for (int64_t at = from; at < to; ++at) {
      run_span(at * kChunkKeys, at < whole_chunks() ? (at + 1) * kChunkKeys : end());
    }
  }

  void load_query(int64_t i, const T* from) const {
    work.factors[i] = call.scale;
    if constexpr (Block::has_scales) {
      float numbers[kMostHeadDim];
      for (int64_t d = 0; d < call.dim; ++d) numbers[d] = load_one(from + d);
      for (int64_t d = call.dim; d < call.padded_dim; ++d) numbers[d] = 0.f;
      work.factors[i] *= to_whole(numbers, call.padded_dim, 32767.f, work.q[i]);
    } else {
      __builtin_memcpy(work.q[i], from, call.dim * sizeof(T));
      if (call.dim % 2 != 0) work.q[i][call.dim] = T{};  // dimensions may be multiplied in pairs
    }
  }

  void run_span(int64_t begin, int64_t end) const {
    for (int64_t key = begin; key < end; key += kTileKeys) score(begin, key, end);
    for (int64_t i = 0; i < queries(); ++i) work.counts[i / groups()] = draw_together(i, begin, end);
    const int64_t common = common_values(begin, end);
    if constexpr (Block::has_scales) {
      for (int64_t at = 0; at < common; ++at) work.value_scales[at] = scale_of(call.kv_heads + head, slots()[begin + at]);
    }
    for (int64_t from = 0; from < end - begin; from += kChunkKeys) run_chunk(begin, end, from, common);
  }

  // Keys of a span whose values are added for all rows together, in pairs. Whole numbers may go beyond what a row sees, with a weight
  // of zero: also what a broken row left is finite.
  int64_t common_values(int64_t begin, int64_t end) const {
    const int64_t common = (end < common_end() ? end : common_end()) - begin;
    if constexpr (Block::has_scales) return call.tail_mask == nullptr ? end - begin : common / kGroupKeys * kGroupKeys;
    return common / 2 * 2;
  }

  // Weights and values of the counted keys `from` to `from + kChunkKeys` of a span.
  void run_chunk(int64_t begin, int64_t end, int64_t from, int64_t common) const {
    const int64_t most = end - begin - from < kChunkKeys ? end - begin - from : kChunkKeys;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t count = work.counts[r] - from, seen = count < 0 ? 0 : count < most ? count : most;
      if constexpr (Block::has_scales) {
        const int64_t own = find_own(r, begin, end, common);
        for (int64_t i = 0; i < own; ++i) work.value_scales[common + i] = scale_of(call.kv_heads + head, work.own[i]);
      }
      for (int64_t i = r * groups(); i < (r + 1) * groups(); ++i) weigh_query(i, from, seen, most);
    }
    const int64_t shared = common - from < most ? common - from : most;
    constexpr int64_t together = Block::has_scales ? kGroupKeys : kChunkKeys;
    for (int64_t at = 0; at < shared; at += together) {
      const int64_t to = at + together < shared ? at + together : shared;
      for_queries(0, queries(), [&]<int64_t Count>(int64_t i) { add_values<Count>(i, begin, end, from + at, from + to); });
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t to = work.counts[r] < from + most ? work.counts[r] : from + most;
      if (to > common) add_own_values(r, begin, end, from, to, common);
    }
    for (int64_t i = 0; i < queries(); ++i) {
      if (pieces == nullptr) {
        join(work.joined[i], work.pieces[i], call.padded_dim);
      } else {
        float* piece = pieces + (i * chunks_of(call.lengths[request]) + (begin + from) / kChunkKeys) * piece_size(call.padded_dim);
        __builtin_memcpy(piece, work.pieces[i], piece_size(call.padded_dim) * sizeof(float));
      }
    }
  }

  void weigh_query(int64_t i, int64_t from, int64_t seen, int64_t most) const {
    float* scores = work.scores + i * work.stride + from;
    float* piece = work.pieces[i];
    clear(piece, call.padded_dim);
    if constexpr (Block::has_scales) {
      total_of(piece, call.padded_dim) = weigh<float>(scores, seen, highest_of(piece, call.padded_dim));
      for (int64_t k = seen; k < (most + kGroupKeys - 1) / kGroupKeys * kGroupKeys; ++k) scores[k] = 0.f;
      for (int64_t k = 0; k < most; k += kGroupKeys) to_whole_weights(scores + k, work.value_scales + from + k);
    } else {
      total_of(piece, call.padded_dim) = weigh<Weight>(scores, seen, highest_of(piece, call.padded_dim));
    }
  }

  // Weights of the counted keys of a span from `at` on, of one query.
  const Weight* weights_of(int64_t query, int64_t at) const {
    constexpr int64_t keys = Block::has_scales ? kGroupKeys : kChunkKeys;
    return reinterpret_cast<const Weight*>(work.scores + query * work.stride + at / keys * keys) + at % keys;
  }

  // Of weights from `at` on, where they are whole numbers.
  float factor_of(int64_t query, int64_t at) const {
    return Block::has_scales ? work.scores[query * work.stride + at / kGroupKeys * kGroupKeys + kGroupKeys / 2] : 1.f;
  }

  // Asks for the block of a key of this request, where there is such a key.
  void fetch(int64_t plane, int64_t key) const {
    if (key >= call.lengths[request]) return;
    const char* block = reinterpret_cast<const char*>(block_of(plane, slots()[key]));
    const int64_t bytes = Block::size(call.padded_dim) * static_cast<int64_t>(sizeof(Cache));
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(block + at);
  }

  // What comes a while behind this key, of which `left` are there with it: a key, or behind the last one a value.
  void fetch_ahead(int64_t begin, int64_t key, int64_t left) const {
    if (left > kKeysAhead) return fetch(head, key + kKeysAhead);
    const bool is_short = key - begin + left < kKeysAhead;
    fetch(call.kv_heads + head, is_short ? key : begin + kKeysAhead - left);
  }

  // Keys from `key` on, of which `left` are there, as a block: where they lie, or put in order in tile `t`.
  const Cache* tile(int64_t begin, int64_t key, int64_t left, int64_t t) const {
    const int64_t* own = slots() + key;
    const int64_t count = left < kBlockSlots ? left : kBlockSlots;
    bool in_place = own[0] % kBlockSlots == 0;
    for (int64_t i = 1; i < count; ++i) in_place &= own[i] == own[0] + i;
    work.runs[(key - begin) / kBlockSlots] = in_place ? own[0] : -1;
    fetch_ahead(begin, key, left);
    if (in_place) return block_of(head, own[0]);
    using Lane = typename Scores<Cache>::Lane;
    const Lane* blocks[kBlockSlots];
    for (int64_t i = 0; i < kBlockSlots; ++i) {
      blocks[i] = reinterpret_cast<const Lane*>(block_of(head, own[i < count ? i : count - 1]));
    }
    Lane* room = reinterpret_cast<Lane*>(work.tiles[t]);
    put_in_order(blocks, own, count, (call.dim + Block::together - 1) / Block::together, room);
    if constexpr (Block::has_scales) {
      for (int64_t i = 0; i < count; ++i) work.key_scales[t * kBlockSlots + i] = scale_of(head, own[i]);
    }
    return reinterpret_cast<const Cache*>(room);
  }

  // Products of all queries with the keys from `key` on.
  void score(int64_t begin, int64_t key, int64_t end) const {
    const int64_t left = end - key, tiles = left >= kTileKeys ? kTiles : (left + kBlockSlots - 1) / kBlockSlots;
    const Cache* strips[kTiles * kStripsOfBlock];
    for (int64_t t = 0; t < tiles; ++t) {
      const Cache* keys = tile(begin, key + t * kBlockSlots, left - t * kBlockSlots, t);
      for (int64_t s = 0; s < kStripsOfBlock; ++s) strips[t * kStripsOfBlock + s] = keys + s * Vec::width * Block::together;
      if constexpr (Block::has_scales) {
        const int64_t run = work.runs[(key - begin) / kBlockSlots + t];
        if (run >= 0) __builtin_memcpy(work.key_scales + t * kBlockSlots, Block::scales(keys, call.padded_dim), kBlockSlots * sizeof(float));
      }
    }
    for_queries(0, queries(), [&]<int64_t Count>(int64_t i) { score_strips<Count>(i, key - begin, strips, tiles * kStripsOfBlock); });
  }

  template <int64_t Count>
  void score_strips(int64_t query, int64_t at, const Cache* const* strips, int64_t count) const {
    constexpr int64_t together = 2 * Count > kQueriesAtOnce ? 2 : kStrips;
    int64_t strip = 0;
    for (; strip + together <= count; strip += together) score_some<Count, together>(query, at, strips, strip);
    for (; strip < count; ++strip) score_some<Count, 1>(query, at, strips, strip);
  }

  // Not inlined, like the values below: within the loops around it g++ 12 runs out of registers for the sums.
  template <int64_t Count, int64_t Strips>
  [[gnu::noinline]] void score_some(int64_t query, int64_t at, const Cache* const* strips, int64_t strip) const {
    Score sums[Count][Strips];
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
#pragma GCC unroll 8
      for (int64_t t = 0; t < Strips; ++t) sums[i][t] = Score::zero();
    }
    add_products<Count, Strips>(strips + strip, work.q[query], call.dim, sums);
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
      const Vec factor = Vec::same(work.factors[query + i]);
      float* to = work.scores + (query + i) * work.stride + at + strip * Vec::width;
#pragma GCC unroll 8
      for (int64_t t = 0; t < Strips; ++t) {
        if constexpr (Block::has_scales) {
          (sums[i][t].floats() * Vec::load(work.key_scales + (strip + t) * Vec::width) * factor).store(to + t * Vec::width);
        } else {
          (sums[i][t] * factor).store(to + t * Vec::width);
        }
      }
    }
  }

  // Leaves of a query's scores those of keys that it sees, side by side, and says how many they are.
  int64_t draw_together(int64_t query, int64_t begin, int64_t end) const {
    float* scores = work.scores + query * work.stride;
    if (end <= common_end()) return end - begin;
    int64_t count = common_end() - begin;
    for (int64_t key = common_end(); key < end; ++key) {
      if (sees(query / groups(), key)) scores[count++] = scores[key - begin];
    }
    return count;
  }

  // Weighted values of `Count` queries, of the keys `from` to `to` of a span, at most a group; the values go in pairs.
  template <int64_t Count>
  void add_values(int64_t query, int64_t begin, int64_t end, int64_t from, int64_t to) const {
    if (query == 0) {  // what comes next: values of this span, or keys of the one behind it
      for (int64_t key = begin + from + kKeysAhead; key < begin + to + kKeysAhead; key += kBlockSlots) {
        fetch(key < end ? call.kv_heads + head : head, key);
      }
    }
    const int64_t step = kVecsAtOnce * Vec::width;
    int64_t d = 0;
    for (; d + step <= call.padded_dim; d += step) add_values_at<Count, kVecsAtOnce>(query, begin, from, to, d);
    for (; d < call.padded_dim; d += Vec::width) add_values_at<Count, 1>(query, begin, from, to, d);
  }

  template <int64_t Count, int64_t Vecs>
  [[gnu::noinline]] void add_values_at(int64_t query, int64_t begin, int64_t from, int64_t to, int64_t d) const {
    const Weight* weights = weights_of(query, from);
    const int64_t stride = work.stride * static_cast<int64_t>(sizeof(float) / sizeof(Weight));
    Sum sums[Count][Vecs];
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
#pragma GCC unroll 8
      for (int64_t j = 0; j < Vecs; ++j) begin_sum(sums[i][j], work.pieces[query + i] + d + j * Vec::width);
    }
    for (int64_t first = from; first < to; first += kBlockSlots) {
      const int64_t last = first + kBlockSlots < to ? first + kBlockSlots : to;
      const int64_t run = work.runs[first / kBlockSlots];
      if (run >= 0) {
        const Cache* value = value_of(run) + d * Block::together;
        for (int64_t at = first; at < last; at += 2, value += 2 * call.padded_dim, weights += 2) {
          Values<Cache> values[Vecs];
#pragma GCC unroll 8
          for (int64_t j = 0; j < Vecs; ++j) values[j] = Values<Cache>::neighbours(value + j * Vec::width * Block::together, call.padded_dim);
          add_pair(values, weights, stride, sums);
        }
      } else {
        for (int64_t at = first; at < last; at += 2, weights += 2) {
          const int64_t slot = slots()[begin + at], next = slots()[begin + (at + 1 < to ? at + 1 : at)];
          add_apart(value_of(slot), slot, value_of(next), next, d, weights, stride, sums);
        }
      }
    }
    end_sums(query, from, d, sums);
  }

  template <int64_t Count, int64_t Vecs>
  void end_sums(int64_t query, int64_t at, int64_t d, const Sum (&sums)[Count][Vecs]) const {
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
#pragma GCC unroll 8
      for (int64_t j = 0; j < Vecs; ++j) end_sum(sums[i][j], factor_of(query + i, at), work.pieces[query + i] + d + j * Vec::width);
    }
  }

  template <int64_t Count, int64_t Vecs>
  static void add_apart(const Cache* one, int64_t slot, const Cache* other, int64_t next, int64_t d, const Weight* weights,
                        int64_t stride, Sum (&sums)[Count][Vecs]) {
    Values<Cache> values[Vecs];
#pragma GCC unroll 8
    for (int64_t j = 0; j < Vecs; ++j) {
      const int64_t at = (d + j * Vec::width) * Block::together;
      values[j] = Values<Cache>::apart(one + at, slot, other + at, next);
    }
    add_pair(values, weights, stride, sums);
  }

  template <int64_t Count, int64_t Vecs>
  static void add_pair(const Values<Cache> (&values)[Vecs], const Weight* weights, int64_t stride, Sum (&sums)[Count][Vecs]) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < Count; ++i) {
      const auto weight = Values<Cache>::weight(weights + i * stride);
#pragma GCC unroll 8
      for (int64_t j = 0; j < Vecs; ++j) sums[i][j] = values[j].add(weight, sums[i][j]);
    }
  }

  // Slots of the keys that row r sees behind the common ones of a span, in order, and their number.
  int64_t find_own(int64_t r, int64_t begin, int64_t end, int64_t common) const {
    int64_t count = 0;
    for (int64_t key = begin + common; key < end; ++key) {
      if (key < common_end() || sees(r, key)) work.own[count++] = slots()[key];
    }
    return count;
  }

  // Those of the counted keys `from` to `to` of a span that only this row sees. What it does not see may be anything, also no number.
  void add_own_values(int64_t r, int64_t begin, int64_t end, int64_t from, int64_t to, int64_t common) const {
    find_own(r, begin, end, common);
    for (int64_t at = from > common ? from : common; at < to;) {
      const int64_t whole = (at / kGroupKeys + 1) * kGroupKeys, last = whole < to ? whole : to;
      for_queries(r * groups(), groups(), [&]<int64_t Count>(int64_t i) {
        for (int64_t d = 0; d < call.padded_dim; d += Vec::width) add_own_at<Count>(i, at, last, common, d);
      });
      at = last;
    }
  }

  template <int64_t Count>
  [[gnu::noinline]] void add_own_at(int64_t query, int64_t from, int64_t to, int64_t common, int64_t d) const {
    const int64_t stride = work.stride * static_cast<int64_t>(sizeof(float) / sizeof(Weight));
    Sum sums[Count][1];
    for (int64_t i = 0; i < Count; ++i) begin_sum(sums[i][0], work.pieces[query + i] + d);
    for (int64_t at = from; at < to; at += 2) {
      const int64_t slot = work.own[at - common], next = at + 1 < to ? work.own[at + 1 - common] : 0;
      const Cache* other = at + 1 < to ? value_of(next) : work.nothing;
      add_apart(value_of(slot), slot, other, next, d, weights_of(query, at), stride, sums);
    }
    end_sums(query, from, d, sums);
  }
};

SGL_KERNEL_END
