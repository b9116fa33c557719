// Kernel calls that are kept in a list while a thread records, and run from it later without torch and without Python.
//
// An operator checks its arguments, describes the call in plain pointers and numbers, and hands it to `submit`. Whoever records
// keeps the memory alive that the pointers name.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace sgl {

using RecordedCalls = std::vector<std::function<void()>>;

// The list that this thread records into, or null.
RecordedCalls*& recording();

// Runs a call now, and keeps it where this thread records.
template <typename Call>
void submit(Call&& call) {
  if (RecordedCalls* calls = recording()) calls->emplace_back(call);
  call();
}

}  // namespace sgl
