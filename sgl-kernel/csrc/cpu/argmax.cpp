// The greedy choice of rows of logits: where the highest number is, and whether all numbers are finite, in one reading.
#include "vec.h"

SGL_KERNEL_BEGIN

namespace {

// Numbers of which only the highest is kept before the place of the best is looked for.
constexpr int64_t kPiece = 2048;

struct Piece {
  float highest;
  bool is_finite;
};

// Zero times a number that is not finite is NaN, and stays NaN in the sum.
Piece look_at(const float* x, int64_t count) {
  const int64_t whole = count - count % (2 * Vec::width);
  Vec high[2] = {Vec::same(-__builtin_inff()), Vec::same(-__builtin_inff())};
  Vec zeros[2] = {Vec::zero(), Vec::zero()};
  for (int64_t i = 0; i < whole; i += 2 * Vec::width) {
    for (int64_t j = 0; j < 2; ++j) {
      const Vec numbers = Vec::load(x + i + j * Vec::width);
      high[j] = max(numbers, high[j]);
      zeros[j] = multiply_add(numbers, Vec::zero(), zeros[j]);
    }
  }
  float most = highest(max(high[0], high[1]));
  float zero = (zeros[0] + zeros[1]).sum();
  for (int64_t i = whole; i < count; ++i) {
    most = x[i] > most ? x[i] : most;
    zero += 0.f * x[i];
  }
  return Piece{most, zero == 0.f};
}

}  // namespace

void argmax_rows(const ArgmaxRows& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* x = call.x + row * call.stride;
    float most = -__builtin_inff();
    int64_t at = 0;
    bool is_finite = true;
    for (int64_t first = 0; first < call.count; first += kPiece) {
      const Piece piece = look_at(x + first, call.count - first < kPiece ? call.count - first : kPiece);
      is_finite = is_finite && piece.is_finite;
      if (piece.highest > most) {
        most = piece.highest;
        at = first;
      }
    }
    while (at + 1 < call.count && x[at] != most) ++at;
    call.ids[row] = at;
    call.is_finite[row] = is_finite;
  }
}

SGL_KERNEL_END
