#include "shm_segment.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace sgl {

namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free,
              "the segment is shared by processes, and a lock would be one process's own");

constexpr int64_t kPage = 4096;
// A rank waits in three ways: about a microsecond in a loop, then giving its core to whoever wants it, then asleep until it is
// woken. Measured on two cores, a waking costs 30 to 50 microseconds, which the second way saves where a peer is only a little
// late; on one core a longer first way is only time that the peer does not get (with 2,000 spins a call took 67 microseconds there
// instead of 10).
constexpr int kSpins = 40;
constexpr int kYields = 200;
// How often a sleeping rank looks whether the process that it waits for is still there.
constexpr double kLookEvery = 0.2;

struct Head {
  std::atomic<uint64_t> cookie;
};

int64_t rounded_up(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

int64_t calls_at(int64_t world_size) { return static_cast<int64_t>(sizeof(ShmSeat)) * (1 + world_size); }

// Each shown call on a cache line of its own.
constexpr int64_t kCallBytes = 64;
static_assert(sizeof(ShmCall) <= kCallBytes);

int64_t parts_at(int64_t world_size) { return rounded_up(calls_at(world_size) + 2 * world_size * kCallBytes, kPage); }

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
  timespec limit;
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// The start of a process in the clock ticks of /proc/<pid>/stat; 0 where it has ended (also when nobody has collected it yet).
int64_t born_at(int64_t pid) {
  char path[64], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%lld/stat", static_cast<long long>(pid));
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) return 0;
  const size_t length = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[length] = '\0';
  // The name in parentheses may hold anything, so the fields are counted from the last parenthesis on.
  const char* at = std::strrchr(text, ')');
  char state = 0;
  long long start = 0;
  if (at == nullptr || std::sscanf(at + 1,
                                   " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %lld",
                                   &state, &start) != 2) {
    return 0;
  }
  return state == 'Z' || state == 'X' ? 0 : start;
}

bool reached(const ShmSeat& seat, uint32_t step) {
  return static_cast<int32_t>(seat.arrived.load(std::memory_order_acquire) - step) >= 0;
}

[[noreturn]] void refuse(const ShmGroup& group, int64_t peer, const std::string& what) {
  throw std::runtime_error("world rank " + std::to_string(group.names[peer]) + " " + what);
}

// Whether the peer is there, at this step or later; an error where it ended before.
bool is_here(const ShmGroup& group, int64_t peer, uint32_t step, const ShmCall& call) {
  const ShmSeat& seat = group.seat(peer);
  // In this order: a peer shows its last data before it leaves.
  const ShmEnd end = seat.end.load(std::memory_order_acquire);
  const bool here = reached(seat, step);
  if (end == ShmEnd::none || (here && end == ShmEnd::left)) return here;
  if (here && static_cast<int32_t>(seat.ended_at.load(std::memory_order_acquire) - step) > 0) return true;
  refuse(group, peer, (end == ShmEnd::left ? "left the group before " : "gave up in or before ") + shm_text(call));
}

void await(const ShmGroup& group, int64_t peer, uint32_t step, const ShmCall& call) {
  ShmSeat& seat = group.seat(peer);
  for (int i = 0; i < kSpins; ++i) {
    if (is_here(group, peer, step, call)) return;
    __builtin_ia32_pause();
  }
  for (int i = 0; i < kYields; ++i) {
    if (is_here(group, peer, step, call)) return;
    sched_yield();
  }
  const double deadline = now() + group.timeout_s;
  double look_at = now() + kLookEvery;
  while (true) {
    seat.sleepers.fetch_add(1);
    const uint32_t seen = seat.arrived.load();
    bool here;
    try {
      here = is_here(group, peer, step, call);
    } catch (...) {
      seat.sleepers.fetch_sub(1);
      throw;
    }
    const double time = now();
    if (!here && time < deadline) sleep_while(seat.arrived, seen, std::min(kLookEvery, deadline - time));
    seat.sleepers.fetch_sub(1);
    if (here || is_here(group, peer, step, call)) return;
    if (now() >= deadline) {
      char limit[32];
      std::snprintf(limit, sizeof(limit), "%g", group.timeout_s);
      refuse(group, peer, "did not come to " + shm_text(call) + " within " + limit + " s");
    }
    if (now() < look_at) continue;
    look_at = now() + kLookEvery;
    // Looked at again after it is gone: its last data may have come in between.
    if (born_at(seat.pid) != seat.born_at && !is_here(group, peer, step, call)) {
      refuse(group, peer, "ended before " + shm_text(call) + ": process " + std::to_string(seat.pid) + " is gone");
    }
  }
}

const char* number_text(Number number) {
  constexpr const char* kNames[] = {"bytes", "bool",    "uint8",    "int8",    "int16",  "int32",
                                    "int64", "float16", "bfloat16", "float32", "float64"};
  return kNames[static_cast<uint32_t>(number)];
}

}  // namespace

