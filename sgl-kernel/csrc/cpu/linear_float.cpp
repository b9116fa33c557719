// Linear layers over packed floats and bf16. A panel holds 32 outputs: for each input (of bf16: for each pair of inputs) the
// numbers of all 32 lie side by side, so one row of x streams the weight once, and many rows share each load.
//
// Every sum runs over the inputs from first to last, whatever the number of rows: a row gives the same bits alone and in a batch.
#include "linear.h"

SGL_KERNEL_BEGIN

namespace {

// Adds the products of one input of some rows with the weights of some outputs.
template <int64_t Rows, int64_t Lanes>
inline void add_input(const float* x, int64_t stride, const Vec (&w)[Lanes], Vec (&sums)[Rows][Lanes]) {
  for (int64_t r = 0; r < Rows; ++r) {
    const Vec value = Vec::same(x[r * stride]);
    for (int64_t j = 0; j < Lanes; ++j) sums[r][j] = multiply_add(value, w[j], sums[r][j]);
  }
}

// Adds rows x 32 products of one step of the inputs; there are one or two inputs in a step.
struct FloatStep {
  using Weight = float;
  using Input = float;
  static constexpr int64_t inputs = 1, sums = kSums;

  template <int64_t Rows, int64_t Lanes>
  static void add(const float* x, int64_t stride, const float* weight, Vec (&sums)[Rows][Lanes]) {
    Vec w[Lanes];
    for (int64_t j = 0; j < Lanes; ++j) w[j] = Vec::load(weight + j * Vec::width);
    add_input<Rows, Lanes>(x, stride, w, sums);
  }
};

#if defined(SGL_ISA_avx512_vnni_bf16)

struct Bf16Step {
  using Weight = bf16;
  using Input = bf16;
  static constexpr int64_t inputs = 2, sums = kSums;

  template <int64_t Rows, int64_t Lanes>
  static void add(const bf16* x, int64_t stride, const bf16* weight, Vec (&sums)[Rows][Lanes]) {
    __m512i w[Lanes];
    for (int64_t j = 0; j < Lanes; ++j) w[j] = _mm512_loadu_si512(weight + 2 * j * Vec::width);
    for (int64_t r = 0; r < Rows; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, x + r * stride, sizeof(pair));
      const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
      for (int64_t j = 0; j < Lanes; ++j) sums[r][j].lanes = _mm512_dpbf16_ps(sums[r][j].lanes, value, (__m512bh)w[j]);
    }
  }
};

#else

// Without a product of bf16 the weights are widened in registers, and x before.
struct Bf16Step {
  using Weight = bf16;
  using Input = float;
  // Widened weights need registers of their own, where those of float32 come from memory.
  static constexpr int64_t inputs = 2, sums = Vec::width == 8 ? 8 : kSums;

  template <int64_t Rows, int64_t Lanes>
  static void add(const float* x, int64_t stride, const bf16* weight, Vec (&sums)[Rows][Lanes]) {
#if defined(SGL_ISA_base)
    // Of sums in arrays g++ keeps more in registers this way round.
    for (int64_t j = 0; j < Lanes; ++j) {
      const Pairs pairs = Pairs::load(weight + 2 * j * Vec::width);
      const Vec even = pairs.even(), odd = pairs.odd();
      for (int64_t r = 0; r < Rows; ++r) {
        sums[r][j] = multiply_add(Vec::same(x[r * stride]), even, sums[r][j]);
        sums[r][j] = multiply_add(Vec::same(x[r * stride + 1]), odd, sums[r][j]);
      }
    }
#else
    Vec w[Lanes];
    for (int64_t j = 0; j < Lanes; ++j) w[j] = Pairs::load(weight + 2 * j * Vec::width).even();
    add_input<Rows, Lanes>(x, stride, w, sums);
    asm("" : "+r"(weight));  // the pairs are loaded again: there is no register to keep them in
    for (int64_t j = 0; j < Lanes; ++j) w[j] = Pairs::load(weight + 2 * j * Vec::width).odd();
    add_input<Rows, Lanes>(x + 1, stride, w, sums);
#endif
  }
};

#endif

// Some rows times one panel.
template <typename Step, typename T, typename Out>
struct Block {
  const Linear<T, Out>& call;
  const typename Step::Input* x;
  int64_t stride, steps, first_row, panel;

