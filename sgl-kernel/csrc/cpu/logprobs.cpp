// The logarithms of the probabilities of some tokens of a row, and the best tokens with theirs.
#include "logit_row.h"

SGL_KERNEL_BEGIN

namespace {

// Puts keys in ascending order, as a heap does it.
void sort_keys(uint64_t* keys, int64_t count) {
  const auto sink = [keys](int64_t at, int64_t end) {
    const uint64_t key = keys[at];
    for (int64_t child; (child = 2 * at + 1) < end; at = child) {
      if (child + 1 < end && keys[child + 1] > keys[child]) ++child;
      if (keys[child] <= key) break;
      keys[at] = keys[child];
    }
    keys[at] = key;
  };
  for (int64_t at = count / 2 - 1; at >= 0; --at) sink(at, count);
  for (int64_t end = count - 1; end > 0; --end) {
    const uint64_t highest = keys[0];
    keys[0] = keys[end];
    keys[end] = highest;
    sink(0, end);
  }
}

// Ranks the tokens from `low` on by what `value` makes of their logits; returns how many they are.
template <typename Value>
int64_t rank_from(const LogitRow& row, float low, uint64_t* keys, const Value& value) {
  int64_t found = 0;
  row.for_each_from(low, [&](float logit, int64_t id) {
    keys[found++] = rank_key(value(logit), id);
    return true;
  });
  sort_keys(keys, found);
  return found;
}

}  // namespace

void top_logprobs(const TopLogprobs& call, void* scratch, int64_t begin, int64_t end) {
  auto* keys = reinterpret_cast<uint64_t*>(static_cast<char*>(scratch) + logit_row_bytes(call.vocab));
  for (int64_t at = begin; at < end; ++at) {
    const float* logits = call.logits + call.rows[at] * call.stride;
    const float divisor = call.divisors[at];
    LogitRow row(logits, call.vocab, scratch);
    row.set_scale(1.0 / static_cast<double>(divisor));
    row.weigh();
    const float log_sum = static_cast<float>(__builtin_log(row.total()));
    const auto logprob = [&](float logit) { return (logit - row.top()) / divisor - log_sum; };
    for (int64_t i = at > 0 ? call.ends[at - 1] : 0; i < call.ends[at]; ++i) call.own[i] = logprob(logits[call.ids[i]]);
    const int64_t count = call.counts[at];
    if (count == 0) continue;
    // Different logits may round to one logarithm, and then the lower id comes first: all of that last value are candidates.
    const float bound = row.bound_of(count), last = logprob(bound);
    const float low = bound == -__builtin_inff() ? bound : lowest_where(bound, [&](float logit) { return logprob(logit) >= last; });
    rank_from(row, low, keys, logprob);
    for (int64_t i = 0; i < count; ++i) {
      call.top[at * call.most + i] = logit_of(keys[i]);
      call.top_ids[at * call.most + i] = id_of(keys[i]);
    }
  }
}

void top_probs(const TopProbs& call, void* scratch, int64_t begin, int64_t end) {
  auto* keys = reinterpret_cast<uint64_t*>(static_cast<char*>(scratch) + logit_row_bytes(call.vocab));
  for (int64_t at = begin; at < end; ++at) {
    LogitRow row(call.logits + at * call.stride, call.vocab, scratch);
    int64_t* ids = call.ids + at * call.count;
    float* probs = call.probs + at * call.count;
    if (!row.is_drawable()) {  // a broken draft proposes badly, and breaks nothing
      for (int64_t i = 0; i < call.count; ++i) ids[i] = i, probs[i] = 0.f;
      continue;
    }
    row.set_scale(1.0);
    row.weigh();
    rank_from(row, row.bound_of(call.count), keys, [](float logit) { return logit; });
    for (int64_t i = 0; i < call.count; ++i) {
      ids[i] = id_of(keys[i]);
      probs[i] = static_cast<float>(row.weight(logit_of(keys[i])) / row.total());
    }
  }
}

SGL_KERNEL_END
