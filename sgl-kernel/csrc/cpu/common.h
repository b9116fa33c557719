// What every kernel source shares: the namespace of the instruction set it is compiled for. No torch, no standard library.
#pragma once

#include <stdint.h>

#ifndef SGL_ISA
#error "SGL_ISA names the instruction set: base, avx2, avx512 or avx512_vnni_bf16 (see CMakeLists.txt)"
#endif

#define SGL_KERNEL_BEGIN namespace sgl { namespace SGL_ISA {
#define SGL_KERNEL_END } }
