// The collectives over the steps of a shared segment. Each is cut into steps that fit into a rank's buffer.
#include "shm.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pick.h"
#include "shm_segment.h"

namespace sgl {

namespace {

// Pieces of one buffer begin at a multiple of this.
constexpr int64_t kAlign = 64;

int64_t width_of(Number number) {
  switch (number) {
    case Number::int64:
    case Number::float64: return 8;
    case Number::int32:
    case Number::float32: return 4;
    case Number::int16:
    case Number::float16:
    case Number::bfloat16: return 2;
    default: return 1;
  }
}

void reduce(const void* const* pieces, int64_t num_pieces, void* out, int64_t count, Number number, Reduce op) {
  using Kernel = void (*)(const Reduction&);
  const Kernel kernel = SGL_PICK(Kernel, reduce_pieces);
  kernel(Reduction{pieces, out, num_pieces, count, number, op});
}

// Run a call's steps, alone; where one fails the group has failed.
template <typename Steps>
void run(ShmGroup& group, Steps steps) {
  if (group.busy.exchange(true)) throw std::runtime_error("two threads of one rank are in a collective of the same group");
  struct Done {
    ShmGroup& group;
    ~Done() { group.busy.store(false); }
  } done{group};
  if (group.failed) throw std::runtime_error("an earlier collective of this group failed");
  try {
    steps();
  } catch (...) {
    shm_fail(group);
    throw;
  }
}

int64_t sum_of(const int64_t* counts, int64_t until) {
  int64_t sum = 0;
  for (int64_t i = 0; i < until; ++i) sum += counts[i];
  return sum;
}

// FNV-1a over the counts.
uint64_t hash_of(const int64_t* counts, int64_t n) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (int64_t i = 0; i < n; ++i) hash = (hash ^ static_cast<uint64_t>(counts[i])) * 0x100000001b3u;
  return hash;
}

// How much of `total` is left from `first` on, at most `room`.
int64_t here(int64_t total, int64_t first, int64_t room) { return std::max<int64_t>(0, std::min(total - first, room)); }

}  // namespace

void shm_all_reduce(const ShmAllReduce& call) {
  ShmGroup& group = *call.group;
  const int64_t width = width_of(call.number), room = group.part_bytes / width;
  const ShmCall shown{ShmCall::Kind::all_reduce, call.number, static_cast<uint32_t>(call.op), 0, call.count * width, 0};
  run(group, [&] {
    const void* pieces[kMostShmRanks];
    for (int64_t first = 0; first < call.count; first += room) {
      const int64_t count = here(call.count, first, room);
      const char* in = static_cast<const char*>(call.in) + first * width;
      std::memcpy(shm_begin(group, shown), in, static_cast<size_t>(count * width));
      shm_arrive(group);
      for (int64_t rank = 0; rank < group.world_size; ++rank) {
        if (rank != group.rank) shm_meet(group, rank, shown);
        pieces[rank] = rank == group.rank ? in : group.part(rank);
      }
      reduce(pieces, group.world_size, static_cast<char*>(call.out) + first * width, count, call.number, call.op);
    }
  });
}

void shm_all_gather(const ShmAllGather& call) {
  ShmGroup& group = *call.group;
  const int64_t total = sum_of(call.counts, group.world_size), own_first = sum_of(call.counts, group.rank);
  const int64_t most = *std::max_element(call.counts, call.counts + group.world_size), room = group.part_bytes / call.width;
  const ShmCall shown{ShmCall::Kind::all_gather, call.number, 0, 0, total * call.width, hash_of(call.counts, group.world_size)};
  const char* in = static_cast<const char*>(call.in);
  char* out = static_cast<char*>(call.out);
  run(group, [&] {
    std::memcpy(out + own_first * call.width, in, static_cast<size_t>(call.counts[group.rank] * call.width));
    for (int64_t first = 0; first < most; first += room) {
      const int64_t own = here(call.counts[group.rank], first, room) * call.width;
      char* buffer = shm_begin(group, shown);
      if (own > 0) std::memcpy(buffer, in + first * call.width, static_cast<size_t>(own));
      shm_arrive(group);
      int64_t at = first;
      for (int64_t rank = 0; rank < group.world_size; at += call.counts[rank++]) {
        if (rank == group.rank) continue;
        shm_meet(group, rank, shown);
        const int64_t size = here(call.counts[rank], first, room) * call.width;
        if (size > 0) std::memcpy(out + at * call.width, group.part(rank), static_cast<size_t>(size));
      }
    }
  });
}

void shm_reduce_scatter(const ShmReduceScatter& call) {
  ShmGroup& group = *call.group;
  const int64_t width = width_of(call.number), total = sum_of(call.counts, group.world_size);
  const int64_t most = *std::max_element(call.counts, call.counts + group.world_size);
  // A buffer holds a piece for every other rank.
  const int64_t others = std::max<int64_t>(1, group.world_size - 1);
  const int64_t piece_bytes = group.part_bytes / others / kAlign * kAlign, room = piece_bytes / width;
  const auto piece_for = [&](int64_t rank, int64_t from) { return (rank < from ? rank : rank - 1) * piece_bytes; };
  const ShmCall shown{ShmCall::Kind::reduce_scatter, call.number, static_cast<uint32_t>(call.op), 0, total * width,
                      hash_of(call.counts, group.world_size)};
  const char* in = static_cast<const char*>(call.in);
  run(group, [&] {
    const void* pieces[kMostShmRanks];
    for (int64_t first = 0; first < most; first += room) {
      char* buffer = shm_begin(group, shown);
      int64_t at = first;
      for (int64_t rank = 0; rank < group.world_size; at += call.counts[rank++]) {
        const int64_t size = here(call.counts[rank], first, room) * width;
        if (rank == group.rank) {
          pieces[rank] = in + at * width;
        } else if (size > 0) {
          std::memcpy(buffer + piece_for(rank, group.rank), in + at * width, static_cast<size_t>(size));
        }
      }
      shm_arrive(group);
      for (int64_t rank = 0; rank < group.world_size; ++rank) {
        if (rank == group.rank) continue;
        shm_meet(group, rank, shown);
        pieces[rank] = group.part(rank) + piece_for(group.rank, rank);
      }
      const int64_t own = here(call.counts[group.rank], first, room);
      if (own > 0) reduce(pieces, group.world_size, static_cast<char*>(call.out) + first * width, own, call.number, call.op);
    }
  });
}

void shm_broadcast(const ShmBroadcast& call) {
  ShmGroup& group = *call.group;
  const ShmCall shown{ShmCall::Kind::broadcast, call.number, static_cast<uint32_t>(call.src), 0, call.bytes, 0};
  run(group, [&] {
    for (int64_t first = 0; first < call.bytes; first += group.part_bytes) {
      const size_t size = static_cast<size_t>(here(call.bytes, first, group.part_bytes));
      char* data = static_cast<char*>(call.data) + first;
      char* buffer = shm_begin(group, shown);
      if (group.rank == call.src) std::memcpy(buffer, data, size);
      shm_arrive(group);
      if (group.rank == call.src) continue;
      shm_meet(group, call.src, shown);
      std::memcpy(data, group.part(call.src), size);
    }
  });
}

}  // namespace sgl