  template <int64_t Rows>
  void run() const {
    constexpr int64_t all = kPanel / Vec::width;
    // Where the sums of a whole panel do not fit in registers, it is walked in pieces of two.
    constexpr int64_t lanes = Rows * all <= Step::sums ? all : 2;
    using Weight = typename Step::Weight;
    const Weight* weight = static_cast<const Weight*>(call.weight) + panel * kPanel * steps * Step::inputs;
    for (int64_t piece = 0; piece < all; piece += lanes) {
      Vec sums[Rows][lanes];
      for (int64_t r = 0; r < Rows; ++r) {
        for (int64_t j = 0; j < lanes; ++j) sums[r][j] = Vec::zero();
      }
      const Weight* at = weight + piece * Vec::width * Step::inputs;
      for (int64_t step = 0; step < steps; ++step) {
        Step::template add<Rows, lanes>(x + step * Step::inputs, stride, at, sums);
        at += kPanel * Step::inputs;
      }
      for (int64_t r = 0; r < Rows; ++r) {
        write_sums(call, first_row + r, panel * kPanel + piece * Vec::width, sums[r]);
      }
    }
  }
};

template <typename Step, typename T, typename Out>
void multiply(const Linear<T, Out>& call, const typename Step::Input* x, int64_t stride, int64_t first_row, int64_t rows,
              Share panels) {
  const int64_t steps = (call.in + Step::inputs - 1) / Step::inputs;
  for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
    for_blocks(rows, kMostRows, [&](int64_t first, int64_t count) {
      with_rows<kMostRows>(count, Block<Step, T, Out>{call, x + first * stride, stride, steps, first_row + first, panel});
    });
  }
}

inline void copy_row(const bf16* from, float* to, int64_t count) {
  const int64_t whole = count - count % Vec::width;
  for (int64_t i = 0; i < whole; i += Vec::width) Vec::load(from + i).store(to + i);
  for (int64_t i = whole; i < count; ++i) to[i] = to_float(from[i]);
}

inline void copy_row(const bf16* from, bf16* to, int64_t count) { __builtin_memcpy(to, from, count * sizeof(bf16)); }

inline Share panels_of(int64_t outputs, int64_t part, int64_t parts) {
  return share_of((outputs + kPanel - 1) / kPanel, part, parts);
}

template <typename Out>
void multiply_bf16(const Linear<bf16, Out>& call, void* scratch, int64_t part, int64_t parts) {
  using Input = Bf16Step::Input;
  const Share panels = panels_of(call.outputs, part, parts);
  const int64_t even = call.in + call.in % 2;
  const bool as_it_is = sizeof(Input) == sizeof(bf16) && even == call.in;
  Input* copy = static_cast<Input*>(scratch);
  for (int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    const int64_t rows = call.rows - row < kRowsAtOnce ? call.rows - row : kRowsAtOnce;
    const bf16* x = call.x + row * call.x_stride;
    if (as_it_is) {
      multiply<Bf16Step>(call, reinterpret_cast<const Input*>(x), call.x_stride, row, rows, panels);
      continue;
    }
    for (int64_t r = 0; r < rows; ++r) {
      copy_row(x + r * call.x_stride, copy + r * even, call.in);
      if (even != call.in) copy[r * even + call.in] = Input{};
    }
    multiply<Bf16Step>(call, copy, even, row, rows, panels);
  }
}

}  // namespace

void linear_float(const Linear<float>& call, void*, int64_t part, int64_t parts) {
  const Share panels = panels_of(call.outputs, part, parts);
  for (int64_t row = 0; row < call.rows; row += kRowsAtOnce) {
    const int64_t rows = call.rows - row < kRowsAtOnce ? call.rows - row : kRowsAtOnce;
    multiply<FloatStep>(call, call.x + row * call.x_stride, call.x_stride, row, rows, panels);
  }
}

void linear_bf16(const Linear<bf16>& call, void* scratch, int64_t part, int64_t parts) {
  multiply_bf16(call, scratch, part, parts);
}

void linear_bf16(const Linear<bf16, float>& call, void* scratch, int64_t part, int64_t parts) {
  multiply_bf16(call, scratch, part, parts);
}

SGL_KERNEL_END
