// The shared segment and the steps in which ranks go through it; what the collectives in shm.cpp are made of.
//
// A rank has two buffers and writes them in turn, one a step. Step s is shown by `arrived = s`, after the data. A rank that has
// arrived at s has read all that it wanted of s - 1, so a buffer may be written again at s + 2 once every peer arrived at s + 1:
// one counter a rank is enough, and an exchange costs one wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "shm.h"

namespace sgl {

// What a rank shows of its call, beside the data: peers compare it with their own.
struct ShmCall {
  enum class Kind : uint32_t { none, all_reduce, all_gather, reduce_scatter, broadcast };
  Kind kind;
  Number number;
  uint32_t detail;  // how it is reduced, or the rank that sends
  uint32_t unused;
  int64_t bytes;
  uint64_t split;  // of the numbers over the ranks, as a hash

  bool operator==(const ShmCall&) const = default;
};

enum class ShmEnd : uint32_t { none, left, failed };

// What one rank writes and the others read; a cache line and the one that is fetched with it.
struct alignas(128) ShmSeat {
  std::atomic<uint32_t> arrived;   // at this step; compared so that it may wrap around
  std::atomic<uint32_t> sleepers;  // ranks that sleep until `arrived` changes
  std::atomic<ShmEnd> end;
  std::atomic<uint32_t> ended_at;  // the last step that it took part in; valid where `end` is set
  std::atomic<int64_t> pid;
  std::atomic<int64_t> born_at;  // start of the process: its number may be given to another
};

struct ShmGroup {
  char* base;
  int64_t size, rank, world_size, part_bytes;
  std::vector<int64_t> names;
  double timeout_s;
  uint32_t step;
  std::atomic<bool> busy;
  bool failed;

  ShmSeat& seat(int64_t of) const;
  ShmCall& shown(int64_t of) const;  // in this step
  char* part(int64_t of) const;      // in this step
};

// Begin a step: its number, and the own buffer, once nobody reads it any more.
char* shm_begin(ShmGroup& group, const ShmCall& call);
// The data of this step lies in the own buffer.
void shm_arrive(ShmGroup& group);
// Wait until the data of a peer lies in its buffer, and compare calls.
void shm_meet(ShmGroup& group, int64_t peer, const ShmCall& call);
// No further call can succeed here; peers that wait for this rank are told.
void shm_fail(ShmGroup& group);

std::string shm_text(const ShmCall& call);

}  // namespace sgl
