// Which instruction set the kernels run with: picked once, the best that the processor has, or the one that the
// environment variable SGL_KERNEL_ISA names (base, avx2, avx512, avx512_vnni_bf16).
#pragma once

namespace sgl {

enum class Isa { base, avx2, avx512, avx512_vnni_bf16 };

// Throws std::runtime_error when the variable names an unknown level or one that this processor lacks.
Isa isa();
const char* isa_name(Isa level);
bool isa_supported(Isa level);

}  // namespace sgl
