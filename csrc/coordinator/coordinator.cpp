#include "coordinator/coordinator.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "coordinator/words.hpp"

namespace tandem {
namespace {

// For so long a thread keeps its processor while it looks at a doorbell. Then it gives way between
// looks: that costs nothing where nobody waits for the processor, and where the device itself does
// (a CPU twin on a busy machine), 500 microseconds of spinning were 500 for each layer.
constexpr double kSpinSeconds = 1e-5;
constexpr int kSpins = 64;  // between two looks at the clock
constexpr auto kWatchEvery = std::chrono::milliseconds(20);
constexpr double kLongestLook = 0.1;  // seconds
constexpr auto kLookEvery = std::chrono::microseconds(50);
constexpr double kDiskPatience = 0.5;  // seconds that a device waits for a read

// A use of a source, which ends behind all that is done about a layer.
class SourceUse {
 public:
  explicit SourceUse(ExpertSource* source) : source_(source) {}
  ~SourceUse() {
    if (source_ != nullptr) source_->end();
  }
  SourceUse(const SourceUse&) = delete;
  SourceUse& operator=(const SourceUse&) = delete;

 private:
  ExpertSource* source_;
};

// What a thread does between two looks at a word.
class BetweenLooks {
 public:
  void operator()() {
    if (++spin_ % kSpins == 0) is_patient_ = is_patient_ && steady_seconds() < end_;
    if (is_patient_) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }

