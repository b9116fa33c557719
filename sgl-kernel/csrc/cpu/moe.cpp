// Mixtures of experts: what the experts of a row gave, weighted and added. The products before it are those of the linear kernels.
#include "vec.h"

SGL_KERNEL_BEGIN

namespace {

template <typename T>
void combine_rows(const CombineExperts<T>& call, int64_t begin, int64_t end) {
  const int64_t even = call.size - call.size % Vec::width;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t* places = call.places + row * call.top;
    const float* weights = call.weights + row * call.top;
    T* out = call.out + row * call.stride;
    for (int64_t i = 0; i < even; i += Vec::width) {
      Vec sum = Vec::zero();
      for (int64_t k = 0; k < call.top; ++k) {
        if (places[k] < 0) continue;
        sum = multiply_add(Vec::same(weights[k]), Vec::load(call.y + places[k] * call.size + i), sum);
      }
      sum.store(out + i);
    }
    for (int64_t i = even; i < call.size; ++i) {
      float sum = 0.f;
      for (int64_t k = 0; k < call.top; ++k) {
        if (places[k] >= 0) sum += weights[k] * call.y[places[k] * call.size + i];
      }
      store_one(out + i, sum);
    }
  }
}

}  // namespace

void combine_experts(const CombineExperts<float>& call, int64_t begin, int64_t end) { combine_rows(call, begin, end); }
void combine_experts(const CombineExperts<bf16>& call, int64_t begin, int64_t end) { combine_rows(call, begin, end); }

SGL_KERNEL_END
