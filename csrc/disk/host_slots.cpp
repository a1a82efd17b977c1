#include "disk/host_slots.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "decider/reads.hpp"
#include "memory.hpp"

namespace tandem {

std::int64_t HostSlots::Layer::slot_bytes() const {
  const bool is_aligned = first % kDiskPage == 0 && stride % kDiskPage == 0;
  return whole_pages(sums.empty() ? expert_bytes : stride) + (is_aligned ? 0 : kDiskPage);
}

HostSlots::HostSlots(std::vector<Layer> layers, const Options& options)
    : layers_(std::move(layers)),
      slots_(layers_.size()),
      unused_(layers_.size()),
      patience_(options.patience),
      owned_readers_(ReaderPool::make(options.num_readers, options.piece_bytes,
                                      [this] { fill_next(); })),
      readers_(*owned_readers_) {
  std::int64_t most_experts = 0;
  for (const Layer& layer : layers_) {
    most_experts = std::max<std::int64_t>(most_experts, layer.num_experts);
    has_one_size_ &= layer.slot_bytes() == options.transit_bytes;
    const ExpertFile& file = files_.emplace_back(layer.path);
    const std::int64_t end = layer.first + (layer.num_experts - 1) * layer.stride + layer.expert_bytes;
    if (file.bytes() < end)
      throw std::runtime_error(layer.path + " has " + std::to_string(file.bytes()) +
                               " bytes, expected " + std::to_string(end) +
                               " or more; copy it again, or pack the model again");
  }
  const auto num_layers = static_cast<std::int64_t>(layers_.size());
  resident_ = {num_layers,
               most_experts,
               std::vector<std::uint8_t>(num_layers * most_experts, kEmpty),
               std::vector<std::int32_t>(num_layers * most_experts, -1),
               std::vector<Ids>(num_layers),
               std::vector<Ids>(num_layers)};
  on_device_.assign(num_layers * most_experts, kEmpty);
  last_use_.assign(num_layers, Scores(most_experts, 0));
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    for (std::int64_t s = 0; s < layers_[i].num_slots; ++s)
      slots_[i].emplace_back().memory = layers_[i].memory + s * layers_[i].slot_bytes();
    resident_.free[i].resize(layers_[i].num_slots);
    std::iota(resident_.free[i].rbegin(), resident_.free[i].rend(), 0);
    if (layers_[i].table != nullptr) layers_[i].table->resize(layers_[i].num_slots);
  }
  for (std::int64_t s = 0; s < options.num_transit + options.num_held; ++s) {
    std::deque<Slot>& kind = s < options.num_transit ? transit_ : held_;
    kind.emplace_back().memory = options.transit + s * options.transit_bytes;
  }
}

bool HostSlots::is_direct() const {
  return std::all_of(files_.begin(), files_.end(), [](const auto& file) { return file.is_direct(); });
}

void HostSlots::read_buffered() {
  for (ExpertFile& file : files_) file.read_buffered();
}

// Called by functions that may be the first in a process: in a forked process a lock may be held
// forever.
std::unique_lock<std::mutex> HostSlots::locked() const {
  require_here();
  return std::unique_lock(mutex_);
}

