#include "coordinator/copying.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "coordinator/looking.hpp"
#include "coordinator/words.hpp"

namespace tandem {
namespace {

// Chunks are small, so that urgent copies do not wait long behind them. The limit counts queued
// chunks and entries. A thread that sleeps until one has happened wakes up 20 to 60 microseconds
// later, in which a link of 25 GB/s copies three chunks.
constexpr std::int64_t kChunkBytes = 512 << 10;
constexpr std::int64_t kMostQueued = 5;
constexpr double kLookOut = 1e-3;  // seconds; longer than the time between two layers
constexpr double kShortestSleep = 1e-4;  // seconds; the system does not keep to shorter ones

}  // namespace

CopyingThread::CopyingThread(std::unique_ptr<CopyEngine> engine, std::vector<RoutedLayer> layers,
                             std::int64_t* entries, std::int64_t num_experts,
                             std::vector<std::uint8_t*> slots, double bytes_per_second)
    : engine_(std::move(engine)),
      layers_(std::move(layers)),
      entries_(entries),
      num_experts_(num_experts),
      slots_(std::move(slots)),
      bytes_per_second_(bytes_per_second),
      words_(num_experts),
      thread_([this] { loop(); }) {}

CopyingThread::~CopyingThread() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    tell();
  }
  changed_.notify_all();
  thread_.join();
}

void CopyingThread::submit(std::span<const SlotCopy> copies, bool is_read) {
  if (copies.empty()) return;
  bool is_asleep = false;
  for (const SlotCopy& copy : copies) {
    HeldExpert now = held(copy, false);
    const std::lock_guard lock(mutex_);
    if (!error_.empty()) return;
    const bool has_victim = copy.victim != kNone;
    if (has_victim) to_clear_.push_back(copy.layer * num_experts_ + copy.victim);
    jobs_.push_back({copy, has_victim && is_read ? launched_ + 1 : 0, std::move(now)});
    is_asleep |= tell();
  }
  if (is_asleep) changed_.notify_all();
}

std::span<const FetchWord> CopyingThread::fetch(std::span<const FetchCopy> copies,
                                                std::span<const SlotCopy> ahead) {
  fetched_.clear();
  holds_.clear();
  for (const FetchCopy& found : copies) holds_.push_back(held(found.copy, false));
  bool is_asleep = false;
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < copies.size(); ++i) {
      const SlotCopy& copy = copies[i].copy;
      if (copy.victim != kNone) to_clear_.push_back(copy.layer * num_experts_ + copy.victim);
      fetched_.push_back(words_.open());
      if (error_.empty())
        fetches_.push_back({copy, 0, std::move(holds_[i]), copies[i].is_staged, fetched_.back()});
    }
    for (const SlotCopy& copy : ahead) ahead_.push_back({copy, 0, {}});
    looks_until_ = 0.0;
    is_asleep = tell() && (!copies.empty() || !ahead.empty());
  }
  if (is_asleep) changed_.notify_all();
  return fetched_;
}

void CopyingThread::look_out() {
  bool is_asleep = false;
  {
    const std::lock_guard lock(mutex_);
    looks_until_ = steady_seconds() + kLookOut;
    is_asleep = !is_looking_;
  }
  if (is_asleep) changed_.notify_all();
}

// Announces news, under the mutex. Returns whether the thread may be asleep.
bool CopyingThread::tell() {
  num_calls_.fetch_add(1, std::memory_order_release);
  return !is_looking_;
}

void CopyingThread::clear(const std::vector<std::int64_t>& keys) {
  const std::lock_guard lock(mutex_);
  to_clear_.insert(to_clear_.end(), keys.begin(), keys.end());
}

std::vector<std::int64_t> CopyingThread::take_cleared() {
  const std::lock_guard lock(mutex_);
  ++launched_;
  return std::exchange(to_clear_, {});
}

void CopyingThread::begin_step() {
  bool is_asleep = false;
  {
    const std::lock_guard lock(mutex_);
    begun_ = launched_;
    is_asleep = tell() && may_begin();
  }
  if (is_asleep) changed_.notify_all();
}

void CopyingThread::take_arrivals(std::vector<Arrival>& found) {
  const std::lock_guard lock(mutex_);
  found.insert(found.end(), arrivals_.begin(), arrivals_.end());
  arrivals_.clear();
}

void CopyingThread::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !error_.empty() || (!may_begin() && !is_copying_); });
}

std::string CopyingThread::error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void CopyingThread::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    if (queued_.empty()) wait_for_call(lock);
    if (is_closing_) return;
    std::optional<Job> job = next();
    is_copying_ = true;
    lock.unlock();
    std::string error;
    try {
      if (job)
        carry_out(std::move(*job));
      else  // one at a time, so that copies submitted meanwhile are queued behind the others
        wait_for(engine_->num_queued() - engine_->num_happened() - 1);
    } catch (const std::exception& problem) {
      error = problem.what();
      if (error.empty()) error = "an unknown error";
      let_all_go();
    }
    lock.lock();
    is_copying_ = !queued_.empty() && error.empty();
    error_ = error;
    changed_.notify_all();
    if (!error.empty()) {
      // Also releases the experts that they hold.
      for (std::deque<Job>* some : {&fetches_, &jobs_}) some->clear();
      return;
    }
  }
}

