// A pool for work of tens of microseconds. Tasks are claimed one by one, and the caller works too.
//
// Order. `run` writes the job's function and context, then publishes a ticket (release): job
// number, number of tasks, next task. A thread claims a task by advancing the ticket
// (compare-and-swap, acquire), and reads function and context only after that. These cannot change
// before the claimed task is counted as done (release), and `run` returns after all tasks are done
// (acquire). So a worker that wakes up late, or never, delays nothing: it finds no task to claim.
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
  // `num_threads` includes the caller; 1 means no worker. Throws std::runtime_error if the system
  // gives fewer threads.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(i) once for every i in 0..count-1, and returns when all have returned. One caller at
  // a time. Tasks must not throw.
  template <typename Task>
  void run(std::int64_t count, const Task& task) {
    start(count, task);
    finish();
  }

  // Gives the job to the workers and returns. The task must live until `finish` has returned, which
  // works on the rest and waits for it. Nothing else may be started meanwhile.
  template <typename Task>
  void start(std::int64_t count, const Task& task) {
    job_ = {count, [](const void* t, std::int64_t i) { (*static_cast<const Task*>(t))(i); }, &task};
    publish(0);
  }
  void finish();

  // Binds the workers to these processors as a set; the system chooses one for each, and the caller
  // is not bound. Does nothing if the system has no such call.
  void bind_workers(const std::vector<int>& processors);

  // A caller holds this from preparing its work, in memory that is reused, until the end. Callers
  // from several threads wait here for each other.
  std::mutex& busy() { return busy_; }

  // Wakes the workers because a job will come. They spin for a while, then sleep again.
  void wake();

  // While this exists, workers spin after a job as long as after `wake`, because many jobs come in
  // quick succession.
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
  std::int64_t first_ = 0;  // the first task in the ticket
  std::int64_t published_ = 0;  // number of tasks in the ticket; 0: the caller does them alone
  std::mutex busy_;
  const HomeProcess home_;
  std::vector<std::thread> workers_;
};

// Waits until other threads have counted down to zero; spins first, then sleeps.
void wait_until_zero(const std::atomic<std::int64_t>& count);

}  // namespace tandem
