// From logits to tokens: the best one or a draw within limits, and the mask of a grammar. Nothing here sorts: the end of a ranking
// is found by selection, and the bits of an id are drawn by splitting what is kept.
#include "logit_row.h"

SGL_KERNEL_BEGIN

namespace {

// Highest logits of blocks that bound the first candidates.
constexpr int64_t kFirstBlocks = 64;
// Candidates that are few: they are ranked one by one. More are narrowed down first, by sums over the row.
constexpr int64_t kFewCandidates = 1024;
constexpr int64_t kLastId = 0xffffffff;

struct Candidate {
  uint64_t key;
  double weight;
};

void swap(Candidate& a, Candidate& b) {
  const Candidate kept = a;
  a = b;
  b = kept;
}

uint64_t mix(uint64_t value) {  // the finaliser of splitmix64
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

// The random numbers of one place in the stream of a seed, as kernels/draw_token.py defines them.
struct Uniforms {
  static constexpr uint64_t golden = 0x9E3779B97F4A7C15ull;
  uint64_t place;

  Uniforms(int64_t seed, int64_t position)
      : place(mix(mix(static_cast<uint64_t>(seed) + golden) + (static_cast<uint64_t>(position) + 1) * golden)) {}

  double operator()(int64_t number) const {
    return static_cast<double>(mix(place + (static_cast<uint64_t>(number) + 1) * golden) >> 11) * 0x1p-53;
  }
};

struct Limits {
  double temperature, top_k, top_p, min_p;
};

int64_t id_bits(int64_t vocab) {
  int64_t bits = 0;
  while ((vocab - 1) >> bits > 0) ++bits;
  return bits;
}

// Whether a bit of an id is set; `left` is the weight of the ids without it.
bool is_upper(double u, double left, double right) { return right > 0.0 && u * (left + right) >= left; }

// A row that is not greedy on its way to a token.
class Draw {
 public:
  Draw(LogitRow& row, const Limits& limits, void* scratch)
      : row_(row), limits_(limits), candidates_(static_cast<Candidate*>(scratch)) {
    row_.set_scale(1.0 / limits_.temperature);
  }

  int64_t token(const Uniforms& u) {
    const bool has_top_k = limits_.top_k > 0 && limits_.top_k < static_cast<double>(row_.vocab());
    const bool has_top_p = limits_.top_p < 1.0, has_min_p = limits_.min_p > 0.0;
    most_ = has_top_k ? static_cast<int64_t>(limits_.top_k) : row_.vocab();
    if (has_top_p || (!has_top_k && !has_min_p)) weigh();
    if (!has_top_k && !has_top_p && !has_min_p) return of_row(u);
    if (has_min_p) {
      low_ = lowest_where(row_.top(), [&](float logit) { return row_.weight(logit) >= limits_.min_p; });
    }
    const int64_t kept = few();
    if (kept > 0) return of_candidates(kept, u);
    row_.keep_head(last_of_many());
    return of_row(u);
  }

 private:
  void weigh() {
    row_.weigh();
    is_weighed_ = true;
  }

  double goal() const { return limits_.top_p < 1.0 ? limits_.top_p * row_.total() : __builtin_inf(); }

  // How many of the candidates are kept, at the front; 0 where they are not few, or do not show the end of what is kept.
  int64_t few() {
    const float bound = row_.bound_of(most_ < kFirstBlocks ? most_ : kFirstBlocks);
    const bool are_all = bound <= low_;
    const int64_t found = collect(are_all ? low_ : bound, __builtin_inff(), kFewCandidates);
    if (found < 0) return 0;
    const int64_t kept = certain_head(found, 0, -__builtin_inff());
    return are_all || kept < found || kept == most_ ? kept : 0;
  }

  // The candidates from `low` on and below `high`; -1 where they are more than `most`.
  int64_t collect(float low, float high, int64_t most) {
    int64_t found = 0;
    const bool are_all = row_.for_each_from(low, [&](float logit, int64_t id) {
      if (!(logit < high)) return true;
      if (found == most) return false;
      candidates_[found++] = Candidate{rank_key(logit, id), row_.weight(logit)};
      return true;
    });
    return are_all ? found : -1;
  }

  // `head` behind `count` tokens, those from `above` on; with exact sums where others do not decide.
  int64_t certain_head(int64_t found, int64_t count, float above, double weight = 0.0) {
    int64_t kept = head(found, count, weight);
    if (limits_.top_p >= 1.0) return kept;
    const double error = (row_.is_exact() ? 0.0 : kHeadError * row_.total()) + kHeadError * weight;
    double upto = weight;
    for (int64_t i = 0; i < kept; ++i) upto += candidates_[i].weight;
    const double last = kept > 0 ? candidates_[kept - 1].weight : 0.0;
    if (distance(upto, goal()) > error && distance(upto - last, goal()) > error) return kept;
    const double exact = row_.weigh_exactly(count > 0 ? above : __builtin_inff());
    return head(found, count, exact);
  }

  static double distance(double a, double b) { return a < b ? b - a : a - b; }

  // How many of the candidates are kept, behind `count` better tokens of this weight: a head of their ranking, as each limit makes
  // one. They are split at one of them until the end of the head is between two; the last one that is kept is in its place.
  int64_t head(int64_t found, int64_t count, double above) {
    const double goal = this->goal();
    int64_t low = 0, high = found;
    while (low < high) {
      swap(candidates_[median(low, (low + high) / 2, high - 1)], candidates_[high - 1]);
      const Candidate pivot = candidates_[high - 1];
      int64_t rank = low;
      double better = 0.0;
      for (int64_t i = low; i < high - 1; ++i) {
        if (candidates_[i].key > pivot.key) continue;
        better += candidates_[i].weight;
        swap(candidates_[rank++], candidates_[i]);
      }
      swap(candidates_[rank], candidates_[high - 1]);
      const bool fits = count + rank < most_ && above + better < goal;
      if (fits || count + rank == 0) {
        low = rank + 1;
        above += better + pivot.weight;
      } else {
        high = rank;
      }
    }
    return low;
  }

  int64_t median(int64_t a, int64_t b, int64_t c) const {
    const uint64_t x = candidates_[a].key, y = candidates_[b].key, z = candidates_[c].key;
    if (x < y) return y < z ? b : x < z ? c : a;
    return x < z ? a : y < z ? c : b;
  }

  // The last place of the ranking that is kept, where that is far down: all from `high` on are kept and none below `low`, and these
  // two close in until few tokens are between them.
  uint64_t last_of_many() {
    if (!is_weighed_) weigh();
    uint32_t low = ascending_bits(low_), high = ascending_bits(row_.top()) + 1;
    double below = static_cast<double>(row_.vocab()), count = 0.0, weight = 0.0;
    if (limits_.min_p > 0.0) {
      const float bounds[3] = {low_, low_, low_};
      const LogitRow::Above above = row_.above(bounds);
      if (all_fit(above.count[0], above.weight[0])) return rank_key(low_, kLastId);
      below = above.count[0];
    }
    while (below - count > static_cast<double>(kFewCandidates) && high - low > 1) {
      const uint32_t step = (high - low + 3) / 4;
      const uint32_t places[3] = {high - step, low + (high - low) / 2, low + step};
      const float bounds[3] = {of_ascending_bits(places[0]), of_ascending_bits(places[1]), of_ascending_bits(places[2])};
      const LogitRow::Above above = row_.above(bounds);
      const uint32_t before = high - low;
      for (int64_t j = 0; j < 3; ++j) {
        if (places[j] < high && places[j] > low && all_fit(above.count[j], above.weight[j])) {
          high = places[j], count = above.count[j], weight = above.weight[j];
        } else if (places[j] > low && none_follow(above.count[j], above.weight[j])) {
          low = places[j], below = above.count[j];
          break;
        }
      }
      if (high - low == before) break;  // sums of floats do not tell
    }
    const bool none = count == 0.0;
    const float from = of_ascending_bits(low), upto = none ? __builtin_inff() : of_ascending_bits(high);
    const int64_t found = collect(from, upto, row_.vocab());
    const int64_t kept = certain_head(found, static_cast<int64_t>(count), upto, weight);
    // With nothing in between, the end is that of an equal logit's last id.
    return kept > 0 ? candidates_[kept - 1].key : rank_key(upto, kLastId);
  }

  // Whether all of the best `count` tokens, of this weight by sums of floats, are kept for certain; and whether no further one is.
  bool all_fit(double count, double weight) const {
    return count <= static_cast<double>(most_) && weight * (1.0 + kHeadError) < goal() * (1.0 - kHeadError);
  }
  bool none_follow(double count, double weight) const {
    return count >= static_cast<double>(most_) || weight * (1.0 - kHeadError) >= goal() * (1.0 + kHeadError);
  }

  int64_t of_candidates(int64_t kept, const Uniforms& u) {
    int64_t low = 0, high = kept, token = 0;
    for (int64_t bit = id_bits(row_.vocab()) - 1; bit >= 0; --bit) {
      int64_t middle = low;
      double left = 0.0, right = 0.0;
      for (int64_t i = low; i < high; ++i) {
        if (id_of(candidates_[i].key) >> bit & 1) {
          right += candidates_[i].weight;
        } else {
          left += candidates_[i].weight;
          swap(candidates_[middle++], candidates_[i]);
        }
      }
      if (is_upper(u(bit), left, right)) {
        token += int64_t{1} << bit;
        low = middle;
      } else {
        high = middle;
      }
    }
    return token;
  }

  static double sum(const double* values, int64_t begin, int64_t end) {
    double some[4] = {0.0, 0.0, 0.0, 0.0};
    int64_t i = begin;
    for (; i + 4 <= end; i += 4) {
      for (int64_t j = 0; j < 4; ++j) some[j] += values[i + j];
    }
    for (; i < end; ++i) some[0] += values[i];
    return (some[0] + some[1]) + (some[2] + some[3]);
  }

  // Of all tokens that have a weight: the upper bits pick a block by sums of blocks, the others a token of it.
  int64_t of_row(const Uniforms& u) {
    int64_t token = 0, bit = id_bits(row_.vocab()) - 1;
    for (; int64_t{1} << bit >= kBlockSize; --bit) {
      const int64_t step = (int64_t{1} << bit) / kBlockSize, from = token / kBlockSize;
      const double number = u(bit);
      double left, right;
      split(row_.sums(), from, step, row_.blocks(), left, right);
      if (!row_.is_exact() && distance(number * (left + right), left) <= 2.0 * kPartError * (left + right)) {
        row_.weigh_exactly();
        split(row_.sums(), from, step, row_.blocks(), left, right);
      }
      if (is_upper(number, left, right)) token += int64_t{1} << bit;
    }
    alignas(64) double weights[kBlockSize];
    const int64_t first = token;
    row_.weigh_block(first / kBlockSize, weights);
    for (; bit >= 0; --bit) {
      double left, right;
      split(weights, token - first, int64_t{1} << bit, kBlockSize, left, right);
      if (is_upper(u(bit), left, right)) token += int64_t{1} << bit;
    }
    return token;
  }

  static void split(const double* values, int64_t from, int64_t step, int64_t count, double& left, double& right) {
    const int64_t middle = from + step < count ? from + step : count, end = middle + step < count ? middle + step : count;
    left = sum(values, from, middle);
    right = sum(values, middle, end);
  }

  LogitRow& row_;
  Limits limits_;
  Candidate* candidates_;
  int64_t most_ = 0;
  float low_ = -__builtin_inff();  // no lower logit is kept
  bool is_weighed_ = false;
};

}  // namespace

void sample_rows(const SampleRows& call, void* scratch, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; ++at) {
    LogitRow row(call.logits + (call.places == nullptr ? at : call.places[at]) * call.stride, call.vocab, scratch);
    call.ids[at] = 0;
    call.failures[at] = 0;
    if (!row.is_finite() && !(call.is_masked && row.is_drawable())) {
      call.failures[at] = call.is_masked ? 2 : 1;
      continue;
    }
    const double* limits = call.limits + 4 * at;
    if (limits[1] == 1.0) {
      call.ids[at] = row.best();
      continue;
    }
    Draw draw(row, Limits{limits[0], limits[1], limits[2], limits[3]}, static_cast<char*>(scratch) + logit_row_bytes(call.vocab));
    call.ids[at] = draw.token(Uniforms(call.seeds[at], call.positions[at]));
  }
}

void apply_token_bitmask(const TokenBitmask& call, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float* logits = call.logits + call.rows[i] * call.stride;
    const int32_t* words = call.bitmask + i * call.words;
    for (int64_t word = 0; word * 32 < call.vocab; ++word) {
      const uint32_t allowed = static_cast<uint32_t>(words[word]);
      if (allowed == 0xffffffffu) continue;
      const int64_t size = call.vocab - word * 32 < 32 ? call.vocab - word * 32 : 32;
      float* some = logits + word * 32;
      for (int64_t bit = 0; bit < size; ++bit) some[bit] = allowed >> bit & 1 ? some[bit] : -__builtin_inff();
    }
  }
}

SGL_KERNEL_END
