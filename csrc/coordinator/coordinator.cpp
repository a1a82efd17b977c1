#include "coordinator/coordinator.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "coordinator/words.hpp"

namespace tandem {
namespace {

constexpr auto kWatchEvery = std::chrono::milliseconds(20);
constexpr double kLongestLook = 0.1;  // seconds
constexpr auto kLookEvery = std::chrono::microseconds(50);

std::string in_words(double patience) {
  std::string text = std::to_string(patience);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " seconds";
}

}  // namespace

Coordinator::Coordinator(std::vector<RoutedLayer> layers, int num_threads, const std::string& isa)
    : layers_(std::move(layers)),
      engine_(num_threads, isa),
      experts_(engine_),
      records_(layers_.size()),
      answers_(std::make_unique<std::atomic<std::uint8_t>[]>(layers_.size())) {
  if (layers_.empty()) throw std::invalid_argument("a coordinator needs at least one layer");
  start_thread();
}

Coordinator::~Coordinator() {
  stop_letting_go();
  has_ended_.store(true);
  is_lost_.store(true);
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::int64_t Coordinator::add_mailbox(std::int64_t num_rows, std::int64_t top_k, ValueType type,
                                      std::uint8_t* memory) {
  const MailboxLayout layout{static_cast<std::int64_t>(layers_.size()), num_rows, top_k,
                             layers_.front().layout.hidden_size, type};
  if (num_rows < 1 || top_k < 1)
    throw std::invalid_argument("a mailbox of " + std::to_string(num_rows) + " rows of " +
                                std::to_string(top_k) + " experts, expected at least 1 of each");
  for (const RoutedLayer& layer : layers_)
    if (layer.layout.hidden_size != layout.hidden_size)
      throw std::invalid_argument("a layer has " + std::to_string(layer.layout.hidden_size) +
                                  " values per token, expected " +
                                  std::to_string(layout.hidden_size) + " as in the first layer");
  std::unique_ptr<std::uint8_t[]> owned;
  if (memory == nullptr) {
    constexpr std::size_t line = MailboxLayout::kLineBytes;
    owned = std::make_unique<std::uint8_t[]>(static_cast<std::size_t>(layout.num_bytes()) + line);
    const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(owned.get());
    memory = owned.get() + ((first + line - 1) / line * line - first);
  }
  mailboxes_.push_back({std::move(owned), Mailbox(layout, memory)});
  return static_cast<std::int64_t>(mailboxes_.size()) - 1;
}

void Coordinator::start_thread() {
  has_died_ = false;
  is_idle_ = true;
  thread_ = std::thread([this] { loop(); });
}

void Coordinator::begin_step(std::int64_t mailbox, double patience) {
  const Mailbox& box = mailboxes_.at(mailbox).box;
  stop_letting_go();
  wait_until_idle(patience);
  // Read after the lock of wait_until_idle; the thread now only lets the device go.
  if (has_died_) {
    has_ended_.store(true);
    thread_.join();
    has_ended_.store(false);
    start_thread();
  }
  for (std::int64_t l = 0; is_lost_.load() && box_ != nullptr && l < box.layout().num_layers; ++l)
    *box_->doorbell(l) = *box_->error(l) = 0;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    answers_[l].store(kOpen);
    *box.guessed(static_cast<std::int64_t>(l)) = 0;
  }
  is_lost_.store(false);
  box_ = &box;
  num_records_ = 0;
  {
    const std::lock_guard lock(mutex_);
    is_idle_ = false;
    ++wanted_step_;
  }
  changed_.notify_all();
}

void Coordinator::wait_until_idle(double patience) {
  std::unique_lock lock(mutex_);
  const bool is_idle = changed_.wait_for(lock, std::chrono::duration<double>(patience),
                                         [this] { return is_idle_ || has_died_; });
  if (!is_idle)
    throw StepLost("the answering thread did not return from a lost step within " +
                   in_words(patience));
}

void Coordinator::finish_step(double patience) {
  std::unique_lock lock(mutex_);
  std::uint64_t seen = progress_.load();
  double waited = 0.0, last = steady_seconds();
  while (finished_step_ != wanted_step_) {
    changed_.wait_for(lock, kWatchEvery);
    if (finished_step_ == wanted_step_) break;
    const std::uint64_t progress = progress_.load();
    const double now = steady_seconds();
    // A longer time between two looks means that the whole process was stopped. It does not count.
    waited = progress == seen ? waited + std::min(now - last, kLongestLook) : 0.0;
    seen = progress;
    last = now;
    if (!has_died_ && waited <= patience) continue;
    const std::string reason = has_died_ ? death_ : what_is_missing(first_open(), patience);
    const bool is_slow = has_died_ && is_slow_;
    is_lost_.store(true);
    letting_go_ = std::thread([this] { let_go(); });
    if (is_slow) throw StepSlow(reason);
    throw StepLost(reason);
  }
}

std::int64_t Coordinator::first_open() const {
  std::int64_t layer = 0;
  while (layer + 1 < static_cast<std::int64_t>(layers_.size()) && answers_[layer].load() == kClosed)
    ++layer;
  return layer;
}

std::string Coordinator::what_is_missing(std::int64_t layer, double patience) const {
  const bool has_rung =
      answers_[layer].load() == kTaken || load_acquire(box_->doorbell(layer)) == 1;
  return "MoE layer " + std::to_string(layer) + " was not " +
         (has_rung ? "answered" : "reached by the device") + " within " + in_words(patience);
}

// Answers with an error every layer that the device still reaches.
void Coordinator::let_go() {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer)
    while (!close_for_device(static_cast<std::int64_t>(layer))) {
      if (has_ended_.load()) return;
      std::this_thread::sleep_for(kLookEvery);
    }
}

