// Attention over the paged cache, for decode steps, rounds of drafts and prompts: some rows of each request, over its own slots.
//
// All scores of a row come first, then the highest, then weights and values in the order of the keys. So what a row gives depends
// on nothing but the keys that it sees: not on its neighbours, nor on how its text was cut into forwards, nor on keys between
// them that it does not see (other branches of a tree).
#include "vec_math.h"

SGL_KERNEL_BEGIN

namespace {

constexpr float kNothing = -__builtin_inff();

// The query vectors of one kv head in some rows of a request, and what they have gathered so far.
struct Queries {
  float q[kMostQueries][kMostHeadDim];
  float sums[kMostQueries][kMostHeadDim];
  float total[kMostQueries];  // of the weights
  float* scores;              // [queries, keys], `stride` apart
  int64_t stride;
};

template <typename T>
float dot(const float* q, const T* key, int64_t dim) {
  const int64_t even = dim - dim % Vec::width;
  Vec sum = Vec::zero();
  for (int64_t d = 0; d < even; d += Vec::width) sum = multiply_add(Vec::load(q + d), Vec::load(key + d), sum);
  float total = sum.sum();
  for (int64_t d = even; d < dim; ++d) total += q[d] * load_one(key + d);
  return total;
}

template <typename T>
void add_scaled(float* sums, float weight, const T* value, int64_t dim) {
  const int64_t even = dim - dim % Vec::width;
  const Vec w = Vec::same(weight);
  for (int64_t d = 0; d < even; d += Vec::width) multiply_add(w, Vec::load(value + d), Vec::load(sums + d)).store(sums + d);
  for (int64_t d = even; d < dim; ++d) sums[d] += weight * load_one(value + d);
}

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

// One kv head of some rows of one request.
template <typename T>
struct Pass {
  const PagedAttention<T>& call;
  int64_t request, head, first, rows;  // rows: from `first` on, counted within the request

  int64_t groups() const { return call.heads / call.kv_heads; }
  int64_t rows_of_request() const { return call.first_rows[request + 1] - call.first_rows[request]; }
  // Keys up to and with its own, of row `first + r`.
  int64_t end_of(int64_t r) const { return call.lengths[request] - rows_of_request() + first + r + 1; }

  const T* at(int64_t plane, int64_t key) const {
    const int64_t slot = call.table[call.table_rows[request] * call.table_stride + key];
    return call.kv + (plane * call.slots + slot) * call.dim;
  }

  bool sees(int64_t r, int64_t key) const {
    const int64_t behind = key - (call.lengths[request] - call.tail);
    if (call.tail_mask == nullptr || behind < 0) return call.tail_mask != nullptr || key < end_of(r);
    return call.tail_mask[(request * call.width + first + r) * call.tail + behind];
  }

  void run(Queries& queries) const {
    const int64_t count = rows * groups();
    const int64_t end = call.tail_mask == nullptr ? end_of(rows - 1) : call.lengths[request];
    load(queries, count);
    for (int64_t k = 0; k < end; ++k) {
      const T* key = at(head, k);
      for (int64_t i = 0; i < count; ++i) {
        queries.scores[i * queries.stride + k] = sees(i / groups(), k) ? dot(queries.q[i], key, call.dim) : kNothing;
      }
    }
    for (int64_t i = 0; i < count; ++i) weigh(queries.scores + i * queries.stride, end);
    for (int64_t k = 0; k < end; ++k) {
      const T* value = at(call.kv_heads + head, k);
      for (int64_t i = 0; i < count; ++i) {
        const float weight = queries.scores[i * queries.stride + k];
        if (weight == 0.f) continue;  // what a row does not see may be anything, also no number
        queries.total[i] += weight;
        add_scaled(queries.sums[i], weight, value, call.dim);
      }
    }
    store(queries, count);
  }

  void load(Queries& queries, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      const T* q = call.q + (call.first_rows[request] + first + i / groups()) * call.q_stride +
                   (head * groups() + i % groups()) * call.dim;
      for (int64_t d = 0; d < call.dim; ++d) {
        queries.q[i][d] = load_one(q + d) * call.scale;
        queries.sums[i][d] = 0.f;
      }
      queries.total[i] = 0.f;
    }
  }

  void store(const Queries& queries, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      T* out = call.out + (call.first_rows[request] + first + i / groups()) * call.heads * call.dim +
               (head * groups() + i % groups()) * call.dim;
      const float factor = queries.total[i] == 0.f ? 0.f : 1.f / queries.total[i];
      for (int64_t d = 0; d < call.dim; ++d) store_one(out + d, queries.sums[i][d] * factor);
    }
  }
};

template <typename T>
void attend(const PagedAttention<T>& call, void* scratch, int64_t part, int64_t parts) {
  const int64_t groups = call.heads / call.kv_heads;
  const int64_t most_rows = kMostQueries / groups;
  Queries queries;
  queries.scores = static_cast<float*>(scratch);
  int64_t unit = 0;
  for (int64_t request = 0; request < call.requests; ++request) {
    const int64_t rows = call.first_rows[request + 1] - call.first_rows[request];
    queries.stride = score_stride(call.lengths[request]);
    for (int64_t first = 0; first < rows; first += most_rows) {
      for (int64_t head = 0; head < call.kv_heads; ++head) {
        if (unit++ % parts != part) continue;
        const int64_t count = rows - first < most_rows ? rows - first : most_rows;
        Pass<T>{call, request, head, first, count}.run(queries);
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
