// Chooses which of several rules a layer's cache follows: the one whose ghost cache has had more
// hits. Decisions equal those of tandem.policy.eviction.rule_choice; the reasons are explained
// there.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tandem {

using Ids = std::vector<std::int32_t>;
using Scores = std::vector<std::uint32_t>;  // by expert

constexpr int kNextUse = 0, kRecency = 1, kDecayed = 2, kNumRules = 3;

// The experts of a layer that one rule would hold.
class GhostCache {
 public:
  void reset(std::int32_t num_experts, std::int64_t capacity);

  // Returns how many of `experts` are held, then admits the others by their scores. `is_active`
  // says by expert whether it is in `experts`.
  std::int32_t use(const Ids& experts, const std::vector<std::uint8_t>& is_active,
                   const Scores& scores);

 private:
  std::int64_t capacity_ = 0, num_held_ = 0;
  std::vector<std::uint8_t> held_;  // by expert
  Ids misses_, leaving_;
};

using Hits = std::array<std::int64_t, kNumRules>;  // by rule

// The rule with which all layers of a model start.
class RuleStart {
 public:
  explicit RuleStart(std::int32_t deviations) : deviations_(deviations) {}

  int rule() const { return rule_; }
  void weigh(const Hits& hits);

 private:
  std::int64_t deviations_;
  int rule_ = kRecency;
  Hits leads_{}, squares_{};
};

class RuleChoice {
 public:
  struct Options {
    std::int32_t margin, back_margin;
    std::shared_ptr<RuleStart> start;
  };

  RuleChoice(std::int32_t num_experts, const Options& options)
      : options_(options), is_active_(num_experts) {}

  bool is_open() const { return is_open_; }
  void resize(std::int64_t capacity);
  void use(const Ids& experts, const std::array<Scores, kNumRules>& scores, bool is_prompt);
  int choose();  // returns the rule to follow; once per step, in the order of the layers

 private:
  int followed() const { return is_open_ ? own_.value_or(options_.start->rule()) : kNextUse; }
  void weigh(const Hits& hits);

  Options options_;
  std::optional<int> own_;  // this layer's rule, once it has changed it
  bool is_open_ = false;
  std::int64_t capacity_ = 0, times_left_ = 0;
  std::array<GhostCache, kNumRules> ghosts_;
  std::optional<Hits> hits_;  // not weighed yet
  Hits leads_{};
  std::vector<std::uint8_t> is_active_;
};

}  // namespace tandem