void Coordinator::stop_letting_go() {
  if (!letting_go_.joinable()) return;
  has_ended_.store(true);
  letting_go_.join();
  has_ended_.store(false);
}

// Closes a layer once the device has reached it; returns whether it is closed.
bool Coordinator::close_for_device(std::int64_t layer) {
  std::uint8_t answer = answers_[layer].load();
  if (answer == kClosed) return true;
  if (answer == kOpen && load_acquire(box_->doorbell(layer)) != 1) return false;
  if (!answers_[layer].compare_exchange_strong(answer, kClosed)) return false;
  if (answer == kOpen) store_release(box_->doorbell(layer), 0u);
  if (box_->has_misses(layer)) {
    std::fill_n(box_->fetched(layer), box_->layout().pairs(), std::uint64_t{0});
    store_release(box_->error(layer), 1u);
    store_release(box_->done(layer), 1u);
  }
  return true;
}

bool Coordinator::abort_step(double patience) {
  stop_letting_go();
  is_lost_.store(true);
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(patience),
                           [this] { return is_idle_ || has_died_; });
}

// ---- the thread that answers ----

void Coordinator::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_closing_ || !is_idle_; });
    if (is_closing_) return;
    const std::uint64_t step = wanted_step_;
    lock.unlock();
    std::string death;
    bool is_slow = false;
    try {
      answer_step();
    } catch (const DiskSlow& error) {
      death = error.what();
      is_slow = true;
    } catch (const DiskError& error) {
      death = error.what();
    } catch (const std::exception& error) {
      const std::string why = error.what();
      death = "the answering thread has ended (" +
              (why.empty() ? std::string("an unknown error") : why) + ")";
    }
    if (decisions_) decisions_->end_step();
    lock.lock();
    is_idle_ = true;
    if (!is_lost_.load() && death.empty()) finished_step_ = step;
    has_died_ = !death.empty();
    is_slow_ = is_slow;
    death_ = death;
    changed_.notify_all();
    if (has_died_) {
      lock.unlock();
      return let_go();
    }
  }
}

}  // namespace tandem
