#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <exception>
#include <utility>

namespace sgl {

namespace {

constexpr int64_t kMostThreads = 1024;
constexpr int64_t kMostShares = 0xffff;
// Below this much work a call stays with its caller: handing over a share and hearing of its end takes 0.3 microseconds
// on quiet cores, one on busy ones; waking one costs the caller a few microseconds, and the worker begins some tens later.
constexpr double kWorthTelling = 3e3;
constexpr double kWorthWaking = 25e3;
// Ticks of the processor's clock (2 to 4 a nanosecond). A worker without work looks for it in a loop, then giving its core to
// whoever wants it, then it sleeps. The second way spans the gap between two calls from Python; in a list it lasts until the list
// ends, or until one of its entries waits for something else.
constexpr uint64_t kLoopFor = 30'000;
constexpr uint64_t kYieldFor = 300'000;
constexpr uint64_t kYieldForInList = 15'000'000;
// A worker that holds a share for so much longer than the caller took for all of its own has lost its core in the middle of it.
// Then the caller works alone for a multiple of what it waited: on a busy machine that bounds what the team can cost. With eight
// times, the short slices that others take on a machine of two cores cost most of what the second thread gains.
constexpr uint64_t kStall = 300'000;
constexpr uint64_t kAloneFactor = 2;
constexpr uint64_t kMostAlone = 300'000'000;

uint64_t ticks() { return __builtin_ia32_rdtsc(); }

void sleep_while(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// What may still be claimed: which workers may (those below `workers`), the next share, and how many there are. One word, so that
// a share is claimed by one exchange. Whoever claims one reads the job after that, and the job cannot end before: so it does not
// matter if the word was that of an earlier job when the claim began.
struct Ticket {
  uint64_t word;
  static Ticket of(int64_t workers, int64_t next, int64_t shares) {
    return Ticket{static_cast<uint64_t>(workers) << 32 | static_cast<uint64_t>(next) << 16 | static_cast<uint64_t>(shares)};
  }
  int64_t workers() const { return static_cast<int64_t>(word >> 32); }
  int64_t next() const { return static_cast<int64_t>(word >> 16 & 0xffff); }
  bool is_open() const { return (word >> 16 & 0xffff) < (word & 0xffff); }
  Ticket after_claim() const { return Ticket{word + (1 << 16)}; }
};

struct Job {
  void (*run)(const void* body, int64_t share);
  const void* body;
};

// Never freed: a worker may look at it until the process ends.
struct Team {
  alignas(64) std::atomic<uint64_t> ticket{0};
  Job job{};
  alignas(64) std::atomic<uint32_t> done{0};  // shares that workers have ended
  std::atomic<bool> caller_sleeps{false};
  std::atomic<bool> has_failed{false};
  std::exception_ptr error;  // written by who set has_failed, read by the caller when all is done
  alignas(64) std::atomic<uint32_t> bell{0};
  std::atomic<bool> may_sleep{false};  // whether a worker may be asleep since the bell was last rung
  std::atomic<uint64_t> alone_until{0};
  std::atomic<int64_t> num_workers{0}, num_calls{0}, num_worker_shares{0}, num_stalls{0};  // written by who holds the team

  // The number of a share, or -1 where none is left for this worker.
  int64_t claim(int64_t worker) {
    Ticket seen{ticket.load(std::memory_order_acquire)};
    while (seen.is_open() && worker < seen.workers()) {
      if (ticket.compare_exchange_weak(seen.word, seen.after_claim().word, std::memory_order_acq_rel, std::memory_order_acquire)) {
        return seen.next();
      }
    }
    return -1;
  }

  bool has_share(int64_t worker) const {
    const Ticket seen{ticket.load()};
    return seen.is_open() && worker < seen.workers();
  }

  void run_share(int64_t share) {
    if (has_failed.load(std::memory_order_relaxed)) return;
    try {
      job.run(job.body, share);
    } catch (...) {
      if (!has_failed.exchange(true)) error = std::current_exception();
    }
  }

  void end_share() {
    done.fetch_add(1);
    if (caller_sleeps.load()) wake_all(done);
  }

  void ring() {
    if (!may_sleep.load()) return;
    may_sleep.store(false);
    bell.fetch_add(1);
    wake_all(bell);
  }
};

// One caller has the team; it is made, and grows, while it is held.
std::atomic<bool> is_held{false};
std::atomic<Team*> the_team{nullptr};
std::atomic<int64_t> num_playing{0};

// Waits until this worker may claim a share.
void await_share(Team& team, int64_t worker) {
  const uint64_t since = ticks();
  while (true) {
    for (int i = 0; i < 64; ++i) {
      if (team.has_share(worker)) return;
      __builtin_ia32_pause();
    }
    const uint64_t waited = ticks() - since;
    if (waited < kLoopFor) continue;
    if (waited < (num_playing.load(std::memory_order_relaxed) > 0 ? kYieldForInList : kYieldFor)) {
      sched_yield();
      continue;
    }
    const uint32_t seen = team.bell.load();
    team.may_sleep.store(true);
    if (team.has_share(worker)) return;
    sleep_while(team.bell, seen);
    return;  // also when woken for nothing, or for calls that follow
  }
}

struct Start {
  Team* team;
  int64_t worker;
};

void* work(void* given) {
  const Start start = *static_cast<Start*>(given);
  delete static_cast<Start*>(given);
  while (true) {
    const int64_t share = start.team->claim(start.worker);
    if (share < 0) {
      await_share(*start.team, start.worker);
      continue;
    }
    start.team->run_share(share);
    start.team->end_share();
  }
}

// Signals are for the threads of the program, errors of the processor excepted. Nobody joins a worker: it holds nothing that the end
// of the process would have to give back.
bool start_worker(Team& team) {
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&blocked, signal);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  Start* start = new Start{&team, team.num_workers.load()};
  pthread_t thread;
  const bool started = pthread_create(&thread, nullptr, work, start) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!started) {
    delete start;
    return false;
  }
  pthread_setname_np(thread, "sgl_team");
  pthread_detach(thread);
  ++team.num_workers;
  return true;
}

// A child process has no workers: it makes a team of its own when it needs one.
void forget_after_fork() {
  the_team.store(nullptr);
  num_playing.store(0);
  is_held.store(false);
}

// The team, with as many workers as the system gives up to `wanted`. Called by who holds it.
Team& team_of(int64_t wanted) {
  Team* team = the_team.load(std::memory_order_acquire);
  if (team == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_after_fork);
    static_cast<void>(registered);
    team = new Team;
    the_team.store(team, std::memory_order_release);
  }
  while (team->num_workers < wanted && start_worker(*team)) {
  }
  return *team;
}

