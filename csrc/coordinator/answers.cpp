// The thread that answers, and what it does about each layer of a step.
#include <algorithm>

#include "coordinator/coordinator.hpp"
#include "coordinator/looking.hpp"
#include "coordinator/words.hpp"

namespace tandem {
namespace {

constexpr double kDiskPatience = 0.5;  // seconds that a device waits for a read
// A guess comes two kernels after the doorbell. A device that is stopped in between delays only
// itself.
constexpr double kGuessPatience = 5e-5;

// Ends the use of a source when everything about a layer is done.
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

}  // namespace

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
  const auto is_lost = [this] { return is_lost_.load(std::memory_order_relaxed); };
  for (BetweenLooks give_way; load_acquire(doorbell) != 1 && !is_lost(); give_way()) {
  }
  // After a layer that was given up none is decided, because that layer's decisions are not
  // submitted.
  std::uint8_t open = kOpen;
  if (is_lost() || !answers_[layer].compare_exchange_strong(open, kTaken)) return false;
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
  guess_ = wait_for_guess(layer);
  const bool reads_disk =
      host.source != nullptr &&
      std::any_of(missed_.begin(), missed_.end(), [](std::int32_t expert) { return expert >= 0; });
  const SourceUse at_end(reads_disk ? host.source : nullptr);
  places_.clear();
  if (reads_disk) request_misses(host);
  std::span<const Fetch> fetches;
  if (has_misses) fetches = fetch(layer);
  std::int64_t num_computed = reads_disk ? compute_coming(host, fetches) : compute(host, fetches);
  num_computed += settle(host, fetches);
  if (!fetches.empty() && is_lost_.load()) return;
  std::uint8_t taken = kTaken;
  if (!answers_[layer].compare_exchange_strong(taken, kClosed)) return;
  if (has_misses) {
    publish_fetched(layer, fetches);
    store_release(box_->done(layer), 1u);
  }
  note(layer, num_computed, rung);
  progress_.fetch_add(1);
}

// Returns whether a layer has misses; notes the missed expert of each row.
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
    else  // an invalid choice: reads nothing outside
      std::fill_n(box_->results() + i * layout.hidden_size, layout.hidden_size, 0.0f);
  }
  return has_misses;
}

// Returns the guessed choice of the next layer; empty if its router is not run ahead, or does not come
// soon.
std::span<const std::int32_t> Coordinator::wait_for_guess(std::int64_t layer) const {
  const bool has_next = layer + 1 < static_cast<std::int64_t>(layers_.size());
  if (!decisions_ || !has_next || !decisions_->asks(static_cast<std::int32_t>(layer))) return {};
  const double end = steady_seconds() + kGuessPatience;
  while (load_acquire(box_->guessed(layer)) != 1) {
    if (steady_seconds() > end || is_lost_.load(std::memory_order_relaxed)) return {};
    pause();
  }
  return {box_->guess(layer), static_cast<std::size_t>(box_->layout().pairs())};
}

std::span<const Fetch> Coordinator::fetch(std::int64_t layer) {
  if (!decisions_) return {};
  const auto pairs = static_cast<std::size_t>(box_->layout().pairs());
  return decisions_->fetch(layer, {box_->choice(layer), pairs}, guess_, places_);
}

// Computes the misses that are not fetched; returns the number of experts.
std::int64_t Coordinator::compute(const RoutedLayer& host, std::span<const Fetch> fetches) {
  addresses_.assign(missed_.size(), nullptr);
  for (std::size_t i = 0; i < missed_.size(); ++i) {
    const auto is_it = [&](const Fetch& fetch) { return fetch.expert == missed_[i]; };
    if (missed_[i] >= 0 && std::none_of(fetches.begin(), fetches.end(), is_it))
      addresses_[i] = host.expert(missed_[i]);
  }
  return compute_rows(host);
}

// Waits until each fetched expert has arrived or is computed. Experts whose time is over are
// computed at once, while others may still arrive. Returns how many were computed.
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
        if (missed_[i] == fetch.expert) addresses_[i] = address_of(host, fetch.expert);
    }
    if (is_late) num_computed += compute_rows(host);
    if (!is_open) break;
  }
  return num_computed;
}

// Over a disk, a fetched expert is in a slot of its layer and stays there.
const std::uint8_t* Coordinator::address_of(const RoutedLayer& host, std::int32_t expert) const {
  for (const PlacedMiss& miss : places_)
    if (miss.expert == expert) return miss.address;
  return host.expert(expert);
}

// Requests a layer's misses from the source of experts on the disk, and notes which are in memory.
// The caller ends the use.
void Coordinator::request_misses(const RoutedLayer& host) {
  requested_.clear();
  for (const std::int32_t expert : missed_)
    if (expert >= 0) requested_.push_back(expert);
  std::sort(requested_.begin(), requested_.end());
  requested_.erase(std::unique(requested_.begin(), requested_.end()), requested_.end());
  tokens_.clear();
  for (const std::int32_t expert : requested_)
    tokens_.push_back(static_cast<std::int32_t>(std::count(missed_.begin(), missed_.end(), expert)));
  host.source->begin(
      {host.number, requested_, tokens_, {}, box_->layout().num_rows, kDiskPatience});
  for (const std::int32_t expert : requested_) places_.push_back({expert, Place::kOnDisk, nullptr});
  for (const auto& [place, address, stays] : host.source->there())
    places_[place] = {requested_[place], stays ? Place::kInSlot : Place::kPassing, address};
}

// Computes the misses that are not fetched: first those in memory, then the others as they arrive.
std::int64_t Coordinator::compute_coming(const RoutedLayer& host, std::span<const Fetch> fetches) {
  addresses_.assign(missed_.size(), nullptr);
  for (const auto& [expert, place, address] : places_) {
    const auto is_it = [e = expert](const Fetch& fetch) { return fetch.expert == e; };
    if (std::any_of(fetches.begin(), fetches.end(), is_it)) continue;
    for (std::size_t i = 0; i < missed_.size(); ++i)
      if (missed_[i] == expert) addresses_[i] = address;
  }
  std::int64_t num_computed = compute_rows(host);
  for (auto arrived = host.source->next(); !arrived.empty(); arrived = host.source->next()) {
    addresses_.assign(missed_.size(), nullptr);
    for (const auto& [place, address, stays] : arrived)
      for (std::size_t i = 0; i < missed_.size(); ++i)
        if (missed_[i] == requested_[place]) addresses_[i] = address;
    num_computed += compute_rows(host);
  }
  return num_computed;
}

// Computes the rows whose expert has an address; returns the number of experts.
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
  record.guess.assign(guess_.begin(), guess_.end());
  record.fetched = fetched_;
  record.num_computed = num_computed;
  record.rung = rung;
  record.begun = begun_;
  record.ended = ended_;
  record.answered = steady_seconds();
  if (decisions_) decisions_->note(record);
}

}  // namespace tandem
