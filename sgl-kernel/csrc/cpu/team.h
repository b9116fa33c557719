// The kernels' own threads. A call is cut into shares; the caller and the workers claim them one by one, so whoever is late or slow
// takes fewer of them.
//
// The caller waits only for shares that a worker holds, never for a worker that has not begun: where the other cores are taken it
// computes everything itself. Read by the torch_*.cpp; which part of a tensor a share is, is theirs to say, and no answer may depend
// on the number of shares.
#pragma once

#include <cstdint>

namespace sgl {

// How many of `threads` threads a call of so much work is given to: as many as each have enough of it, or the caller alone where
// waking or telling the others would cost more than they save. `nanoseconds` is what one thread needs, roughly.
int64_t threads_worth(int64_t threads, double nanoseconds);

// Calls run(body, share) for each share from 0 to `shares` - 1, on at most `threads` threads, the calling one included. Where the
// team is taken, by another thread or by a call around this one, the caller runs all of them. The first error that a share throws
// is thrown here, when no share runs any more; shares that had not begun then are left out.
void run_team(int64_t threads, int64_t shares, void (*run)(const void* body, int64_t share), const void* body);

// The same for anything that is called with the number of a share.
template <typename Body>
void for_shares(int64_t threads, int64_t shares, const Body& body) {
  run_team(
      threads, shares, [](const void* it, int64_t share) { (*static_cast<const Body*>(it))(share); }, &body);
}

// Calls run(begin, end) for pieces of `rows` rows; one piece where the work is small. `nanoseconds` is that of one row.
template <typename Body>
void for_rows(int64_t threads, int64_t rows, double nanoseconds, const Body& body) {
  const double all = nanoseconds * static_cast<double>(rows);
  const int64_t used = threads_worth(threads, all);
  const int64_t shares = used < rows ? used : rows;
  if (shares <= 1) return body(int64_t{0}, rows);
  for_shares(used, shares, [&](int64_t share) { body(rows * share / shares, rows * (share + 1) / shares); });
}

// While one of these lives, workers that have been woken stay awake: calls follow one another closely, as those of a list do.
class CallsFollow {
 public:
  CallsFollow();
  ~CallsFollow();
  CallsFollow(const CallsFollow&) = delete;
  CallsFollow& operator=(const CallsFollow&) = delete;
};

// What the team of this process has done so far.
struct TeamCounts {
  int64_t workers = 0;        // threads beside the callers'
  int64_t calls = 0;          // that were given to the team
  int64_t worker_shares = 0;  // that a worker claimed
  int64_t stalls = 0;         // calls that waited for a worker without a core
};
TeamCounts team_counts();

}  // namespace sgl
