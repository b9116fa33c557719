// Which instruction set the kernels run with: picked once, the best that the processor has, or the one that the
// environment variable SGL_KERNEL_ISA names (base, avx2, avx512, avx512_vnni_bf16).
#pragma once

namespace sgl {

enum class Isa { base, avx2, avx512, avx512_vnni_bf16 };

// A build for tests has some levels only, one bit for each, and none of their instructions: any processor runs it (x86_emulated.h).
#if defined(SGL_EMULATED_LEVELS)
constexpr bool is_emulated = true;
constexpr bool is_built(Isa level) { return ((SGL_EMULATED_LEVELS) >> static_cast<int>(level) & 1) != 0; }
#else
constexpr bool is_emulated = false;
constexpr bool is_built(Isa) { return true; }
#endif

// Throws std::runtime_error when the variable names an unknown level or one that this processor lacks.
Isa isa();
const char* isa_name(Isa level);
bool isa_supported(Isa level);

}  // namespace sgl
