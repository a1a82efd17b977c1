// A pool for work of tens of microseconds: tasks are claimed one by one, and the caller works too.
//
// Order. `run` writes the job's function and context, then publishes a ticket (release): job number,
// number of tasks, next task. A thread claims a task by advancing the ticket (compare-and-swap,
// acquire); only then it reads function and context. They cannot change before the claimed task has
// been counted as done (release), and `run` returns after it has seen all tasks done (acquire). So a
// worker that wakes up late, or never, delays nobody: it finds no task to claim.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "home_process.hpp"

namespace tandem {

class ThreadPool {
 public:
  // `num_threads` counts the caller; 1 means no worker. Throws std::runtime_error, which says so, if
  // the system gives fewer.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(i) for every i in 0..count-1, each once, and returns when all have returned.
  // One caller at a time. Tasks must not throw.
  template <typename Task>
  void run(std::int64_t count, const Task& task) {
    start(count, task);
    finish();
  }

  // Gives the workers the job and returns. The task must live until `finish` has returned, which
  // works too and waits for the rest; nothing else may be started in between.
  template <typename Task>
  void start(std::int64_t count, const Task& task) {
    job_ = {count, [](const void* t, std::int64_t i) { (*static_cast<const Task*>(t))(i); }, &task};
    publish(0);
  }
  void finish();

  // Binds the workers to these processors, as a set: which of them each takes is the system's choice,
  // and the caller stays where it is. Nothing happens where the system has no such call.
  void bind_workers(const std::vector<int>& processors);

  // Held by a caller from the preparation of its work, in memory that is kept, to the end: callers
  // from several threads wait for each other here.
  std::mutex& busy() { return busy_; }

  // Wakes the workers: a job is about to come. They look out for it for a while, then sleep again.
  void wake();

  // While it lives the workers look out as long after a job as after `wake`: many jobs come, with
  // little in between.
  class Alert {
   public:
    explicit Alert(ThreadPool& pool) : pool_(pool) {
      pool_.is_alert_.store(true, std::memory_order_relaxed);
      pool_.wake();
    }
    ~Alert() { pool_.is_alert_.store(false, std::memory_order_relaxed); }
    Alert(const Alert&) = delete;
    Alert& operator=(const Alert&) = delete;

   private:
    ThreadPool& pool_;
  };

 private:
  using Function = void (*)(const void*, std::int64_t);

  struct Job {
    std::int64_t count = 0;
    Function function = nullptr;
    const void* context = nullptr;
  };

  void publish(std::int64_t first);
  void work();
  bool claim_and_run();
  void close();
  bool has_task() const;
  bool look_out(std::chrono::microseconds span) const;

  std::atomic<std::uint64_t> ticket_{0};
  std::atomic<std::uint32_t> num_done_{0};
  std::atomic<std::uint32_t> wake_{0};
  std::atomic<bool> is_closing_{false};
  std::atomic<bool> is_alert_{false};
  Job job_;
  std::int64_t first_ = 0;      // of the job's tasks that are in the ticket
  std::int64_t published_ = 0;  // how many they are; 0: the caller does them alone
  std::mutex busy_;
  const HomeProcess home_;
  std::vector<std::thread> workers_;
};

// Waits, at first without sleeping, until another thread has counted down to zero.
void wait_until_zero(const std::atomic<std::int64_t>& count);

}  // namespace tandem
