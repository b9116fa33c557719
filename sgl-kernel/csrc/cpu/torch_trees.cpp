// Trees of drafts: growing them level by level, what each node sees, and the greedy way down. But for the best of a row, nothing
// here is worth an instruction set of its own.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "ops.h"
#include "pick.h"
#include "record.h"
#include "team.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What the best of a row costs a logit.
constexpr double kNanosecondsOfLogit = 0.1;

bool is_block(const Tensor& tensor, ScalarType type, std::initializer_list<int64_t> sizes) {
  if (tensor.scalar_type() != type || tensor.dim() != static_cast<int64_t>(sizes.size()) || !tensor.is_contiguous()) return false;
  int64_t at = 0;
  for (const int64_t size : sizes) {
    if (tensor.size(at++) != size) return false;
  }
  return true;
}

const int64_t* longs(const Tensor& tensor) { return static_cast<const int64_t*>(tensor.const_data_ptr()); }
int64_t* longs_to(const Tensor& tensor) { return static_cast<int64_t*>(tensor.mutable_data_ptr()); }
const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }
float* floats_to(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

// Places of the `count` highest of some scores, the best first, the earlier one of equals.
void best_places(const float* scores, int64_t num_scores, int64_t count, std::vector<int64_t>& places) {
  places.resize(static_cast<size_t>(num_scores));
  for (int64_t i = 0; i < num_scores; ++i) places[i] = i;
  std::partial_sort(places.begin(), places.begin() + count, places.end(),
                    [scores](int64_t a, int64_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a < b; });
}

// Where a node sees itself and its ancestors, and how many these are.
void tree_mask(Tensor parents, Tensor mask, Tensor depths) {
  const int64_t batch = parents.dim() == 2 ? parents.size(0) : 0, nodes = parents.dim() == 2 ? parents.size(1) : 0;
  STD_TORCH_CHECK(is_block(parents, ScalarType::Long, {batch, nodes}), "tree_mask: parents is contiguous int64 [requests, nodes]");
  STD_TORCH_CHECK(is_block(mask, ScalarType::Bool, {batch, nodes, nodes}), "tree_mask: mask is contiguous bool [requests, nodes, nodes]");
  STD_TORCH_CHECK(is_block(depths, ScalarType::Long, {batch, nodes}), "tree_mask: depths is contiguous int64 [requests, nodes]");
  const int64_t* links = longs(parents);
  bool* seen = static_cast<bool*>(mask.mutable_data_ptr());
  int64_t* depth = longs_to(depths);
  sgl::submit([=] {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < nodes; ++i) {
        const int64_t parent = links[b * nodes + i];
        STD_TORCH_CHECK(parent < i, "tree_mask: a parent stands before its child, got ", parent, " for node ", i);
        bool* row = seen + (b * nodes + i) * nodes;
        if (parent < 0) {
          std::memset(row, 0, static_cast<size_t>(nodes));
        } else {
          std::memcpy(row, seen + (b * nodes + parent) * nodes, static_cast<size_t>(nodes));
        }
        row[i] = true;
        depth[b * nodes + i] = parent < 0 ? 0 : depth[b * nodes + parent] + 1;
      }
    }
  });
}

// A level of candidates behind the frontier, written from place `first` of all candidates on, and the best of them as next frontier.
struct Level {
  int64_t batch, rows, topk, first, all, tail;
  const int64_t *token_ids, *candidates;
  const float *probs, *frontier_scores;
  const bool* seen;
  int64_t *ids, *parents;
  float* scores;
  int64_t *next_ids, *next_rows, *next_candidates;
  float* next_scores;
  bool* next_seen;

  void grow() const {
    std::vector<int64_t> best;
    const int64_t count = rows * topk;
    for (int64_t b = 0; b < batch; ++b) {
      float* level = scores + b * all + first;
      for (int64_t i = 0; i < count; ++i) {
        const float prob = probs[b * count + i];
        ids[b * all + first + i] = token_ids[b * count + i];
        parents[b * all + first + i] = candidates[b * rows + i / topk];
        level[i] = frontier_scores[b * rows + i / topk] * (prob > 0.f ? std::min(prob, 1.f) : 0.f);  // NaN counts as 0
      }
      best_places(level, count, topk, best);
      for (int64_t j = 0; j < topk; ++j) {
        const int64_t place = best[j], row = place / topk, to = b * topk + j;
        next_ids[to] = token_ids[b * count + place];
        next_rows[to] = row;
        next_candidates[to] = first + place;
        next_scores[to] = level[place];
        bool* sees = next_seen + to * (tail + topk);
        if (tail > 0) std::memcpy(sees, seen + (b * rows + row) * tail, static_cast<size_t>(tail));
        for (int64_t i = 0; i < topk; ++i) sees[tail + i] = i == j;
      }
    }
  }
};

