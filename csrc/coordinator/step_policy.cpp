#include "coordinator/step_policy.hpp"

#include <algorithm>

namespace tandem {

std::int32_t Resident::insert(std::int32_t layer, std::int32_t expert) {
  const std::size_t key = layer * num_experts + expert;
  const std::int32_t slot = free[layer].back();
  free[layer].pop_back();
  slot_of[key] = slot;
  state[key] = kCopying;
  members[layer].push_back(expert);
  return slot;
}

void Resident::remove(std::int32_t layer, std::int32_t expert) {
  const std::size_t key = layer * num_experts + expert;
  free[layer].push_back(slot_of[key]);
  slot_of[key] = -1;
  state[key] = kEmpty;
  std::erase(members[layer], expert);
}

std::int32_t Resident::insert_ahead(std::int64_t key) {
  const std::int32_t slot = free_ahead.back();
  free_ahead.pop_back();
  slot_of[key] = slot;
  state[key] = kCopying;
  ahead.push_back(key);
  return slot;
}

void Resident::adopt(std::int32_t layer, std::int32_t expert) {
  free_ahead.push_back(free[layer].back());
  free[layer].pop_back();
  std::erase(ahead, layer * num_experts + expert);
  members[layer].push_back(expert);
}

std::vector<std::int64_t> Resident::release_ahead() {
  std::vector<std::int64_t> left;
  for (const std::int64_t key : ahead) {
    if (state[key] != kReady) continue;
    free_ahead.push_back(slot_of[key]);
    slot_of[key] = -1;
    state[key] = kEmpty;
    left.push_back(key);
  }
  std::erase_if(ahead, [this](std::int64_t key) { return state[key] == kEmpty; });
  return left;
}

bool Resident::has_every_expert() const {
  return ahead.empty() && std::all_of(state.begin(), state.end(), [](std::uint8_t s) { return s == kReady; });
}

StepPolicy::StepPolicy(Costs costs, const Limits& limits, std::vector<NextUseTable*> tables,
                       Resident resident, RegressionPredictor* predictor)
    : costs_(std::move(costs)),
      limits_(limits),
      tables_(std::move(tables)),
      predictor_(predictor),
      last_loads_(tables_.size()) {
  load(std::move(resident), 0.0, {});
}

void StepPolicy::load(Resident resident, double link_free_at,
                      const std::vector<std::int64_t>& pending) {
  resident_ = std::move(resident);
  link_free_at_ = link_free_at;
  num_pending_ = static_cast<std::int64_t>(pending.size());
  staged_.clear();
  for (const std::int64_t key : pending)
    if (resident_.state.at(key) == kEmpty) staged_.push_back(key);
}

StepCopies StepPolicy::begin_step(double dense_seconds, std::vector<KnownLoad> known, double now) {
  dense_ = dense_seconds;
  above_.clear();
  ahead_.clear();
  known_ = std::move(known);
  has_every_expert_ = resident_.has_every_expert();
  if (has_every_expert_) {
    known_.clear();
    return {};
  }
  if (predicts_) predictor_->begin_step({});
  const double ready = std::max(link_free_at_, now + costs_.copy_wake), next = now + dense_;
  for (const KnownLoad& at : known_) copy_known(at, ready, next + at.layer * (next - now));
  for (std::size_t i = 0; i < ahead_.size(); ++i) issue(now + costs_.copy_wake);
  StepCopies found;
  found.ahead = ahead_;
  return found;
}

void StepPolicy::learn(std::int32_t layer) {
  tables_[layer]->learn();
  if (predicts_) predictor_->learn();
}

void StepPolicy::warm_up(std::int32_t layer) {
  if (has_every_expert_ || !fetches() || layer >= resident_.num_layers) return;
  const auto& [experts, tokens] = last_loads_[layer];
  const NextUseTable& table = *tables_[layer];
  const std::uint8_t* states = states_of(layer);
  const Scores scores = table.values();
  table.prefetch(above_);
  pose(states, experts, tokens, 0.0);
  for (const std::int32_t expert : experts) problem_.scores.push_back(scores[expert]);
  const Split split = tandem::split(rule_, problem_);
  num_warmed_ += entries(slots_of(layer, experts, states, scores), {}, {}, 1).size();
}

StepCopies StepPolicy::decide(std::int32_t layer, const Load& load, const Load& guess, double now,
                              const std::vector<Place>& places) {
  const auto& [experts, tokens] = load;
  fetches_.clear();
  ahead_.clear();
  inserts_.clear();
  entered_.clear();
  left_.clear();
  num_needed_ = 0;
  if (has_every_expert_ || experts.empty()) return {};
  NextUseTable& table = *tables_[layer];
  table.note(experts, tokens, 1, experts, above_);
  above_ = experts;
  last_loads_[layer] = load;
  if (asks_ && layer + 1 < resident_.num_layers)
    predictor_->hint(layer + 1, guess.experts, guess.tokens, limits_.hint_factor);
  if (predicts_) predictor_->observe(layer, experts, tokens);
  const std::uint8_t* states = states_of(layer);
  const bool has_misses = std::any_of(experts.begin(), experts.end(),
                                      [&](std::int32_t e) { return states[e] == kEmpty; });
  const bool copies_ahead = predicts_ || knows_after(layer);
  if (!has_misses && !copies_ahead && resident_.ahead.empty()) return {};
  pose(states, experts, tokens, now);
  problem_.places = places;
  Scores scores;
  if (fetches()) {
    scores = table.values();
    for (const std::int32_t expert : experts) problem_.scores.push_back(scores[expert]);
  }
  const Split split = tandem::split(rule_, problem_);
  Ids fetched;
  for (const std::int32_t i : split.fetch) fetched.push_back(experts[i]);
  const double next_plan = now + std::max(split.gpu_seconds, split.cpu_seconds) + dense_;
  if (copies_ahead) copy_ahead(layer + 1, fetched.size(), now, next_plan);
  const std::int64_t room = idle_copies(costs_.link, problem_.link_busy, now, next_plan) -
                            static_cast<std::int64_t>(fetched.size() + ahead_.size());
  Ids staged;
  for (const std::int32_t expert : experts)
    if (is_ahead(layer, expert)) staged.push_back(expert);
  if (!staged.empty() || (has_misses && (room > 0 || !fetched.empty()))) {
    if (!fetches()) scores = table.values();
    enter(layer, entries(slots_of(layer, experts, states, scores), staged, fetched, room));
  }
  place(layer, split.fetch, experts, now);
  return {fetches_, ahead_, inserts_, entered_, left_, num_needed_};
}

// An expert that an earlier step fetched and whose copy has not ended is also under way. The CPU
// has claimed it and will do so again.
const std::uint8_t* StepPolicy::states_of(std::int32_t layer) {
  const std::int64_t num = resident_.num_experts, first = layer * num;
  const std::uint8_t* states = resident_.state.data() + first;
  if (staged_.empty()) return states;
  states_.assign(states, states + num);
  for (const std::int64_t key : staged_)
    if (key >= first && key < first + num) states_[key - first] = kCopying;
  return states_.data();
}

LayerSlots StepPolicy::slots_of(std::int32_t layer, const Ids& experts, const std::uint8_t* states,
                                const Scores& scores) const {
  return {experts, states, scores.data(), resident_.members[layer],
          static_cast<std::int64_t>(resident_.free[layer].size())};
}

// Sets up the layer's problem, without scores.
void StepPolicy::pose(const std::uint8_t* states, const Ids& experts, const Ids& tokens,
                      double now) {
  tandem::pose(costs_, tokens, problem_);
  problem_.wait.clear();
  problem_.scores.clear();
  for (const std::int32_t expert : experts)
    problem_.wait.push_back(states[expert] == kReady ? 0.0 : states[expert] == kEmpty ? -1.0 : 1.0);
  problem_.link_busy = link_free_at_ > now ? link_free_at_ - now : 0.0;
  problem_.max_fetches = limits_.max_fetches;
}

bool StepPolicy::is_ahead(std::int32_t layer, std::int32_t expert) const {
  const std::int64_t key = layer * resident_.num_experts + expert;
  return std::find(resident_.ahead.begin(), resident_.ahead.end(), key) != resident_.ahead.end();
}

// Gives clear slots to experts of the layer that is published at `next_plan`, and of known layers
// after it, each of which takes as long. Takes as many as arrive in time, after this layer's
// fetches.
void StepPolicy::copy_ahead(std::int32_t layer, std::size_t num_fetched, double now,
                            double next_plan) {
  if (layer >= resident_.num_layers) return;
  const double ready = std::max(link_free_at_, now + costs_.copy_wake) +
                       static_cast<double>(num_fetched) * costs_.link;
  bool is_known = false;
  for (const KnownLoad& at : known_) {
    is_known |= at.layer == layer;
    if (at.layer >= layer) copy_known(at, ready, next_plan + (at.layer - layer) * (next_plan - now));
  }
  if (!predicts_ || is_known) return;
  insert_ahead(layer,
               expected_ahead(*predictor_, costs_, limits_.ahead, coming(layer, ready, next_plan)));
}

// The same for a known layer, which is published at `published`.
void StepPolicy::copy_known(const KnownLoad& known, double ready, double published) {
  const ComingLayer at = coming(known.layer, ready, published);
  Ids misses = known_misses(costs_, limits_.ahead, known.load, at);
  misses.resize(num_in_time(costs_, known.load, misses, at));
  insert_ahead(known.layer, misses);
}

// Describes a coming layer for which the link is free at `ready`, after the prefetches so far.
ComingLayer StepPolicy::coming(std::int32_t layer, double ready, double published) {
  const std::int64_t first = layer * resident_.num_experts;
  late_.clear();
  for (const std::int64_t key : staged_)
    if (key >= first && key < first + resident_.num_experts)
      late_.push_back(static_cast<std::int32_t>(key - first));
  return {layer,     resident_.state.data() + first,
          late_,     ready + static_cast<double>(ahead_.size()) * costs_.link,
          published, static_cast<std::int64_t>(resident_.free_ahead.size()),
          true};
}

void StepPolicy::insert_ahead(std::int32_t layer, const Ids& experts) {
  for (const std::int32_t expert : experts) {
    const std::int64_t key = layer * resident_.num_experts + expert;
    ahead_.push_back({layer, expert, resident_.insert_ahead(key), kNone});
  }
}

// Gives slots to admitted experts. Those that were prefetched keep their own slots.
void StepPolicy::enter(std::int32_t layer, const Admitted& admitted) {
  for (const auto& [entering, victim] : admitted) {
    if (victim != kNone) resident_.remove(layer, victim);
    if (is_ahead(layer, entering)) {
      resident_.adopt(layer, entering);
      const std::int32_t slot = resident_.slot_of[layer * resident_.num_experts + entering];
      entered_.push_back({layer, entering, slot, victim});
      if (victim != kNone) left_.push_back(layer * resident_.num_experts + victim);
      continue;
    }
    entered_.push_back({layer, entering, resident_.insert(layer, entering), victim});
    inserts_.push_back(entered_.back());
  }
}

// Issues the copies. `fetched` are positions of experts; those without a slot get staging slots
// while there are any, and the CPU computes the others.
void StepPolicy::place(std::int32_t layer, const Ids& fetched, const Ids& experts, double now) {
  for (const std::int32_t i : fetched) {
    const std::int32_t expert = experts[i];
    const auto at = std::find_if(inserts_.begin(), inserts_.end(),
                                 [&](const SlotCopy& copy) { return copy.expert == expert; });
    const bool is_staged = at == inserts_.end();
    if (is_staged && num_needed_++ >= static_cast<std::int64_t>(resident_.staging.size())) continue;
    const double cpu = problem_.cpu[i];
    if (is_staged) {
      const SlotCopy copy{layer, expert, resident_.staging[num_needed_ - 1], kNone};
      fetches_.push_back(fetch_of(copy, true, now, cpu));
      staged_.push_back(layer * resident_.num_experts + expert);
    } else {
      fetches_.push_back(fetch_of(*at, false, now, cpu));
      inserts_.erase(at);
    }
  }
  for (std::size_t i = 0; i < ahead_.size(); ++i) issue(now + costs_.copy_wake);
  for (std::size_t i = 0; i < inserts_.size(); ++i) issue(now);
}

FetchCopy StepPolicy::fetch_of(const SlotCopy& copy, bool is_staged, double now,
                               double cpu_seconds) {
  return {copy, is_staged, issue(now + costs_.copy_wake) + costs_.copy_wake, cpu_seconds};
}

// Returns when a copy that may begin at `ready` is expected to end.
double StepPolicy::issue(double ready) {
  link_free_at_ = std::max(link_free_at_, ready) + costs_.link;
  ++num_pending_;
  return link_free_at_;
}

void StepPolicy::copy_finished(std::int32_t layer, std::int32_t expert, double now) {
  --num_pending_;
  link_free_at_ = now + static_cast<double>(num_pending_) * costs_.link;
  const std::int64_t key = layer * resident_.num_experts + expert;
  std::erase(staged_, key);
  std::uint8_t& state = resident_.state[key];
  if (state == kCopying) state = kReady;
}

}  // namespace tandem
