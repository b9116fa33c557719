// A row of logits in blocks: the highest of each, its weights e^((logit - highest) / temperature) and their sums, and what ranks
// tokens. Read by the kernels that draw tokens and by the one of log-probabilities.
//
// Weights are floats with an error that is bounded. Whoever compares sums of them asks, where the bound does not decide, for the
// same sums in double; so an answer is always that of double, and costs it seldom.
#pragma once

#include "vec_math.h"

SGL_KERNEL_BEGIN

namespace {

// Logits whose highest one, and whose summed weight, are known together.
constexpr int64_t kBlockSize = kSamplingBlock;
// By what share of itself a sum of float weights may be off, at most: 2e-7 of an exponential, 1.8e-7 * z by the rounding of its
// argument -z, 6e-8 for each addition in float, of which there are up to 66. Of weights that begin at 1 the mean z is below the
// logarithm of their number; of others it is below 87, where weights end.
constexpr double kHeadError = 9e-6, kPartError = 3e-5;

// A token's place in the ranking, ascending: the highest logit first, the lower id first where two are equal.
inline uint32_t ascending_bits(float logit) {
  logit += 0.f;  // of minus zero makes zero, which is as likely
  uint32_t bits;
  __builtin_memcpy(&bits, &logit, sizeof(bits));
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

inline float of_ascending_bits(uint32_t bits) {
  bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
  float logit;
  __builtin_memcpy(&logit, &bits, sizeof(logit));
  return logit;
}

inline uint64_t rank_key(float logit, int64_t id) {
  return static_cast<uint64_t>(~ascending_bits(logit)) << 32 | static_cast<uint64_t>(id);
}

inline float logit_of(uint64_t key) { return of_ascending_bits(~static_cast<uint32_t>(key >> 32)); }
inline uint32_t id_of(uint64_t key) { return static_cast<uint32_t>(key); }

// The lowest float that something holds for; it holds for `high` and all between.
template <typename Holds>
float lowest_where(float high, const Holds& holds) {
  uint32_t least = ascending_bits(-__builtin_inff()), most = ascending_bits(high);
  while (least < most) {
    const uint32_t middle = least + (most - least) / 2;
    if (holds(of_ascending_bits(middle))) {
      most = middle;
    } else {
      least = middle + 1;
    }
  }
  return of_ascending_bits(most);
}

// The n-th largest (from 1) of some numbers, which are put in another order.
inline float nth_largest(float* x, int64_t count, int64_t n) {
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

class LogitRow {
 public:
  // `scratch` has logit_row_bytes(vocab), aligned to 64.
  LogitRow(const float* logits, int64_t vocab, void* scratch)
      : logits_(logits), vocab_(vocab), blocks_((vocab + kBlockSize - 1) / kBlockSize) {
    weights_ = static_cast<float*>(scratch);
    sums_ = reinterpret_cast<double*>(weights_ + blocks_ * kBlockSize);
    highest_ = reinterpret_cast<float*>(sums_ + blocks_);
    ordered_ = highest_ + blocks_;
    look();
  }

  int64_t vocab() const { return vocab_; }
  int64_t blocks() const { return blocks_; }
  float top() const { return top_; }
  float highest_of(int64_t block) const { return highest_[block]; }
  // The kBlockSize logits of a block; minus infinity behind the last one of the row.
  const float* block(int64_t b) const { return (b + 1) * kBlockSize <= vocab_ ? logits_ + b * kBlockSize : tail_; }

  bool is_finite() const { return is_finite_; }
  // Whether a token can be drawn: no NaN, the highest logit is finite, and the others are finite or minus infinity.
  bool is_drawable() const {
    if (is_finite_) return true;
    bool has_nan = false;
    for (int64_t i = 0; i < vocab_; ++i) has_nan = has_nan || logits_[i] != logits_[i];
    return !has_nan && top_ - top_ == 0.f;
  }

  // The lowest id of the highest logit.
  int64_t best() const {
    int64_t b = 0, i = 0;
    while (b + 1 < blocks_ && highest_[b] != top_) ++b;
    const float* x = block(b);
    while (b * kBlockSize + i + 1 < vocab_ && x[i] != top_) ++i;
    return b * kBlockSize + i;
  }

  // The n-th highest of the blocks' highest logits, so at least n logits are as high; of fewer blocks, minus infinity.
  float bound_of(int64_t n) {
    if (n > blocks_) return -__builtin_inff();
    __builtin_memcpy(ordered_, highest_, blocks_ * sizeof(float));
    return nth_largest(ordered_, blocks_, n);
  }

  // Calls take(logit, id) for all logits from `low` on, by id; ends where it says false.
  template <typename Take>
  bool for_each_from(float low, const Take& take) const {
    const Vec bound = Vec::same(low);
    for (int64_t b = 0; b < blocks_; ++b) {
      if (highest_[b] < low) continue;
      const float* x = block(b);
      for (int64_t i = 0; i < kBlockSize; i += Vec::width) {
        for (uint32_t found = at_least(Vec::load(x + i), bound); found != 0; found &= found - 1) {
          const int64_t at = i + __builtin_ctz(found), id = b * kBlockSize + at;
          if (id < vocab_ && !take(x[at], id)) return false;
        }
      }
    }
    return true;
  }

  // 1 / temperature; `weight` follows it at once, the others when `weigh` is called.
  void set_scale(double scale) { scale_ = scale; }

  // Computes the weights of all tokens, and their sums.
  void weigh() {
    if (!(scale_ >= 1e-30 && scale_ <= 1e30)) {  // no factor of a float
      for (int64_t i = 0; i < blocks_ * kBlockSize; ++i) weights_[i] = static_cast<float>(weight(block(i / kBlockSize)[i % kBlockSize]));
      weigh_exactly();
      return;
    }
    const Vec factor = Vec::same(static_cast<float>(scale_)), top = Vec::same(top_);
    total_ = 0.0;
    for (int64_t b = 0; b < blocks_; ++b) {
      const float* x = block(b);
      float* to = weights_ + b * kBlockSize;
      Vec sum = Vec::zero();
#pragma GCC unroll 4
      for (int64_t i = 0; i < kBlockSize; i += Vec::width) {
        const Vec weight = exp_of_negative((Vec::load(x + i) - top) * factor);
        weight.store(to + i);
        sum = sum + weight;
      }
      sums_[b] = static_cast<double>(sum.sum());
      total_ += sums_[b];
    }
    is_exact_ = false;
  }

  // Computes the sums anew, in double, of the tokens that have a weight; what those from `low` on weigh together.
  double weigh_exactly(float low = __builtin_inff()) {
    alignas(64) double weights[kBlockSize];
    double above = 0.0;
    total_ = 0.0;
    for (int64_t b = 0; b < blocks_; ++b) {
      weigh_block(b, weights);
      if (highest_[b] >= low) {
        const float* x = block(b);
        double some[8] = {};
        for (int64_t i = 0; i < kBlockSize; ++i) some[i % 8] += x[i] >= low ? weights[i] : 0.0;
        for (int64_t i = 0; i < 8; ++i) above += some[i];
      }
      for (int64_t half = kBlockSize / 2; half > 0; half /= 2) {
        for (int64_t i = 0; i < half; ++i) weights[i] += weights[i + half];
      }
      sums_[b] = weights[0];
      total_ += weights[0];
    }
    is_exact_ = true;
    return above;
  }

  // The weights of a block, in double; 0 for tokens that have none.
  void weigh_block(int64_t block_number, double* weights) const {
    const float* x = block(block_number);
    const float* have = weights_ + block_number * kBlockSize;
    weigh_all(x, weights);
    for (int64_t i = 0; i < kBlockSize; ++i) weights[i] = have[i] > 0.f ? weights[i] : 0.0;
  }

  double weight(float logit) const { return weight_of((static_cast<double>(logit) - top_) * scale_); }

  double total() const { return total_; }
  bool is_exact() const { return is_exact_; }  // whether total and sums are those of double
  const double* sums() const { return sums_; }

  // Of all logits from each of three bounds on, descending ones: how many they are and what they weigh.
  struct Above {
    double weight[3], count[3];
  };
  Above above(const float* bounds) const {
    constexpr int64_t kBlocksAtOnce = 4;  // float sums stay short
    Above found{};
    const Vec one = Vec::same(1.f);
    for (int64_t first = 0; first < blocks_; first += kBlocksAtOnce) {
      Vec weight[3] = {Vec::zero(), Vec::zero(), Vec::zero()}, count[3] = {Vec::zero(), Vec::zero(), Vec::zero()};
      const int64_t last = first + kBlocksAtOnce < blocks_ ? first + kBlocksAtOnce : blocks_;
      for (int64_t b = first; b < last; ++b) {
        if (highest_[b] < bounds[2]) continue;
        const float *x = block(b), *w = weights_ + b * kBlockSize;
        for (int64_t i = 0; i < kBlockSize; i += Vec::width) {
          const Vec logits = Vec::load(x + i), weights = Vec::load(w + i);
          for (int64_t j = 0; j < 3; ++j) {
            const Vec bound = Vec::same(bounds[j]);
            weight[j] = weight[j] + zero_below(logits, bound, weights);
            count[j] = count[j] + zero_below(logits, bound, one);
          }
        }
      }
      for (int64_t j = 0; j < 3; ++j) {
        found.weight[j] += static_cast<double>(weight[j].sum());
        found.count[j] += static_cast<double>(count[j].sum());
      }
    }
    return found;
  }

  // Takes the weights of all behind one place of the ranking.
  void keep_head(uint64_t last) {
    const float low = logit_of(last);
    const Vec bound = Vec::same(low);
    for (int64_t b = 0; b < blocks_; ++b) {
      float* to = weights_ + b * kBlockSize;
      const float* x = block(b);
      Vec sum = Vec::zero();
      for (int64_t i = 0; i < kBlockSize; i += Vec::width) {
        Vec kept = zero_below(Vec::load(x + i), bound, Vec::load(to + i));
        kept.store(to + i);
        sum = sum + kept;
      }
      if ((b + 1) * kBlockSize > id_of(last) && highest_[b] >= low) {
        float rest = 0.f;
        for (int64_t i = 0; i < kBlockSize; ++i) {
          to[i] = x[i] == low && b * kBlockSize + i > id_of(last) ? 0.f : to[i];
        }
        for (int64_t i = 0; i < kBlockSize; ++i) rest += to[i];
        sums_[b] = static_cast<double>(rest);
      } else {
        sums_[b] = static_cast<double>(sum.sum());
      }
    }
    is_exact_ = false;
  }

 private:
  // The double weights of a block of logits, many at once.
  void weigh_all(const float* x, double* weights) const {
    const double top = top_, scale = scale_;
    for (int64_t i = 0; i < kBlockSize; ++i) weights[i] = weight_of((static_cast<double>(x[i]) - top) * scale);
  }

  void look() {
    const int64_t whole = vocab_ / kBlockSize;
    Vec zeros[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    top_ = -__builtin_inff();
    for (int64_t b = 0; b < whole; ++b) {
      const float* x = logits_ + b * kBlockSize;
      Vec most[2] = {Vec::same(-__builtin_inff()), Vec::same(-__builtin_inff())};
#pragma GCC unroll 16
      for (int64_t i = 0; i < kBlockSize / Vec::width; ++i) {
        const Vec numbers = Vec::load(x + i * Vec::width);
        most[i % 2] = max(numbers, most[i % 2]);
        zeros[i % 4] = multiply_add(numbers, Vec::zero(), zeros[i % 4]);  // NaN for what is not finite
      }
      highest_[b] = highest(max(most[0], most[1]));
      top_ = highest_[b] > top_ ? highest_[b] : top_;
    }
    float zero = ((zeros[0] + zeros[1]) + (zeros[2] + zeros[3])).sum();
    if (whole < blocks_) {
      float most = -__builtin_inff();
      for (int64_t i = 0; i < kBlockSize; ++i) {
        const bool is_there = whole * kBlockSize + i < vocab_;
        tail_[i] = is_there ? logits_[whole * kBlockSize + i] : -__builtin_inff();
        most = tail_[i] > most ? tail_[i] : most;
        if (is_there) zero += 0.f * tail_[i];
      }
      highest_[whole] = most;
      top_ = most > top_ ? most : top_;
    }
    is_finite_ = zero == 0.f;
  }

  const float* logits_;
  int64_t vocab_, blocks_;
  bool is_finite_ = true, is_exact_ = false;
  float top_ = 0.f;
  double scale_ = 1.0, total_ = 0.0;
  float* weights_;  // [blocks * kBlockSize]
  double* sums_;    // [blocks]
  float* highest_;  // [blocks]
  float* ordered_;  // [blocks]
  alignas(64) float tail_[kBlockSize];
};

}  // namespace

SGL_KERNEL_END
