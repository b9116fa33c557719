// The form of quantized blocks as an operator's argument. For the files that know torch.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include "ops.h"

namespace sgl {

inline Blocks block_form(const char* name, int64_t number) {
  STD_TORCH_CHECK(number >= 0 && number < kBlockForms, name, ": form is 0 to ", kBlockForms - 1, ", got ", number);
  return static_cast<Blocks>(number);
}

}  // namespace sgl