 private:
  const double end_ = steady_seconds() + kSpinSeconds;
  int spin_ = 0;
  bool is_patient_ = true;
};

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
      throw std::invalid_argument("a layer of " + std::to_string(layer.layout.hidden_size) +
                                  " values a token, expected " +
                                  std::to_string(layout.hidden_size) + " as in the first one");
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
  if (has_died_) {  // read behind the lock of wait_until_idle: the thread only lets the device go
    has_ended_.store(true);
    thread_.join();
    has_ended_.store(false);
    start_thread();
  }
  for (std::int64_t l = 0; is_lost_.load() && box_ != nullptr && l < box.layout().num_layers; ++l)
    *box_->doorbell(l) = *box_->error(l) = 0;
  for (std::size_t l = 0; l < layers_.size(); ++l) answers_[l].store(kOpen);
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
    throw StepLost("the thread that answers the device has not come back from a lost step within " +
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
    // Longer between two looks, and the whole process was stopped: that is nobody's fault.
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

// Answers every layer that the device still comes to, with an error.
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

// Returns whether the layer is closed: by now, or because the device has come to it.
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
      death = "the thread that answers the device has ended (" +
              (why.empty() ? std::string("an unknown error") : why) + ")";
    }
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

void Coordinator::answer_step() {
  const ThreadPool::Alert alert(engine_.pool());
  for (std::int64_t layer = 0; layer < static_cast<std::int64_t>(layers_.size()); ++layer) {
    if (!wait_for_doorbell(layer)) return;
    if (layer == 0 && decisions_) decisions_->begin_step();
    answer(layer);
  }
}

bool Coordinator::wait_for_doorbell(std::int64_t layer) {
  std::uint32_t* doorbell = box_->doorbell(layer);
  for (BetweenLooks give_way; load_acquire(doorbell) != 1; give_way())
    if (is_lost_.load(std::memory_order_relaxed)) return false;
  std::uint8_t open = kOpen;
  if (!answers_[layer].compare_exchange_strong(open, kTaken)) return false;
  store_release(doorbell, 0u);
  return true;
}

void Coordinator::answer(std::int64_t layer) {
  const double rung = begun_ = ended_ = steady_seconds();
  const RoutedLayer& host = layers_[layer];
  if (hook_) hook_(layer);
  if (answers_[layer].load() != kTaken) return;
  fetched_.clear();
  const bool has_misses = find_misses(layer, host.num_experts);
  const bool is_asked = host.source != nullptr && !asked_.empty();
  const SourceUse at_end(is_asked ? host.source : nullptr);
  // What lies on a disk is not fetched: nobody knows when it comes.
  std::span<const Fetch> fetches;
  if (has_misses && !is_asked) fetches = fetch(layer);
  std::int64_t num_computed = is_asked ? compute_coming(host) : compute(host, fetches);
  num_computed += settle(host, fetches);
  if (!fetches.empty() && is_lost_.load()) return;
  std::uint8_t taken = kTaken;
  if (!answers_[layer].compare_exchange_strong(taken, kClosed)) return;
  if (has_misses) {
    if (decisions_ && decisions_->fetches()) publish_fetched(layer, fetches);
    store_release(box_->done(layer), 1u);
  }
  note(layer, num_computed, rung);
  progress_.fetch_add(1);
}

// Tells whether a layer has misses; notes which experts they want.
bool Coordinator::find_misses(std::int64_t layer, std::int64_t num_experts) {
  const MailboxLayout& layout = box_->layout();
  const std::int32_t *choice = box_->choice(layer), *is_hit = box_->is_hit(layer);
  missed_.assign(layout.pairs(), -1);
  bool has_misses = false;
  for (std::int64_t i = 0; i < layout.pairs(); ++i) {
    if (is_hit[i] != 0) continue;
    has_misses = true;
    if (choice[i] >= 0 && choice[i] < num_experts)
      missed_[i] = choice[i];
    else  // published by mistake: nothing is read outside
      std::fill_n(box_->results() + i * layout.hidden_size, layout.hidden_size, 0.0f);
  }
  asked_.clear();
  for (const std::int32_t expert : missed_)
    if (expert >= 0) asked_.push_back(expert);
  std::sort(asked_.begin(), asked_.end());
  asked_.erase(std::unique(asked_.begin(), asked_.end()), asked_.end());
  return has_misses;
}

std::span<const Fetch> Coordinator::fetch(std::int64_t layer) {
  if (!decisions_) return {};
  const auto pairs = static_cast<std::size_t>(box_->layout().pairs());
  return decisions_->fetch(layer, {box_->choice(layer), pairs});
}

// The misses that are not fetched. Returns how many experts that are.
std::int64_t Coordinator::compute(const RoutedLayer& host, std::span<const Fetch> fetches) {
  if (asked_.empty()) return 0;
  addresses_.assign(missed_.size(), nullptr);
  for (std::size_t i = 0; i < missed_.size(); ++i) {
    const auto is_it = [&](const Fetch& fetch) { return fetch.expert == missed_[i]; };
    if (missed_[i] >= 0 && std::none_of(fetches.begin(), fetches.end(), is_it))
      addresses_[i] = host.expert(missed_[i]);
  }
  return compute_rows(host);
}

// Waits until each fetched expert is there or computed: those whose time is over at once, while
// the others may still come. Returns how many were computed.
std::int64_t Coordinator::settle(const RoutedLayer& host, std::span<const Fetch> fetches) {
  if (fetches.empty()) return 0;
  std::int64_t num_computed = 0;
  for (BetweenLooks give_way; !is_lost_.load(std::memory_order_relaxed); give_way()) {
    bool is_open = false, is_late = false;
    addresses_.assign(missed_.size(), nullptr);
    for (const Fetch& fetch : fetches) {
      if (!fetch.word.is_open()) continue;
      if (steady_seconds() < fetch.until || !fetch.word.claim()) {
        is_open = true;
        continue;
      }
      is_late = true;
      for (std::size_t i = 0; i < missed_.size(); ++i)
        if (missed_[i] == fetch.expert) addresses_[i] = host.expert(fetch.expert);
    }
    if (is_late) num_computed += compute_rows(host);
    if (!is_open) break;
  }
  return num_computed;
}

// Of a layer whose experts come from a disk, as they come. The caller ends the use.
std::int64_t Coordinator::compute_coming(const RoutedLayer& host) {
  tokens_.clear();
  for (const std::int32_t expert : asked_)
    tokens_.push_back(static_cast<std::int32_t>(std::count(missed_.begin(), missed_.end(), expert)));
  host.source->begin(
      {host.number, asked_, tokens_, {}, box_->layout().num_rows, kDiskPatience});
  std::int64_t num_computed = 0;
  for (auto arrived = host.source->next(); !arrived.empty(); arrived = host.source->next()) {
    addresses_.assign(missed_.size(), nullptr);
    for (const auto& [place, address] : arrived)
      for (std::size_t i = 0; i < missed_.size(); ++i)
        if (missed_[i] == asked_[place]) addresses_[i] = address;
    num_computed += compute_rows(host);
  }
  return num_computed;
}

// Computes the rows whose expert has an address. Returns how many experts that are.
std::int64_t Coordinator::compute_rows(const RoutedLayer& host) {
  const MailboxLayout& layout = box_->layout();
  const std::int64_t count =
      experts_.run(host.layout, host.activation,
                   {layout.num_rows, layout.top_k, addresses_.data(), layout.type, box_->hidden(),
                    box_->results()});
  if (count == 0) return 0;
  if (begun_ == ended_) begun_ = experts_.begun();
  ended_ = experts_.ended();
  return count;
}

void Coordinator::publish_fetched(std::int64_t layer, std::span<const Fetch> fetches) {
  std::uint64_t* const to = box_->fetched(layer);
  std::fill_n(to, missed_.size(), std::uint64_t{0});
  for (const Fetch& fetch : fetches) {
    if (!fetch.word.has_landed()) continue;
    fetched_.push_back(fetch.expert);
    for (std::size_t i = 0; i < missed_.size(); ++i)
      if (missed_[i] == fetch.expert) to[i] = fetch.address;
  }
}

void Coordinator::note(std::int64_t layer, std::int64_t num_computed, double rung) {
  const std::int64_t pairs = box_->layout().pairs();
  const std::int32_t *choice = box_->choice(layer), *is_hit = box_->is_hit(layer);
  const float* weights = box_->weights(layer);
  LayerRecord& record = records_[num_records_++];
  record.layer = layer;
  record.choice.assign(choice, choice + pairs);
  record.is_hit.assign(is_hit, is_hit + pairs);
  record.weights.assign(weights, weights + pairs);
  record.fetched = fetched_;
  record.num_computed = num_computed;
  record.rung = rung;
  record.begun = begun_;
  record.ended = ended_;
  record.answered = steady_seconds();
  if (decisions_) decisions_->note(record);
}

}  // namespace tandem
