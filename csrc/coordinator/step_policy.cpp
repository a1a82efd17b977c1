#include "coordinator/step_policy.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tandem {
namespace {

constexpr double kUnlimited = 1 << 30;

double of(const std::vector<double>& by_tokens, std::int32_t tokens) {
  if (static_cast<std::size_t>(tokens) >= by_tokens.size())
    throw std::out_of_range("an expert of " + std::to_string(tokens) + " tokens, and costs go to " +
                            std::to_string(by_tokens.size() - 1));
  return by_tokens[tokens];
}

}  // namespace

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

bool Resident::has_every_expert() const {
  return std::all_of(state.begin(), state.end(), [](std::uint8_t s) { return s == kReady; });
}

StepPolicy::StepPolicy(Costs costs, std::vector<SuccessorTable*> tables, Resident resident)
    : costs_(std::move(costs)), tables_(std::move(tables)) {
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

void StepPolicy::begin_step(double dense_seconds) {
  dense_ = dense_seconds;
  above_.clear();
  has_every_expert_ = resident_.has_every_expert();
}

StepCopies StepPolicy::decide(std::int32_t layer, const Ids& experts, const Ids& tokens,
                              double now) {
  fetches_.clear();
  inserts_.clear();
  entered_.clear();
  asked_ = 0;
  if (has_every_expert_ || experts.empty()) return {};
  SuccessorTable& table = *tables_[layer];
  table.note(experts, tokens, 1, experts, above_);
  above_ = experts;
  const std::uint8_t* states = states_of(layer);
  if (std::none_of(experts.begin(), experts.end(),
                   [&](std::int32_t e) { return states[e] == kEmpty; }))
    return {};
  pose(states, experts, tokens, now);
  Scores scores;
  if (fetches()) {
    scores = table.values();
    for (const std::int32_t expert : experts) problem_.scores.push_back(scores[expert]);
  }
  const GraphSplit split = tandem::split(rule_, problem_);
  Ids fetched;
  for (const std::int32_t i : split.fetch) fetched.push_back(experts[i]);
  const double next_plan = now + std::max(split.gpu_seconds, split.cpu_seconds) + dense_;
  const std::int64_t room =
      idle_copies(now, next_plan) - static_cast<std::int64_t>(fetched.size());
  if (room <= 0 && fetched.empty()) return {};
  if (!fetches()) scores = table.values();
  const LoneLayer now_here{experts,
                           states,
                           scores.data(),
                           resident_.members[layer],
                           static_cast<std::int64_t>(resident_.free[layer].size()),
                           0.0, now, dense_, 0.0};
  enter(layer, admit(now_here, newcomers(states, experts, scores, room, fetched)));
  place(layer, split.fetch, experts, now);
  return {fetches_, inserts_, entered_, asked_};
}

// An expert that an earlier step has fetched, and whose copy has not ended yet, is under way too:
// the CPU has claimed it, and does so again.
const std::uint8_t* StepPolicy::states_of(std::int32_t layer) {
  const std::int64_t num = resident_.num_experts, first = layer * num;
  const std::uint8_t* states = resident_.state.data() + first;
  if (staged_.empty()) return states;
  states_.assign(states, states + num);
  for (const std::int64_t key : staged_)
    if (key >= first && key < first + num) states_[key - first] = kCopying;
  return states_.data();
}

// The layer's problem, without the scores.
void StepPolicy::pose(const std::uint8_t* states, const Ids& experts, const Ids& tokens,
                      double now) {
  GraphProblem& problem = problem_;
  problem.cpu.clear();
  problem.gpu.clear();
  problem.states.clear();
  problem.scores.clear();
  for (std::size_t i = 0; i < experts.size(); ++i) {
    problem.cpu.push_back(of(costs_.cpu, tokens[i]));
    problem.gpu.push_back(of(costs_.gpu, tokens[i]));
    problem.states.push_back(states[experts[i]]);
  }
  problem.cpu_first = costs_.cpu_first;
  problem.link = costs_.link;
  problem.link_busy = link_free_at_ > now ? link_free_at_ - now : 0.0;
  problem.cpu_slowdown = costs_.cpu_slowdown;
  problem.link_slowdown = costs_.link_slowdown;
  problem.copy_wake = costs_.copy_wake;
  problem.max_fetches = costs_.max_fetches;
}

// Gives slots to admitted experts.
void StepPolicy::enter(std::int32_t layer, const Admitted& admitted) {
  for (const auto& [newcomer, victim] : admitted) {
    if (victim != kNobody) resident_.remove(layer, victim);
    entered_.push_back({layer, newcomer, resident_.insert(layer, newcomer), victim});
  }
}

// Issues the copies. Fetched experts (by position) without a slot get staging slots, as far as
// there are some: the CPU computes the others.
void StepPolicy::place(std::int32_t layer, const Ids& fetched, const Ids& experts, double now) {
  inserts_ = entered_;
  for (const std::int32_t i : fetched) {
    const std::int32_t expert = experts[i];
    const auto at = std::find_if(inserts_.begin(), inserts_.end(),
                                 [&](const SlotCopy& copy) { return copy.expert == expert; });
    const bool is_staged = at == inserts_.end();
    if (is_staged && asked_++ >= static_cast<std::int64_t>(resident_.staging.size())) continue;
    const double cpu = problem_.cpu[i];
    if (is_staged) {
      const SlotCopy copy{layer, expert, resident_.staging[asked_ - 1], kNobody};
      fetches_.push_back(fetch_of(copy, true, now, cpu));
      staged_.push_back(layer * resident_.num_experts + expert);
    } else {
      fetches_.push_back(fetch_of(*at, false, now, cpu));
      inserts_.erase(at);
    }
  }
  for (std::size_t i = 0; i < inserts_.size(); ++i) issue(now);
}

// How many copies end before the next layer; one if the link has nothing to do.
std::int64_t StepPolicy::idle_copies(double now, double next_plan) const {
  if (costs_.link == 0.0) return static_cast<std::int64_t>(kUnlimited);
  const double busy = link_free_at_ > now ? link_free_at_ - now : 0.0;
  const double idle = std::min((next_plan - now - busy) / costs_.link, kUnlimited);
  return std::max<std::int64_t>(static_cast<std::int64_t>(idle), busy == 0.0);
}

// Absent experts that ask for a slot, best first: those that are fetched anyway, and others while
// the link has time for them.
Ids StepPolicy::newcomers(const std::uint8_t* states, const Ids& experts, const Scores& scores,
                          std::int64_t room, const Ids& fetched) const {
  Ids absent;
  for (const std::int32_t expert : experts)
    if (states[expert] == kEmpty) absent.push_back(expert);
  std::stable_sort(absent.begin(), absent.end(),
                   [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
  Ids found;
  for (const std::int32_t expert : absent) {
    const bool is_fetched = std::find(fetched.begin(), fetched.end(), expert) != fetched.end();
    if (is_fetched || room-- > 0) found.push_back(expert);
  }
  return found;
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