Ids HostSlots::resident(std::int32_t layer) const {
  const auto lock = locked();
  Ids found = resident_.members.at(layer);
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<Place> HostSlots::places(std::int32_t layer, const Ids& experts) {
  const auto lock = locked();
  std::vector<Place> found;
  for (const std::int32_t expert : experts) {
    const Slot* slot = find(layer, expert, transit_);
    if (slot == nullptr || slot->read.state != DiskRead::State::kDone)
      found.push_back(Place::kOnDisk);
    else
      found.push_back(is_resident(*slot) ? Place::kInSlot : Place::kPassing);
  }
  return found;
}

// Makes slots ready whose reads have ended, or frees them if their reads failed.
void HostSlots::settle(std::int32_t layer) {
  const std::int64_t first = layer * resident_.num_experts;
  const Ids members = resident_.members[layer];
  for (const std::int32_t expert : members) {
    if (resident_.state[first + expert] != kCopying) continue;
    const Slot& slot = slots_[layer][resident_.slot_of[first + expert]];
    const DiskRead& read = slot.read;
    if (!read.has_ended() || slot.num_holders > 0) continue;
    if (read.state == DiskRead::State::kDone)
      resident_.state[first + expert] = kReady;
    else if (!is_wanted(layer, expert))  // otherwise the use reads it again
      resident_.remove(layer, expert);
  }
}

// Frees transit slots whose reads have ended. Experts of this layer or the next stay, as do those
// that a coming use expects, such as a prompt's next chunk.
void HostSlots::settle_transit(std::int32_t layer) {
  for (Slot& slot : transit_) {
    const bool is_ahead = slot.layer == layer || slot.layer == layer + 1;
    if (slot.layer >= 0 && slot.read.has_ended() &&
        ((!is_ahead && !is_expected(slot)) || slot.read.state == DiskRead::State::kFailed))
      leave(slot);
  }
}

// Whether the current use needs an expert.
bool HostSlots::is_wanted(std::int32_t layer, std::int32_t expert) const {
  return layer == layer_ && !wanted_.empty() &&
         std::find(experts_.begin(), experts_.end(), expert) != experts_.end();
}

// Frees a transit slot, now or when its last holder releases it.
void HostSlots::leave(Slot& slot) {
  slot.is_passed = slot.num_holders > 0;
  if (!slot.is_passed) slot.layer = -1;
}

// Returns an expert's slot: its layer's, or one of `others`.
HostSlots::Slot* HostSlots::find(std::int32_t layer, std::int32_t expert, std::deque<Slot>& others) {
  const std::int32_t slot = resident_.slot_of[layer * resident_.num_experts + expert];
  if (slot >= 0) return &slots_[layer][slot];
  for (Slot& one : others)
    if (one.layer == layer && one.expert == expert && !one.is_coming_back) return &one;
  return nullptr;
}

bool HostSlots::is_resident(const Slot& slot) const {
  const std::int32_t found = resident_.slot_of[slot.layer * resident_.num_experts + slot.expert];
  return found >= 0 && &slots_[slot.layer][found] == &slot;
}

void HostSlots::begin(const ExpertUse& use) {
  const auto lock = locked();
  settle(use.layer);
  settle_transit(use.layer);
  experts_.assign(use.experts.begin(), use.experts.end());
  judge_likely(use.layer);
  note_step(use);
  note(use);
  scores_ = scores_of(use.layer);
  layer_ = use.layer;
  use_patience_ = use.patience;
  wanted_.assign(experts_.size(), {});
  Ids absent;
  for (std::size_t i = 0; i < experts_.size(); ++i) {
    Slot* slot = wanted_[i].slot = find(layer_, experts_[i], transit_);
    if (slot != nullptr && !slot->read.has_ended()) readers_.demand(slot->read);
    if (slot != nullptr) slot->is_passed = false;
    const bool has_slot = slot != nullptr && is_resident(*slot);
    // An expert that was read ahead also asks for a slot, but only once it has arrived.
    wanted_[i].was_under_way = !has_slot && slot != nullptr && !slot->read.has_ended();
    if (!has_slot && !wanted_[i].was_under_way) absent.push_back(experts_[i]);
    ++(slot == nullptr ? counts_.misses : counts_.hits);
    counts_.ahead += slot != nullptr && !has_slot;
  }
  const auto number = static_cast<std::size_t>(use.layer);
  if (number < expected_.size()) expected_[number].clear();
  order_ahead();
  admit_absent(scores_, std::move(absent));
  use_transit_slots();
  read_expected();
}

// Gives memory back, or takes it again, until a layer uses its share of slots. Called after its
// use.
void HostSlots::resize(std::int32_t layer) {
  const auto all = static_cast<std::int64_t>(slots_[layer].size());
  const double share = is_pinned_ ? 1.0 : share_.load(std::memory_order_relaxed);
  const auto wanted = static_cast<std::int64_t>(static_cast<double>(all) * share);
  Ids &unused = unused_[layer], &free = resident_.free[layer];
  const auto used = [&] { return all - static_cast<std::int64_t>(unused.size()); };
  if (used() == wanted) return;
  for (; used() < wanted && !unused.empty(); unused.pop_back()) free.push_back(unused.back());
  Ids leaving;
  for (const std::int32_t expert : resident_.members[layer])
    if (resident_.state[layer * resident_.num_experts + expert] == kReady) leaving.push_back(expert);
  std::stable_sort(leaving.begin(), leaving.end(),
                   [&](std::int32_t a, std::int32_t b) { return scores_[a] > scores_[b]; });
  while (used() > wanted) {
    if (free.empty()) {
      if (leaving.empty()) break;
      resident_.remove(layer, leaving.back());
      leaving.pop_back();
    }
    unused.push_back(free.back());
    free.pop_back();
    give_back(slots_[layer][unused.back()].memory, layers_[layer].slot_bytes());
  }
  if (layers_[layer].table != nullptr) layers_[layer].table->resize(used());
}

// Experts that get a slot are read into it directly. The eviction decides which ones leave.
void HostSlots::admit_absent(const Scores& scores, Ids absent) {
  if (absent.empty()) return;
  const LayerSlots now{experts_, resident_.state.data() + layer_ * resident_.num_experts,
                       scores.data(), resident_.members[layer_],
                       static_cast<std::int64_t>(resident_.free[layer_].size())};
  for (const auto& [entering, victim] : admit(now, std::move(absent))) {
    const auto place = std::find(experts_.begin(), experts_.end(), entering);
    Wanted& wanted = wanted_[place - experts_.begin()];
    if (wanted.slot != nullptr && (!has_one_size_ || wanted.slot->num_holders > 0)) continue;
    if (victim != kNone) resident_.remove(layer_, victim);
    Slot& slot = slots_[layer_][resident_.insert(layer_, entering)];
    wanted.is_demanded = wanted.slot == nullptr;
    if (wanted.is_demanded)
      read_into(slot, layer_, entering, Cause::kDemand);
    else
      slot.trade(*wanted.slot);
    wanted.slot = &slot;
  }
}

// Takes the other slot's content and gives it this slot's memory.
void HostSlots::Slot::trade(Slot& other) {
  std::swap(memory, other.memory);
  layer = std::exchange(other.layer, -1);
  expert = other.expert;
  read.file = other.read.file;
  read.from = other.read.from;
  read.bytes = other.read.bytes;
  read.skipped = other.read.skipped;
  read.wanted = other.read.wanted;
  read.to = other.read.to;
  read.sum = other.read.sum;
  read.state.store(other.read.state);
}

// Describes a slot's bytes and their position in the file.
void HostSlots::describe(Slot& slot, std::int32_t layer, std::int32_t expert) {
  const Layer& of = layers_[layer];
  const std::int64_t at = of.first + expert * of.stride, from = at / kDiskPage * kDiskPage;
  slot.layer = layer;
  slot.expert = expert;
  DiskRead& read = slot.read;
  read.file = &files_[layer];
  read.from = from;
  read.skipped = at - from;
  // A checksum covers all bytes up to the next expert.
  read.wanted = of.sums.empty() ? of.expert_bytes : of.stride;
  read.bytes = whole_pages(at - from + read.wanted);
  read.to = slot.memory;
  read.sum = of.sums.empty() ? nullptr : &of.sums[expert];
}

void HostSlots::read_into(Slot& slot, std::int32_t layer, std::int32_t expert, Cause cause) {
  describe(slot, layer, expert);
  slot.read.is_filling = cause == Cause::kFilling;
  counts_.read_bytes += slot.read.bytes;
  readers_.ask(slot.read, cause == Cause::kDemand   ? Urgency::kDemanded
                          : cause == Cause::kLikely ? Urgency::kLikely
                                                    : Urgency::kAhead);
}

// Whether a transit slot's content is no longer needed.
bool HostSlots::has_passed(const Slot& slot) const {
  const bool stays =
      slot.layer == layer_ + 1 || is_wanted(slot.layer, slot.expert) || is_expected(slot);
  return slot.layer >= 0 && !stays && slot.read.has_ended();
}

HostSlots::Slot* HostSlots::free_transit() {
  for (Slot& slot : transit_) {
    if (has_passed(slot)) leave(slot);
    if (slot.layer < 0) return &slot;
  }
  return nullptr;
}

// Reads experts without a slot while transit slots are free; for a prompt, then those of the next
// layer.
void HostSlots::use_transit_slots() {
  for (std::size_t i = 0; i < wanted_.size(); ++i) {
    if (wanted_[i].slot != nullptr || wanted_[i].is_done) continue;
    Slot* slot = free_transit();
    if (slot == nullptr) return;
    wanted_[i].slot = slot;
    wanted_[i].is_demanded = true;
    read_into(*slot, layer_, experts_[i], Cause::kDemand);
  }
  const std::int32_t next = layer_ + 1;
  while (!ahead_.empty()) {
    const std::int32_t expert = ahead_.back();
    if (find(next, expert, transit_) == nullptr && !read_ahead(next, expert, Cause::kAhead)) return;
    ahead_.pop_back();
  }
}

// Returns whether there was a slot.
bool HostSlots::read_ahead(std::int32_t layer, std::int32_t expert, Cause cause) {
  const bool has_room = !resident_.free[layer].empty();
  Slot* slot = has_room ? &slots_[layer][resident_.insert(layer, expert)] : free_transit();
  if (slot != nullptr) read_into(*slot, layer, expert, cause);
  return slot != nullptr;
}

// Lists the next layer's experts of a prompt, the first one last.
void HostSlots::order_ahead() {
  ahead_.clear();
  const auto next = static_cast<std::size_t>(layer_) + 1;
  if (!is_prompt_ || next >= layers_.size()) return;
  Scores scores = scores_of(static_cast<std::int32_t>(next));
  scores.resize(layers_[next].num_experts);
  ahead_ = prompt_reads(on_device_.data() + next * resident_.num_experts, scores, experts_.size());
  std::reverse(ahead_.begin(), ahead_.end());
}

}  // namespace tandem
