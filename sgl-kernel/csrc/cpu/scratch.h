// Scratch memory of the calling thread, for whoever runs kernels. Not for the kernels' own files: it knows the standard library.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace sgl {

// Who asks for it: a kernel for what it needs itself, or a call that holds it while its shares run kernels on this thread too.
enum class Scratch { of_kernel, of_call };

// It grows to what the largest call needed, and is kept.
template <Scratch = Scratch::of_kernel>
inline void* scratch_of(int64_t bytes) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local int64_t size = 0;
  if (bytes > size) {
    const int64_t whole = (bytes + 4095) / 4096 * 4096;
    memory.reset(std::aligned_alloc(64, whole));
    size = memory == nullptr ? 0 : whole;
    if (memory == nullptr) throw std::bad_alloc();
  }
  return memory.get();
}

}  // namespace sgl
