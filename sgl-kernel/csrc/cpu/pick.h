// The step from a kernel's name to the one of the picked instruction set.
#pragma once

#include "isa.h"
#include "ops.h"

namespace sgl {

template <typename Kernel>
Kernel pick(Kernel base, Kernel avx2, Kernel avx512, Kernel avx512_vnni_bf16) {
  switch (isa()) {
    case Isa::avx512_vnni_bf16: return avx512_vnni_bf16;
    case Isa::avx512: return avx512;
    case Isa::avx2: return avx2;
    default: return base;
  }
}

}  // namespace sgl

// A kernel of a level; null where this build leaves the level out, so that the linker does not look for it.
#define SGL_OF(Kernel, level, name) \
  (::sgl::is_built(::sgl::Isa::level) ? static_cast<Kernel>(::sgl::level::name) : static_cast<Kernel>(nullptr))

// `Kernel` is the type of a pointer to it: kernels of one name may be there for several types.
#define SGL_PICK(Kernel, name)                                                                                     \
  ::sgl::pick<Kernel>(SGL_OF(Kernel, base, name), SGL_OF(Kernel, avx2, name), SGL_OF(Kernel, avx512, name), \
                      SGL_OF(Kernel, avx512_vnni_bf16, name))
