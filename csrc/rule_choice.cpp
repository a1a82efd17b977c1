#include "rule_choice.hpp"

#include <algorithm>
#include <cstddef>

namespace tandem {

void GhostCache::reset(std::int32_t num_experts, std::int64_t capacity) {
  capacity_ = capacity;
  num_held_ = 0;
  held_.assign(num_experts, 0);
}

std::int32_t GhostCache::use(const Ids& experts, const std::vector<std::uint8_t>& is_active,
                             const Scores& scores) {
  misses_.clear();
  for (const std::int32_t expert : experts)
    if (!held_[expert]) misses_.push_back(expert);
  const auto hits = static_cast<std::int32_t>(experts.size() - misses_.size());
  if (misses_.empty()) return hits;
  std::sort(misses_.begin(), misses_.end(), [&](std::int32_t a, std::int32_t b) {
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
  });
  std::size_t next = 0;
  for (; next < misses_.size() && num_held_ < capacity_; ++next, ++num_held_)
    held_[misses_[next]] = 1;
  if (next == misses_.size()) return hits;
  leaving_.clear();
  for (std::size_t expert = 0; expert < held_.size(); ++expert)
    if (held_[expert] && !is_active[expert]) leaving_.push_back(static_cast<std::int32_t>(expert));
  const std::size_t count = std::min(leaving_.size(), misses_.size() - next);
  std::partial_sort(leaving_.begin(), leaving_.begin() + static_cast<std::ptrdiff_t>(count),
                    leaving_.end(), [&](std::int32_t a, std::int32_t b) {
                      return scores[a] < scores[b] || (scores[a] == scores[b] && a < b);
                    });
  for (std::size_t i = 0; i < count; ++i, ++next) {
    if (scores[misses_[next]] <= scores[leaving_[i]]) break;
    held_[leaving_[i]] = 0;
    held_[misses_[next]] = 1;
  }
  return hits;
}

void RuleStart::weigh(const Hits& hits) {
  for (int rule = 0; rule < kNumRules; ++rule) {
    const std::int64_t more = hits[rule] - hits[kRecency];
    leads_[rule] += more;
    squares_[rule] += more * more;
    if (leads_[rule] <= 0) leads_[rule] = squares_[rule] = 0;
  }
  const auto best = std::max_element(leads_.begin(), leads_.end()) - leads_.begin();
  if (leads_[best] * leads_[best] > deviations_ * deviations_ * squares_[best])
    rule_ = static_cast<int>(best);
}

void RuleChoice::resize(std::int64_t capacity) {
  if (capacity == capacity_) return;
  capacity_ = capacity;
  const auto num_experts = static_cast<std::int32_t>(is_active_.size());
  is_open_ = 0 < capacity && capacity < num_experts;
  for (GhostCache& ghost : ghosts_) ghost.reset(num_experts, capacity);
}

void RuleChoice::use(const Ids& experts, const std::array<Scores, kNumRules>& scores,
                     bool is_prompt) {
  for (const std::int32_t expert : experts) is_active_[expert] = 1;
  Hits hits{};
  for (int rule = 0; rule < kNumRules; ++rule)
    hits[rule] = ghosts_[rule].use(experts, is_active_, scores[rule]);
  for (const std::int32_t expert : experts) is_active_[expert] = 0;
  hits_.reset();
  if (!is_prompt) hits_ = hits;
}

int RuleChoice::choose() {
  if (hits_ && options_.start->rule() == kRecency) {
    options_.start->weigh(*hits_);
  } else if (hits_) {
    weigh(*hits_);
  }
  hits_.reset();
  return followed();
}

void RuleChoice::weigh(const Hits& hits) {
  const std::int64_t margin = options_.margin;
  const std::int64_t back =
      std::min(margin, options_.back_margin * std::max<std::int64_t>(1, times_left_));
  const std::int64_t base = hits[followed()];
  int best = 0;
  std::int64_t beyond = 0;
  for (int rule = 0; rule < kNumRules; ++rule) {
    leads_[rule] = std::max<std::int64_t>(0, leads_[rule] + hits[rule] - base);
    const std::int64_t more = leads_[rule] - (rule == kNextUse ? back : margin);
    if (rule == 0 || more > beyond) best = rule, beyond = more;
  }
  if (beyond < 0) return;
  times_left_ += followed() == kNextUse;
  own_ = best;
  leads_.fill(0);
}

}  // namespace tandem
