// From logits to tokens: a draw within limits, and the mask of a grammar. Nothing here sorts: the end of a
// ranking is found by selection, and the bits of an id are drawn by splitting what is kept.
#include "vec.h"

SGL_KERNEL_BEGIN

namespace {

// Logits whose largest one, and whose summed weight, are known together.
constexpr int64_t kBlockSize = kSamplingBlock;
// Largest logits of blocks that bound the first candidates, and how many times more are looked at where those do not suffice.
constexpr int64_t kFirstBlocks = 64, kMoreBlocks = 8;

// A logit's place in the ranking, ascending: the highest logit first, the lower id first where two are equal.
struct Candidate {
  uint64_t key;
  double weight;

  uint32_t id() const { return static_cast<uint32_t>(key); }
};

uint64_t rank_key(float logit, int64_t id) {
  logit += 0.f;  // of minus zero makes zero, which is as likely
  uint32_t bits;
  __builtin_memcpy(&bits, &logit, sizeof(bits));
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint64_t>(id);
}

void swap(Candidate& a, Candidate& b) {
  const Candidate kept = a;
  a = b;
  b = kept;
}

// e^z for z <= 0, to 1e-14 of itself; 0 below -700. Free of branches, so that the compiler computes many at once.
inline double weight_of(double z) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: what is added to it is rounded to a whole number
  const double clamped = z < -700.0 ? -700.0 : z;
  const double shifted = clamped * 1.4426950408889634 + magic;
  const double n = shifted - magic;
  const double r = (clamped - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  uint64_t power, bits;
  __builtin_memcpy(&power, &shifted, sizeof(power));
  __builtin_memcpy(&bits, &p, sizeof(bits));
  bits += power << 52;
  __builtin_memcpy(&p, &bits, sizeof(p));
  return z < -700.0 ? 0.0 : p;
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

float highest_of(const float* x, int64_t count) {
  float best = x[0];
  int64_t i = 0;
  if (count >= Vec::width) {
    Vec most = Vec::load(x);
    for (i = Vec::width; i + Vec::width <= count; i += Vec::width) most = max(most, Vec::load(x + i));
    best = highest(most);
  }
  for (; i < count; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// The n-th largest (from 1) of some numbers, which are put in another order.
float nth_largest(float* x, int64_t count, int64_t n) {
  int64_t low = 0, high = count - 1;
  while (low < high) {
    const float pivot = x[(low + high) / 2];
    int64_t i = low, j = high;
    while (i <= j) {
      while (x[i] > pivot) ++i;
      while (x[j] < pivot) --j;
      if (i > j) break;
      const float kept = x[i];
      x[i++] = x[j];
      x[j--] = kept;
    }
    if (n - 1 <= j) {
      high = j;
    } else if (n - 1 >= i) {
      low = i;
    } else {
      break;
    }
  }
  return x[n - 1];
}

// One row on its way to a token.
class Draw {
 public:
  Draw(const float* logits, int64_t vocab, const Limits& limits, void* scratch)
      : logits_(logits), vocab_(vocab), blocks_((vocab + kBlockSize - 1) / kBlockSize), limits_(limits) {
    candidates_ = static_cast<Candidate*>(scratch);
    sums_ = reinterpret_cast<double*>(candidates_ + vocab);
    highest_ = reinterpret_cast<float*>(sums_ + blocks_);
    ordered_ = highest_ + blocks_;
    for (int64_t b = 0; b < blocks_; ++b) highest_[b] = highest_of(logits_ + b * kBlockSize, size_of(b));
    top_ = highest_of(highest_, blocks_);
    scale_ = 1.0 / limits_.temperature;
  }

  int64_t token(const Uniforms& u) {
    const bool has_top_k = limits_.top_k > 0 && limits_.top_k < static_cast<double>(vocab_);
    most_ = has_top_k ? static_cast<int64_t>(limits_.top_k) : vocab_;
    if (limits_.top_p < 1.0 || (!has_top_k && limits_.min_p <= 0.0)) sum_blocks();
    if (!has_top_k && limits_.top_p >= 1.0 && limits_.min_p <= 0.0) return of_all(u);
    const int64_t kept = keep();
    return of_kept(kept, u);
  }

 private:
  int64_t size_of(int64_t block) const {
    const int64_t rest = vocab_ - block * kBlockSize;
    return rest < kBlockSize ? rest : kBlockSize;
  }

  double weight(float logit) const { return weight_of((static_cast<double>(logit) - top_) * scale_); }

  void weigh(int64_t block, double* weights) const {
    const float* x = logits_ + block * kBlockSize;
    const int64_t size = size_of(block);
    if (size == kBlockSize) {
      for (int64_t i = 0; i < kBlockSize; ++i) weights[i] = weight(x[i]);
      return;
    }
    for (int64_t i = 0; i < size; ++i) weights[i] = weight(x[i]);
    for (int64_t i = size; i < kBlockSize; ++i) weights[i] = 0.0;
  }

  void sum_blocks() {
    alignas(64) double weights[kBlockSize];
    total_ = 0.0;
    for (int64_t b = 0; b < blocks_; ++b) {
      weigh(b, weights);
      for (int64_t half = kBlockSize / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) weights[i] += weights[i + half];
      }
      sums_[b] = weights[0];
      total_ += weights[0];
    }
  }

  // The candidates that are kept, at the front. Those above a bound are a head of the ranking; where the end of what is kept lies
  // inside of it, that is the end.
  int64_t keep() {
    for (int64_t wanted = most_ < kFirstBlocks ? most_ : kFirstBlocks;; wanted *= kMoreBlocks) {
      const bool all = wanted >= blocks_;
      if (!all) __builtin_memcpy(ordered_, highest_, blocks_ * sizeof(float));
      const int64_t found = collect(all ? -__builtin_inff() : nth_largest(ordered_, blocks_, wanted));
      const int64_t kept = head(found);
      if (all || kept < found || kept == most_) return kept;
    }
  }

  int64_t collect(float bound) {
    int64_t found = 0;
    for (int64_t b = 0; b < blocks_; ++b) {
      if (highest_[b] < bound) continue;
      const float* x = logits_ + b * kBlockSize;
      const int64_t size = size_of(b);
      for (int64_t i = 0; i < size; ++i) {
        if (x[i] >= bound) candidates_[found++] = Candidate{rank_key(x[i], b * kBlockSize + i), weight(x[i])};
      }
    }
    return found;
  }

  // How many of the candidates are kept: a head of their ranking, as each limit makes one. They are split at one of them until
  // the end of the head is between two.
  int64_t head(int64_t found) {
    const double goal = limits_.top_p < 1.0 ? limits_.top_p * total_ : __builtin_inf();
    int64_t low = 0, high = found;
    double above = 0.0;
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
      const bool fits = rank < most_ && pivot.weight >= limits_.min_p && above + better < goal;
      if (fits || rank == 0) {
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

  int64_t of_kept(int64_t kept, const Uniforms& u) {
    int64_t low = 0, high = kept, token = 0;
    for (int64_t bit = id_bits(vocab_) - 1; bit >= 0; --bit) {
      int64_t middle = low;
      double left = 0.0, right = 0.0;
      for (int64_t i = low; i < high; ++i) {
        if (candidates_[i].id() >> bit & 1) {
          right += candidates_[i].weight;
        } else {
          left += candidates_[i].weight;
          swap(candidates_[middle++], candidates_[i]);
        }
      }
      if (right > 0.0 && u(bit) * (left + right) >= left) {
        token += int64_t{1} << bit;
        low = middle;
      } else {
        high = middle;
      }
    }
    return token;
  }

  static double sum(const double* values, int64_t begin, int64_t end) {
    double total = 0.0;
    for (int64_t i = begin; i < end; ++i) total += values[i];
    return total;
  }

  // Nothing is taken away: the upper bits pick a block by sums of blocks, the others a token of it.
  int64_t of_all(const Uniforms& u) const {
    int64_t token = 0, first = 0;
    const double* values = sums_;
    int64_t unit = kBlockSize, count = blocks_;
    alignas(64) double weights[kBlockSize];
    for (int64_t bit = id_bits(vocab_) - 1; bit >= 0; --bit) {
      const int64_t size = int64_t{1} << bit;
      if (unit > size) {
        first = token;
        weigh(token / kBlockSize, weights);
        values = weights, unit = 1, count = kBlockSize;
      }
      const int64_t from = (token - first) / unit, step = size / unit;
      const int64_t middle = from + step < count ? from + step : count, end = middle + step < count ? middle + step : count;
      const double left = sum(values, from, middle), right = sum(values, middle, end);
      if (right > 0.0 && u(bit) * (left + right) >= left) token += size;
    }
    return token;
  }

  const float* logits_;
  int64_t vocab_, blocks_, most_ = 0;
  Limits limits_;
  float top_ = 0.f;
  double scale_ = 1.0, total_ = 0.0;
  Candidate* candidates_;
  double* sums_;    // [blocks]
  float* highest_;  // [blocks]
  float* ordered_;  // [blocks]
};

}  // namespace

void draw_tokens(const DrawTokens& call, void* scratch, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const double* limits = call.limits + 4 * row;
    Draw draw(call.logits + row * call.stride, call.vocab, Limits{limits[0], limits[1], limits[2], limits[3]}, scratch);
    call.ids[row] = draw.token(Uniforms(call.seeds[row], call.positions[row]));
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
