// What products with packed weights cost a thread, roughly, and how large a share of them is. Read by the torch_*.cpp that run linear
// kernels; not for the kernels' own files.
#pragma once

#include <cstdint>

namespace sgl {

// In a nanosecond one thread reads so many bytes of a weight, or makes so many products.
constexpr double kBytesANanosecond = 25;
constexpr double kProductsANanosecond = 200;
// Shares are short enough that a late thread holds nobody long, and rows of one many enough that reading the weight again costs little.
constexpr double kNanosecondsOfShare = 50e3;
constexpr int64_t kRowsOfShare = 96;

constexpr double linear_nanoseconds(double weight_bytes, double products) {
  const double reading = weight_bytes / kBytesANanosecond, making = products / kProductsANanosecond;
  return reading > making ? reading : making;
}

constexpr int64_t up_to(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// Shares of a call of so much work: a multiple of the threads, four each at most.
constexpr int64_t shares_worth(int64_t threads, double nanoseconds) {
  const int64_t wanted = up_to(static_cast<int64_t>(nanoseconds / kNanosecondsOfShare), threads);
  return wanted < threads ? threads : wanted < 4 * threads ? wanted : 4 * threads;
}

}  // namespace sgl