// Waits for the shares that workers hold: in a loop, then giving the core away, then asleep.
void await_done(Team& team, uint32_t wanted) {
  const uint64_t since = ticks();
  while (true) {
    for (int i = 0; i < 64; ++i) {
      if (team.done.load(std::memory_order_acquire) == wanted) return;
      __builtin_ia32_pause();
    }
    const uint64_t waited = ticks() - since;
    if (waited < kLoopFor) continue;
    if (waited < 10 * kYieldFor) {
      sched_yield();
      continue;
    }
    team.caller_sleeps.store(true);
    for (uint32_t seen = team.done.load(); seen != wanted; seen = team.done.load()) sleep_while(team.done, seen);
    team.caller_sleeps.store(false);
    return;
  }
}

void run_held(Team& team, int64_t workers, int64_t shares, const Job& job) {
  const uint64_t begun = ticks();
  team.job = job;
  team.done.store(0, std::memory_order_relaxed);
  team.ticket.store(Ticket::of(workers, 1, shares).word);  // the first share is the caller's
  team.ring();
  team.num_calls.fetch_add(1, std::memory_order_relaxed);
  int64_t own = 0;
  for (int64_t share = 0; share >= 0; share = team.claim(0)) {
    team.run_share(share);
    ++own;
  }
  if (own == shares) return;
  team.num_worker_shares.fetch_add(shares - own, std::memory_order_relaxed);
  const uint64_t ended = ticks();
  await_done(team, static_cast<uint32_t>(shares - own));
  const uint64_t now = ticks(), waited = now - ended;
  if (waited < kStall + (ended - begun)) return;
  team.num_stalls.fetch_add(1, std::memory_order_relaxed);
  team.alone_until.store(now + std::min(kAloneFactor * waited, kMostAlone));
}

}  // namespace

int64_t threads_worth(int64_t threads, double nanoseconds) {
  if (threads <= 1 || nanoseconds < kWorthTelling || is_held.load(std::memory_order_relaxed)) return 1;
  const Team* team = the_team.load(std::memory_order_acquire);
  if (team != nullptr && ticks() < team->alone_until.load(std::memory_order_relaxed)) return 1;
  const bool is_awake = team != nullptr && !team->may_sleep.load(std::memory_order_relaxed);
  const bool is_worth_it = is_awake || nanoseconds >= kWorthWaking || num_playing.load(std::memory_order_relaxed) > 0;
  return is_worth_it ? std::min(threads, 1 + static_cast<int64_t>(nanoseconds / kWorthTelling)) : 1;
}

void run_team(int64_t threads, int64_t shares, void (*run)(const void* body, int64_t share), const void* body) {
  const auto run_alone = [&] {
    for (int64_t share = 0; share < shares; ++share) run(body, share);
  };
  if (threads <= 1 || shares <= 1 || shares > kMostShares || is_held.exchange(true)) return run_alone();
  std::exception_ptr error;
  {
    struct Release {
      ~Release() { is_held.store(false); }
    } release;
    Team& team = team_of(std::min(threads, kMostThreads) - 1);
    if (team.num_workers == 0) return run_alone();
    run_held(team, std::min(threads - 1, team.num_workers.load()), shares, Job{run, body});
    if (team.has_failed.load()) {
      error = std::exchange(team.error, nullptr);
      team.has_failed.store(false);
    }
  }
  if (error) std::rethrow_exception(error);
}

CallsFollow::CallsFollow() { num_playing.fetch_add(1); }

CallsFollow::~CallsFollow() { num_playing.fetch_sub(1); }

TeamCounts team_counts() {
  const Team* team = the_team.load(std::memory_order_acquire);
  if (team == nullptr) return {};
  return {team->num_workers.load(), team->num_calls.load(), team->num_worker_shares.load(), team->num_stalls.load()};
}

}  // namespace sgl
