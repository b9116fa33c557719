// Collectives between the ranks of one host over a segment of memory that all of them have mapped.
//
// Every collective is a plain struct and one function that takes it, so that a recorded list of calls can hold it and run it
// without Python or torch. All ranks of a group make the same calls in the same order; none of these functions may run in two
// threads of a group at once. A failure is a `std::runtime_error` that names the world rank; the group is of no use afterwards,
// and its other ranks fail, too, instead of waiting for their limit.
#pragma once

#include <stdint.h>

#include <vector>

#include "ops.h"

namespace sgl {

constexpr int64_t kMostShmRanks = 64;

// One rank's mapping of the segment and its place in the sequence of calls.
struct ShmGroup;

// Bytes of the segment of so many ranks, `part_bytes` for each of the two buffers that a rank writes in turn.
int64_t shm_segment_bytes(int64_t world_size, int64_t part_bytes);

// Map the segment behind `fd`, which stays the caller's. Rank 0 comes first and marks it with `cookie`; the others check that
// they see the mark. `names` are the world ranks that errors mention. `timeout_s`: how long a call waits for a peer.
ShmGroup* shm_attach(int fd, int64_t rank, const std::vector<int64_t>& names, int64_t part_bytes, uint64_t cookie,
                     double timeout_s);

// Tell the peers that no further call comes from here, and unmap. What was sent before is still there for them.
void shm_detach(ShmGroup* group);

int64_t shm_rank(const ShmGroup* group);
int64_t shm_world_size(const ShmGroup* group);

// out[count] = in[count] of all ranks, reduced in rank order; `in` and `out` may be the same.
struct ShmAllReduce {
  ShmGroup* group;
  const void* in;
  void* out;
  int64_t count;
  Number number;
  Reduce op;
};
void shm_all_reduce(const ShmAllReduce& call);

// out = what the ranks bring, one after another: `counts[r]` numbers of `width` bytes from rank r.
struct ShmAllGather {
  ShmGroup* group;
  const void* in;
  void* out;
  const int64_t* counts;
  int64_t width;
  Number number;
};
void shm_all_gather(const ShmAllGather& call);

// Every rank brings a piece for each rank, `counts[r]` numbers for rank r, one after another; out = the own pieces of all
// ranks, reduced in rank order.
struct ShmReduceScatter {
  ShmGroup* group;
  const void* in;
  void* out;
  const int64_t* counts;
  Number number;
  Reduce op;
};
void shm_reduce_scatter(const ShmReduceScatter& call);

// data[bytes] of rank `src` on all ranks. `src` does not wait for the others, up to one buffer.
struct ShmBroadcast {
  ShmGroup* group;
  void* data;
  int64_t bytes, src;
  Number number;
};
void shm_broadcast(const ShmBroadcast& call);

}  // namespace sgl
