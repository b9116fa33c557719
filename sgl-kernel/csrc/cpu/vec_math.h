// Functions of a row of floats that no instruction set has.
#pragma once

#include "vec.h"

SGL_KERNEL_BEGIN

// e^x for x <= 0; 0 below -87. x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial is that of
// the Cephes library for e^r, ln 2 is taken off in two parts.
inline Vec exp_of_negative(Vec x) {
  const Vec bound = Vec::same(-87.f);
  const Vec clamped = max(bound, x);
  const Vec n = whole(clamped * Vec::same(1.44269504088896341f));
  Vec r = multiply_add(n, Vec::same(-0.693359375f), clamped);
  r = multiply_add(n, Vec::same(2.12194440e-4f), r);
  Vec p = Vec::same(1.9875691500e-4f);
  p = multiply_add(p, r, Vec::same(1.3981999507e-3f));
  p = multiply_add(p, r, Vec::same(8.3334519073e-3f));
  p = multiply_add(p, r, Vec::same(4.1665795894e-2f));
  p = multiply_add(p, r, Vec::same(1.6666665459e-1f));
  p = multiply_add(p, r, Vec::same(5.0000001201e-1f));
  p = multiply_add(p * r, r, r + Vec::same(1.f));
  return zero_below(x, bound, times_power_of_two(p, n));
}

// x / (1 + e^-x), by the exponential of -|x|, which cannot overflow.
inline Vec silu(Vec x) {
  const Vec zero = Vec::zero();
  const Vec small = exp_of_negative(min(x, zero - x));
  const Vec above = zero_below(x, zero, Vec::same(1.f) - small) + small;  // 1, or below zero e^x
  return x * above / (small + Vec::same(1.f));
}

SGL_KERNEL_END
