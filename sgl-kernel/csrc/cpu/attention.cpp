// Attention over the paged cache, for decode steps, rounds of drafts and prompts: some rows of each request, over its own slots.
//
// The keys that a row sees are counted through, and taken in chunks of 256. Of a chunk all scores come first, then the highest, then
// weights and values in the order of the keys; what chunks give is joined in their order. A score is summed from the first dimension
// to the last. So sums depend on the number of keys alone: not on the row's neighbours, nor on how its text was cut into forwards,
// nor on the threads that chunks are computed by, nor on keys between them that the row does not see (other branches of a tree), nor
// on the slots. The cache holds keys so that a register has one dimension of many of them (see KvBlock in ops.h); where the slots of
// a request do not lie in blocks as its keys do, keys are put in order first and the same sums follow.
//
// A cache of 8 bits is multiplied as it lies: a query, and the weights of 64 keys times the scales of their values, are rounded to 16
// bits with a scale, so that products are summed exactly in whole numbers.
#include "attention_pass.h"

SGL_KERNEL_BEGIN

namespace {

// Rows that one pass takes.
template <typename T, typename Cache>
int64_t rows_at_once(const PagedAttention<T, Cache>& call) {
  return kMostQueries / (call.heads / call.kv_heads);
}

// Each pass whole, by one thread.
template <typename T, typename Cache>
void attend(const PagedAttention<T, Cache>& call, Workspace<Cache>& work, int64_t part, int64_t parts) {
  int64_t unit = 0;
  for (int64_t request = 0; request < call.requests; ++request) {
    const int64_t rows = call.first_rows[request + 1] - call.first_rows[request], at_once = rows_at_once(call);
    for (int64_t first = 0; first < rows; first += at_once) {
      for (int64_t head = 0; head < call.kv_heads; ++head) {
        if (unit++ % parts != part) continue;
        Pass<T, Cache>{call, work, request, head, first, rows - first < at_once ? rows - first : at_once, nullptr}.run();
      }
    }
  }
}

// Calls run(pass, pieces of it) for each pass, where a request is one pass for each kv head.
template <typename T, typename Cache, typename Run>
void for_passes(const PagedAttention<T, Cache>& call, Workspace<Cache>& work, const Run& run) {
  float* pieces = call.pieces;
  for (int64_t request = 0; request < call.requests; ++request) {
    const int64_t rows = call.first_rows[request + 1] - call.first_rows[request];
    for (int64_t head = 0; rows > 0 && head < call.kv_heads; ++head) {
      const Pass<T, Cache> pass{call, work, request, head, 0, rows, pieces};
      run(pass);
      pieces += pass.queries() * chunks_of(call.lengths[request]) * piece_size(call.padded_dim);
    }
  }
}

// Spans of all passes in a row, of which each thread takes neighbours.
template <typename T, typename Cache>
void attend_in_pieces(const PagedAttention<T, Cache>& call, Workspace<Cache>& work, int64_t part, int64_t parts) {
  int64_t all = 0, before = 0;
  for_passes(call, work, [&](const Pass<T, Cache>& pass) { all += pass.spans(); });
  const int64_t begin = all * part / parts, end = all * (part + 1) / parts;
  for_passes(call, work, [&](const Pass<T, Cache>& pass) {
    const int64_t from = begin > before ? begin - before : 0, to = end - before < pass.spans() ? end - before : pass.spans();
    if (from < to) pass.run(from, to);
    before += pass.spans();
  });
}

template <typename T, typename Cache>
void compute(const PagedAttention<T, Cache>& call, void* scratch, int64_t part, int64_t parts) {
  Workspace<Cache> work(scratch, call.tail);
  call.pieces == nullptr ? attend(call, work, part, parts) : attend_in_pieces(call, work, part, parts);
}

template <typename T, typename Cache>
void join_pieces(const PagedAttention<T, Cache>& call) {
  float* piece = call.pieces;
  alignas(64) float joined[piece_size(kMostHeadDim)];
  for (int64_t request = 0; request < call.requests; ++request) {
    const int64_t first = call.first_rows[request], rows = call.first_rows[request + 1] - first, groups = call.heads / call.kv_heads;
    for (int64_t i = 0; i < rows * call.heads; ++i) {  // of each kv head the queries, as a pass has them
      const int64_t head = i / (rows * groups), query = i % (rows * groups);
      clear(joined, call.padded_dim);
      for (int64_t chunk = 0; chunk < chunks_of(call.lengths[request]); ++chunk, piece += piece_size(call.padded_dim)) {
        join(joined, piece, call.padded_dim);
      }
      const int64_t row = first + query / groups, own_head = head * groups + query % groups;
      store_query(joined, call.out + (row * call.heads + own_head) * call.dim, call.dim, call.padded_dim);
    }
  }
}

}  // namespace

#define SGL_ATTENTION(T, Cache)                                                                                \
  void paged_attention(const PagedAttention<T, Cache>& call, void* scratch, int64_t part, int64_t parts) {   \
    compute(call, scratch, part, parts);                                                                     \
  }                                                                                                          \
  void join_attention(const PagedAttention<T, Cache>& call) { join_pieces(call); }

SGL_ATTENTION(float, float)
SGL_ATTENTION(bf16, bf16)
SGL_ATTENTION(float, int8_t)
SGL_ATTENTION(bf16, int8_t)

SGL_KERNEL_END
