// Recorded lists of kernel calls as torch sees them: begin, end, play, drop; and what the team that runs calls has done. A list is
// named by a number.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "record.h"
#include "team.h"

namespace sgl {

RecordedCalls*& recording() {
  thread_local RecordedCalls* calls = nullptr;
  return calls;
}

}  // namespace sgl

namespace {

// A list is held while it plays, so that dropping it meanwhile does no harm.
using Kept = std::shared_ptr<const sgl::RecordedCalls>;

std::mutex guard;
std::unordered_map<int64_t, Kept> lists;
int64_t next_number = 0;
thread_local std::unique_ptr<sgl::RecordedCalls> open_list;

void record_begin() {
  STD_TORCH_CHECK(open_list == nullptr, "record_begin: this thread records already; call record_end first");
  open_list = std::make_unique<sgl::RecordedCalls>();
  sgl::recording() = open_list.get();
}

int64_t record_end() {
  STD_TORCH_CHECK(open_list != nullptr, "record_end: this thread does not record; call record_begin first");
  sgl::recording() = nullptr;
  const Kept kept = std::make_shared<const sgl::RecordedCalls>(std::move(*open_list));
  open_list.reset();
  const std::lock_guard<std::mutex> lock(guard);
  lists[next_number] = kept;
  return next_number++;
}

Kept find(int64_t number, const char* name) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = lists.find(number);
  STD_TORCH_CHECK(found != lists.end(), name, ": there is no list ", number, "; it was dropped, or never recorded");
  return found->second;
}

int64_t record_count() { return open_list == nullptr ? 0 : static_cast<int64_t>(open_list->size()); }

void record_play(int64_t number) {
  STD_TORCH_CHECK(open_list == nullptr, "record_play: a list cannot be recorded into another");
  const Kept calls = find(number, "record_play");
  const sgl::CallsFollow awake;
  for (const auto& call : *calls) call();
}

int64_t record_size(int64_t number) { return static_cast<int64_t>(find(number, "record_size")->size()); }

std::vector<int64_t> team_counts() {
  const sgl::TeamCounts counts = sgl::team_counts();
  return {counts.workers, counts.calls, counts.worker_shares, counts.stalls};
}

void record_drop(int64_t number) {
  find(number, "record_drop");
  const std::lock_guard<std::mutex> lock(guard);
  lists.erase(number);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sgl_kernel, m) {
  m.def("record_begin() -> ()");
  m.def("record_end() -> int");
  m.def("record_count() -> int");
  m.def("record_play(int number) -> ()");
  m.def("record_size(int number) -> int");
  m.def("record_drop(int number) -> ()");
  m.def("team_counts() -> int[]");
}

STABLE_TORCH_LIBRARY_IMPL(sgl_kernel, CompositeExplicitAutograd, m) {
  m.impl("record_begin", TORCH_BOX(&record_begin));
  m.impl("record_end", TORCH_BOX(&record_end));
  m.impl("record_count", TORCH_BOX(&record_count));
  m.impl("record_play", TORCH_BOX(&record_play));
  m.impl("record_size", TORCH_BOX(&record_size));
  m.impl("record_drop", TORCH_BOX(&record_drop));
  m.impl("team_counts", TORCH_BOX(&team_counts));
}