void grow_level(Tensor token_ids, Tensor probs, Tensor frontier_scores, Tensor candidates, Tensor seen, int64_t first, Tensor ids,
                Tensor scores, Tensor parents, Tensor next_ids, Tensor next_rows, Tensor next_candidates, Tensor next_scores,
                Tensor next_seen) {
  STD_TORCH_CHECK(candidates.dim() == 2 && seen.dim() == 3 && ids.dim() == 2 && next_ids.dim() == 2,
                  "grow_level: candidates is [requests, rows], seen [requests, rows, tail], ids [requests, all], next_ids [requests, k]");
  const int64_t batch = candidates.size(0), rows = candidates.size(1), topk = next_ids.size(1), tail = seen.size(2), all = ids.size(1);
  const auto check = [](bool fits, const char* what) { STD_TORCH_CHECK(fits, "grow_level: ", what); };
  check(is_block(token_ids, ScalarType::Long, {batch, rows * topk}), "token_ids is contiguous int64 [requests, rows * k]");
  check(is_block(probs, ScalarType::Float, {batch, rows * topk}), "probs is contiguous float32 [requests, rows * k]");
  check(is_block(frontier_scores, ScalarType::Float, {batch, rows}), "frontier_scores is contiguous float32 [requests, rows]");
  check(is_block(candidates, ScalarType::Long, {batch, rows}), "candidates is contiguous int64 [requests, rows]");
  check(is_block(seen, ScalarType::Bool, {batch, rows, tail}), "seen is contiguous bool [requests, rows, tail]");
  check(is_block(ids, ScalarType::Long, {batch, all}) && is_block(parents, ScalarType::Long, {batch, all}) &&
            is_block(scores, ScalarType::Float, {batch, all}),
        "ids, parents and scores are contiguous int64, int64 and float32 [requests, all]");
  check(is_block(next_ids, ScalarType::Long, {batch, topk}) && is_block(next_rows, ScalarType::Long, {batch, topk}) &&
            is_block(next_candidates, ScalarType::Long, {batch, topk}) && is_block(next_scores, ScalarType::Float, {batch, topk}),
        "next_ids, next_rows, next_candidates and next_scores are contiguous int64, the last float32, [requests, k]");
  check(is_block(next_seen, ScalarType::Bool, {batch, topk, tail + topk}), "next_seen is contiguous bool [requests, k, tail + k]");
  check(first >= 0 && first + rows * topk <= all, "the level has room behind `first`");
  const Level level{batch,
                    rows,
                    topk,
                    first,
                    all,
                    tail,
                    longs(token_ids),
                    longs(candidates),
                    floats(probs),
                    floats(frontier_scores),
                    static_cast<const bool*>(seen.const_data_ptr()),
                    longs_to(ids),
                    longs_to(parents),
                    floats_to(scores),
                    longs_to(next_ids),
                    longs_to(next_rows),
                    longs_to(next_candidates),
                    floats_to(next_scores),
                    static_cast<bool*>(next_seen.mutable_data_ptr())};
  sgl::submit([=] { level.grow(); });
}

// The nodes of each tree: the root, and the best of the candidates in the order they were recorded.
void choose_nodes(Tensor root_ids, Tensor ids, Tensor scores, Tensor parents, Tensor node_ids, Tensor node_parents) {
  const int64_t batch = ids.dim() == 2 ? ids.size(0) : 0, all = ids.dim() == 2 ? ids.size(1) : 0;
  const int64_t nodes = node_ids.dim() == 2 ? node_ids.size(1) : 0;
  STD_TORCH_CHECK(is_block(root_ids, ScalarType::Long, {batch}), "choose_nodes: root_ids is contiguous int64 [requests]");
  STD_TORCH_CHECK(is_block(ids, ScalarType::Long, {batch, all}) && is_block(parents, ScalarType::Long, {batch, all}) &&
                      is_block(scores, ScalarType::Float, {batch, all}),
                  "choose_nodes: ids, parents and scores are contiguous int64, int64 and float32 [requests, all]");
  STD_TORCH_CHECK(is_block(node_ids, ScalarType::Long, {batch, nodes}) && is_block(node_parents, ScalarType::Long, {batch, nodes}),
                  "choose_nodes: node_ids and node_parents are contiguous int64 [requests, nodes]");
  STD_TORCH_CHECK(nodes >= 1 && nodes <= all + 1, "choose_nodes: ", nodes, " nodes of a root and ", all, " candidates");
  const int64_t *roots = longs(root_ids), *tokens = longs(ids), *links = longs(parents);
  const float* values = floats(scores);
  int64_t *to_ids = longs_to(node_ids), *to_parents = longs_to(node_parents);
  sgl::submit([=] {
    std::vector<int64_t> best, node_of(static_cast<size_t>(all));
    for (int64_t b = 0; b < batch; ++b) {
      best_places(values + b * all, all, nodes - 1, best);
      std::sort(best.begin(), best.begin() + (nodes - 1));
      to_ids[b * nodes] = roots[b];
      to_parents[b * nodes] = -1;
      std::fill(node_of.begin(), node_of.end(), 0);
      for (int64_t i = 0; i < nodes - 1; ++i) {
        const int64_t place = best[i], parent = links[b * all + place];
        STD_TORCH_CHECK(parent < place, "choose_nodes: a parent stands before its child, got ", parent, " for candidate ", place);
        node_of[place] = i + 1;
        to_ids[b * nodes + i + 1] = tokens[b * all + place];
        to_parents[b * nodes + i + 1] = parent < 0 ? 0 : node_of[parent];
      }
    }
  });
}

