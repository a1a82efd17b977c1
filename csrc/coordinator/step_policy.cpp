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
  load(std::move(resident), 0.0);
}

void StepPolicy::load(Resident resident, double link_free_at) {
  resident_ = std::move(resident);
  link_free_at_ = link_free_at;
  num_pending_ = std::count(resident_.state.begin(), resident_.state.end(), kCopying);
}

void StepPolicy::begin_step(double dense_seconds) {
  dense_ = dense_seconds;
  above_.clear();
  has_every_expert_ = resident_.has_every_expert();
}

std::span<const SlotCopy> StepPolicy::decide(std::int32_t layer, const Ids& experts,
                                             const Ids& tokens, double now) {
  copies_.clear();
  if (has_every_expert_ || experts.empty()) return copies_;
  SuccessorTable& table = *tables_[layer];
  table.note(experts, tokens, 1, experts, above_);
  above_ = experts;
  const std::uint8_t* states = resident_.state.data() + layer * resident_.num_experts;
  const double next_plan = now + seconds(states, experts, tokens) + dense_;
  const bool has_absent = std::any_of(experts.begin(), experts.end(),
                                      [&](std::int32_t e) { return states[e] == kEmpty; });
  if (!has_absent) return copies_;
  const std::int64_t room = idle_copies(now, next_plan);
  if (room <= 0) return copies_;
  const Scores scores = table.values();
  const LoneLayer now_here{experts,
                           states,
                           scores.data(),
                           resident_.members[layer],
                           static_cast<std::int64_t>(resident_.free[layer].size()),
                           0.0, now, dense_, 0.0};
  for (const auto& [newcomer, victim] :
       admit(now_here, newcomers(states, experts, scores, room))) {
    if (victim != kNobody) resident_.remove(layer, victim);
    copies_.push_back({layer, newcomer, resident_.insert(layer, newcomer), victim});
  }
  issue(now);
  return copies_;
}

// Until both processors are done, if the device computes what is ready and the CPU the rest.
double StepPolicy::seconds(const std::uint8_t* states, const Ids& experts,
                           const Ids& tokens) const {
  double on_gpu = 0.0, on_cpu = 0.0;
  bool is_cpu_used = false;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    if (states[experts[i]] == kReady) {
      on_gpu += of(costs_.gpu, tokens[i]);
    } else {
      on_cpu += of(costs_.cpu, tokens[i]);
      is_cpu_used = true;
    }
  }
  if (is_cpu_used) on_cpu += costs_.cpu_first;
  return std::max(on_gpu, on_cpu);
}

// How many copies end before the next layer; one if the link has nothing to do.
std::int64_t StepPolicy::idle_copies(double now, double next_plan) const {
  if (costs_.link == 0.0) return static_cast<std::int64_t>(kUnlimited);
  const double busy = link_free_at_ > now ? link_free_at_ - now : 0.0;
  const double idle = std::min((next_plan - now - busy) / costs_.link, kUnlimited);
  return std::max<std::int64_t>(static_cast<std::int64_t>(idle), busy == 0.0);
}

Ids StepPolicy::newcomers(const std::uint8_t* states, const Ids& experts, const Scores& scores,
                          std::int64_t room) const {
  Ids absent;
  for (const std::int32_t expert : experts)
    if (states[expert] == kEmpty) absent.push_back(expert);
  std::stable_sort(absent.begin(), absent.end(),
                   [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
  if (static_cast<std::int64_t>(absent.size()) > room) absent.resize(room);
  return absent;
}

void StepPolicy::issue(double now) {
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    link_free_at_ = std::max(link_free_at_, now) + costs_.link;
    ++num_pending_;
  }
}

void StepPolicy::copy_finished(std::int32_t layer, std::int32_t expert, double now) {
  --num_pending_;
  link_free_at_ = now + static_cast<double>(num_pending_) * costs_.link;
  std::uint8_t& state = resident_.state[layer * resident_.num_experts + expert];
  if (state == kCopying) state = kReady;
}

}  // namespace tandem