// Returns when a job may begin, or the thread must end.
void CopyingThread::wait_for_call(std::unique_lock<std::mutex>& lock) {
  while (!is_closing_ && !may_begin()) {
    const double until = looks_until_;
    if (steady_seconds() >= until) {
      changed_.wait(lock);
      continue;
    }
    is_looking_ = true;
    const std::uint32_t seen = num_calls_.load(std::memory_order_relaxed);
    lock.unlock();
    BetweenLooks give_way;
    while (num_calls_.load(std::memory_order_acquire) == seen && steady_seconds() < until)
      give_way();
    lock.lock();
    is_looking_ = false;
  }
}

HeldExpert CopyingThread::held(const SlotCopy& copy, bool waits) const {
  const RoutedLayer& layer = layers_[copy.layer];
  if (layer.source == nullptr) return {};
  return {*layer.source, layer.number, copy.expert, waits};
}

std::optional<CopyingThread::Job> CopyingThread::next() {
  if (!may_begin()) return std::nullopt;
  std::deque<Job>& first = !fetches_.empty() ? fetches_ : !ahead_.empty() ? ahead_ : jobs_;
  std::optional<Job> job = std::move(first.front());
  first.pop_front();
  return job;
}

void CopyingThread::carry_out(Job job) {
  const double begin = steady_seconds();
  HeldExpert back = bring(job);
  const std::int64_t bytes = job.is_given_up() ? 0 : layers_[job.copy.layer].expert_bytes;
  queued_.push_back({std::move(job), engine_->num_queued(), std::move(back)});
  if (bytes_per_second_ > 0.0 && bytes > 0) {
    engine_->wait(0);
    keep_pace(bytes, begin);
  }
  wait_for(kMostQueued - 1);
}

// Queues an expert's copy and its entry; returns the host slot for the slot's old content.
HeldExpert CopyingThread::bring(Job& job) {
  const SlotCopy& copy = job.copy;
  const RoutedLayer& layer = layers_[copy.layer];
  const std::uint8_t* from = layer.expert(copy.expert);
  if (layer.source != nullptr) {
    if (!job.held) {
      wait_for(0);  // releases all experts that this thread holds
      job.held = held(copy, true);
    }
    job.held.wait();
    from = job.held.address();
  }
  HeldExpert back = take_back(copy);
  std::uint8_t* to = slots_[copy.slot];
  for (std::int64_t at = 0; at < layer.expert_bytes; at += kChunkBytes) {
    wait_for(kMostQueued - 1);
    if (job.is_given_up()) return back;
    engine_->copy(to + at, from + at, std::min(kChunkBytes, layer.expert_bytes - at));
  }
  wait_for(kMostQueued - 1);
  if (!job.is_staged)
    engine_->publish(copy.layer * num_experts_ + copy.expert, reinterpret_cast<std::int64_t>(to));
  return back;
}

// Queues the copy of a slot's old content to a host slot; the result is empty if no host slot takes
// it.
HeldExpert CopyingThread::take_back(const SlotCopy& copy) {
  const RoutedLayer& layer = layers_[copy.layer];
  if (layer.source == nullptr || copy.victim == kNone) return {};
  HeldExpert back(*layer.source, layer.source->take_back(layer.number, copy.victim));
  const std::uint8_t* from = slots_[copy.slot];
  for (std::int64_t at = 0; back && at < layer.expert_bytes; at += kChunkBytes) {
    wait_for(kMostQueued - 1);
    engine_->copy_back(back.room() + at, from + at, std::min(kChunkBytes, layer.expert_bytes - at));
  }
  return back;
}

// After an error: waits until nothing is read, then releases all experts.
void CopyingThread::let_all_go() noexcept {
  try {
    engine_->wait(0);
  } catch (const std::exception&) {  // the same error, or one caused by it
  }
  queued_.clear();
}

// Waits, and reports the copies that have ended.
void CopyingThread::wait_for(std::int64_t most_left) {
  engine_->wait(most_left);
  while (!queued_.empty() && queued_.front().num_before <= engine_->num_happened()) {
    Queued done = std::move(queued_.front());
    if (done.back) done.back.keep();
    const SlotCopy& copy = done.job.copy;
    queued_.pop_front();
    if (!done.job.is_staged)
      store_release(entries_ + copy.layer * num_experts_ + copy.expert,
                    reinterpret_cast<std::int64_t>(slots_[copy.slot]));
    done.job.word.land();
    const std::lock_guard lock(mutex_);
    arrivals_.push_back({copy.layer, copy.expert, steady_seconds()});
  }
}

// Slows the link down, so that a fast machine can stand in for another one.
void CopyingThread::keep_pace(std::int64_t bytes, double begin) {
  if (bytes_per_second_ <= 0.0) return;
  owed_seconds_ += static_cast<double>(bytes) / bytes_per_second_ - (steady_seconds() - begin);
  if (owed_seconds_ < kShortestSleep) return;
  std::this_thread::sleep_for(std::chrono::duration<double>(owed_seconds_));
  owed_seconds_ = 0.0;
}

}  // namespace tandem