// Down the trees of some requests, from the root to the child that carries the best token of its parent, as long as there is one.
// `paths` and `drawn` [requests, nodes] are the nodes and their best tokens, `ends` [requests, 2] how many these are, and whether the
// node behind the last one has logits that are not finite.
void follow_best(Tensor logits, Tensor token_ids, Tensor parents, Tensor requests, Tensor paths, Tensor drawn, Tensor ends) {
  const int64_t batch = token_ids.dim() == 2 ? token_ids.size(0) : 0, nodes = token_ids.dim() == 2 ? token_ids.size(1) : 0;
  const int64_t count = requests.dim() == 1 ? requests.size(0) : 0;
  STD_TORCH_CHECK(is_block(token_ids, ScalarType::Long, {batch, nodes}) && is_block(parents, ScalarType::Long, {batch, nodes}),
                  "follow_best: token_ids and parents are contiguous int64 [batch, nodes]");
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && logits.dim() == 2 && logits.size(0) == batch * nodes &&
                      logits.size(1) > 0 && (logits.size(1) == 1 || logits.stride(1) == 1),
                  "follow_best: logits is float32 [batch * nodes, vocab], each row contiguous");
  STD_TORCH_CHECK(is_block(requests, ScalarType::Long, {count}), "follow_best: requests is contiguous int64 [requests]");
  STD_TORCH_CHECK(is_block(paths, ScalarType::Long, {count, nodes}) && is_block(drawn, ScalarType::Long, {count, nodes}) &&
                      is_block(ends, ScalarType::Long, {count, 2}),
                  "follow_best: paths and drawn are contiguous int64 [requests, nodes], ends [requests, 2]");
  using Kernel = void (*)(const sgl::ArgmaxRows&, int64_t, int64_t);
  const Kernel best_of = SGL_PICK(Kernel, argmax_rows);
  const int64_t *tokens = longs(token_ids), *links = longs(parents), *who = longs(requests);
  const float* rows = floats(logits);
  const int64_t vocab = logits.size(1), stride = logits.stride(0);
  int64_t *path = longs_to(paths), *ids = longs_to(drawn), *end = longs_to(ends);
  const auto follow = [=](int64_t i) {
    const int64_t first = who[i] * nodes;
    int64_t length = 0;
    bool is_finite = true;
    for (int64_t node = nodes > 0 ? 0 : -1; node >= 0;) {
      int64_t best = 0;
      best_of(sgl::ArgmaxRows{rows + (first + node) * stride, &best, &is_finite, vocab, stride}, 0, 1);
      if (!is_finite) break;
      path[i * nodes + length] = node;
      ids[i * nodes + length++] = best;
      int64_t child = node + 1;
      while (child < nodes && (links[first + child] != node || tokens[first + child] != best)) ++child;
      node = child < nodes ? child : -1;
    }
    end[2 * i] = length;
    end[2 * i + 1] = is_finite ? 0 : 1;
  };
  sgl::submit([=] {
    for (int64_t i = 0; i < count; ++i) {
      STD_TORCH_CHECK(who[i] >= 0 && who[i] < batch, "follow_best: requests are 0 to ", batch - 1, ", got ", who[i]);
    }
    const double nanoseconds = kNanosecondsOfLogit * static_cast<double>(vocab);
    sgl::for_rows(torch::stable::get_num_threads(), count, nanoseconds, [&](int64_t begin, int64_t last) {
      for (int64_t i = begin; i < last; ++i) follow(i);
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def("tree_mask(Tensor parents, Tensor(a!) mask, Tensor(b!) depths) -> ()");
  m.def(
      "grow_level(Tensor token_ids, Tensor probs, Tensor frontier_scores, Tensor candidates, Tensor seen, int first, Tensor(a!) ids, "
      "Tensor(b!) scores, Tensor(c!) parents, Tensor(d!) next_ids, Tensor(e!) next_rows, Tensor(f!) next_candidates, "
      "Tensor(g!) next_scores, Tensor(h!) next_seen) -> ()");
  m.def(
      "choose_nodes(Tensor root_ids, Tensor ids, Tensor scores, Tensor parents, Tensor(a!) node_ids, Tensor(b!) node_parents) -> ()");
  m.def(
      "follow_best(Tensor logits, Tensor token_ids, Tensor parents, Tensor requests, Tensor(a!) paths, Tensor(b!) drawn, "
      "Tensor(c!) ends) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CPU, m) {
  m.impl("tree_mask", TORCH_BOX(&tree_mask));
  m.impl("grow_level", TORCH_BOX(&grow_level));
  m.impl("choose_nodes", TORCH_BOX(&choose_nodes));
  m.impl("follow_best", TORCH_BOX(&follow_best));
}