ShmSeat& ShmGroup::seat(int64_t of) const {
  return *reinterpret_cast<ShmSeat*>(base + static_cast<int64_t>(sizeof(ShmSeat)) * (1 + of));
}

ShmCall& ShmGroup::shown(int64_t of) const {
  return *reinterpret_cast<ShmCall*>(base + calls_at(world_size) + (2 * of + (step & 1)) * kCallBytes);
}

char* ShmGroup::part(int64_t of) const { return base + parts_at(world_size) + (2 * of + (step & 1)) * part_bytes; }

std::string shm_text(const ShmCall& call) {
  constexpr const char* kKinds[] = {"nothing", "all_reduce", "all_gather", "reduce_scatter", "broadcast"};
  constexpr const char* kOps[] = {"sum", "max", "min"};
  std::string text = kKinds[static_cast<uint32_t>(call.kind)];
  if (call.kind == ShmCall::Kind::broadcast) text += " from rank " + std::to_string(call.detail) + " of the group";
  if (call.kind == ShmCall::Kind::all_reduce || call.kind == ShmCall::Kind::reduce_scatter) {
    text += std::string(" (") + kOps[call.detail] + ")";
  }
  return text + " of " + std::to_string(call.bytes) + " bytes of " + number_text(call.number);
}

char* shm_begin(ShmGroup& group, const ShmCall& call) {
  ++group.step;
  for (int64_t peer = 0; peer < group.world_size; ++peer) {
    if (peer != group.rank) await(group, peer, group.step - 1, call);
  }
  group.shown(group.rank) = call;
  return group.part(group.rank);
}

void shm_arrive(ShmGroup& group) {
  ShmSeat& own = group.seat(group.rank);
  // Both in one order with the sleeper's, who counts itself before it looks: one of the two notices the other.
  own.arrived.store(group.step);
  if (own.sleepers.load() != 0) wake_all(own.arrived);
}

void shm_meet(ShmGroup& group, int64_t peer, const ShmCall& call) {
  await(group, peer, group.step, call);
  const ShmCall& other = group.shown(peer);
  if (other == call) return;
  const std::string same = shm_text(other) == shm_text(call) ? ", split over the ranks in another way" : "";
  refuse(group, peer, "is in " + shm_text(other) + ", and world rank " + std::to_string(group.names[group.rank]) + " in " +
                          shm_text(call) + same);
}

void shm_fail(ShmGroup& group) {
  ShmSeat& own = group.seat(group.rank);
  group.failed = true;
  own.ended_at.store(group.step);
  own.end.store(ShmEnd::failed);
  wake_all(own.arrived);
}

int64_t shm_segment_bytes(int64_t world_size, int64_t part_bytes) {
  return parts_at(world_size) + 2 * world_size * part_bytes;
}

ShmGroup* shm_attach(int fd, int64_t rank, const std::vector<int64_t>& names, int64_t part_bytes, uint64_t cookie,
                     double timeout_s) {
  const int64_t world_size = static_cast<int64_t>(names.size());
  const int64_t size = shm_segment_bytes(world_size, part_bytes);
  const int64_t birth = born_at(getpid());
  if (birth == 0) throw std::runtime_error("shared segment: /proc does not show this process, so peers could not notice its end");
  struct stat found;
  if (fstat(fd, &found) != 0) throw std::runtime_error(std::string("shared segment: ") + std::strerror(errno));
  if (found.st_size < size) {
    throw std::runtime_error("shared segment: has " + std::to_string(found.st_size) + " bytes and needs " + std::to_string(size));
  }
  void* base = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) throw std::runtime_error(std::string("shared segment: ") + std::strerror(errno));
  std::atomic<uint64_t>& mark = static_cast<Head*>(base)->cookie;
  if (rank == 0) mark.store(cookie);
  if (mark.load() != cookie) {
    munmap(base, static_cast<size_t>(size));
    throw std::runtime_error("shared segment: it is not the one of rank 0");
  }
  ShmGroup* group = new ShmGroup{static_cast<char*>(base), size, rank, world_size, part_bytes, names, timeout_s, 0, {false}, false};
  ShmSeat& own = group->seat(rank);
  own.pid.store(getpid());
  own.born_at.store(birth);
  return group;
}

void shm_detach(ShmGroup* group) {
  ShmSeat& own = group->seat(group->rank);
  if (!group->failed) {
    own.ended_at.store(group->step);
    own.end.store(ShmEnd::left);
    wake_all(own.arrived);
  }
  munmap(group->base, static_cast<size_t>(group->size));
  delete group;
}

int64_t shm_rank(const ShmGroup* group) { return group->rank; }

int64_t shm_world_size(const ShmGroup* group) { return group->world_size; }

}  // namespace sgl
