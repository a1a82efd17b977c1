#include "thread_pool.hpp"

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace tandem {
namespace {

// Ticket: job number (24 bits) | number of tasks (20) | next task (20).
constexpr int kTaskBits = 20;
constexpr std::uint64_t kTaskMask = (1u << kTaskBits) - 1;
constexpr std::int64_t kMostTasks = kTaskMask;

constexpr std::uint64_t next_task(std::uint64_t ticket) { return ticket & kTaskMask; }
constexpr std::uint64_t num_tasks(std::uint64_t ticket) { return (ticket >> kTaskBits) & kTaskMask; }
constexpr std::uint64_t job_number(std::uint64_t ticket) { return ticket >> (2 * kTaskBits); }

// How long a thread spins before it sleeps. After a job the time is short, so that other programs
// hardly lose any; after an announcement it is longer than preparing a job takes.
constexpr std::chrono::microseconds kAfterJob{10};
constexpr std::chrono::microseconds kAfterWake{100};

// Between two looks at the clock.
constexpr int kSpins = 16;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

void wait_until_zero(const std::atomic<std::int64_t>& count) {
  for (int spin = 0; count.load(std::memory_order_acquire) != 0; ++spin) {
    if (spin < kSpins * kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

ThreadPool::ThreadPool(int num_threads) {
  try {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    close();
    throw std::runtime_error(
        "only " + std::to_string(workers_.size() + 1) + " of " + std::to_string(num_threads) +
        " compute threads can be started (" + error.what() +
        "); end other programs, raise the limits of threads and memory (ulimit -u, -v), or set "
        "fewer threads");
  }
}

ThreadPool::~ThreadPool() {
  if (home_.is_here())
    close();
  else
    static_cast<void>(std::make_unique<std::vector<std::thread>>(std::move(workers_)).release());
}

void ThreadPool::close() {
  is_closing_.store(true);
  wake_.fetch_add(1);
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::bind_workers([[maybe_unused]] const std::vector<int>& processors) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int processor : processors)
    if (processor >= 0 && processor < CPU_SETSIZE) CPU_SET(static_cast<std::size_t>(processor), &set);
  if (CPU_COUNT(&set) == 0) return;
  // If the system forbids it, this costs only speed.
  for (std::thread& worker : workers_)
    pthread_setaffinity_np(worker.native_handle(), sizeof set, &set);
#endif
}

// Puts tasks of the job, from `first` on, into a ticket: as many as it holds.
void ThreadPool::publish(std::int64_t first) {
  const std::int64_t left = job_.count - first;
  const std::int64_t n = left < kMostTasks ? left : kMostTasks;
  first_ = first;
  published_ = workers_.empty() || n <= 1 ? 0 : n;
  if (published_ == 0) return;
  num_done_.store(0, std::memory_order_relaxed);
  const std::uint64_t number = job_number(ticket_.load(std::memory_order_relaxed)) + 1;
  ticket_.store((number << (2 * kTaskBits)) | (static_cast<std::uint64_t>(n) << kTaskBits),
                std::memory_order_release);
  wake_.fetch_add(1);
  wake_.notify_all();
}

void ThreadPool::finish() {
  while (published_ > 0) {
    while (claim_and_run()) {
    }
    for (int spin = 0;; ++spin) {
      const std::uint32_t done = num_done_.load(std::memory_order_acquire);
      if (done == static_cast<std::uint32_t>(published_)) break;
      if (spin < kSpins * kSpins) {
        pause();
      } else {
        num_done_.wait(done, std::memory_order_acquire);
      }
    }
    publish(first_ + published_);
  }
  for (std::int64_t i = first_; i < job_.count; ++i) job_.function(job_.context, i);
  job_.count = 0;
}

void ThreadPool::wake() {
  if (workers_.empty()) return;
  wake_.fetch_add(1);
  wake_.notify_all();
}

bool ThreadPool::has_task() const {
  const std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  return next_task(ticket) < num_tasks(ticket);
}

bool ThreadPool::claim_and_run() {
  std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if (next_task(ticket) >= num_tasks(ticket)) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel));
  // Read after the claim: until this task is counted below, the job cannot change.
  const std::uint32_t total = static_cast<std::uint32_t>(num_tasks(ticket));
  job_.function(job_.context, first_ + static_cast<std::int64_t>(next_task(ticket)));
  if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == total) num_done_.notify_all();
  return true;
}

bool ThreadPool::look_out(std::chrono::microseconds span) const {
  const auto end = std::chrono::steady_clock::now() + span;
  do {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (has_task()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

void ThreadPool::work() {
  std::chrono::microseconds span = kAfterJob;
  while (!is_closing_.load(std::memory_order_relaxed)) {
    const std::uint32_t seen = wake_.load();
    while (claim_and_run())
      span = is_alert_.load(std::memory_order_relaxed) ? kAfterWake : kAfterJob;
    if (look_out(span) || is_closing_.load()) continue;
    wake_.wait(seen);
    span = kAfterWake;
  }
}

}  // namespace tandem
