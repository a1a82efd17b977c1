// The tables in which two of the planner's policies learn, as plain arrays of 32-bit integers.
// Results equal those of PureTable of tandem.policy.eviction.next_use and PureTables of
// tandem.policy.prediction.regression_predictor bit by bit: a lane there is a value here plus a
// constant.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "rule_choice.hpp"

namespace tandem {

// Shared with tandem.policy.regression and tandem.policy.lanes.
constexpr std::int32_t kOne = 65536;
constexpr std::uint32_t kSumOffset = 1u << 23;
constexpr std::int32_t kErrorOffset = 1 << 24;

// Returns the power of two nearest to rate / num_rows, as a shift.
int rate_shift(double rate, std::int64_t num_rows);

// One layer of the eviction.
class NextUseTable {
 public:
  struct Options {
    std::int32_t num_experts, first_row;  // the initial value of every row
    std::uint32_t first_average;
    Ids losses;  // by number of steps until the next use
    double rate;
    std::int32_t fast_shift, slow_shift, steady_shift, predicted_shift, max_tokens;
    RuleChoice::Options choice;
  };

  explicit NextUseTable(const Options& options);

  std::int32_t num_experts() const { return options_.num_experts; }

  // Settles earlier predictions if possible, then takes the used experts; `tokens` belong to the
  // `loaded` experts.
  void note(const Ids& loaded, const Ids& tokens, std::int32_t divisor, const Ids& experts,
            const Ids& above);
  void learn();
  void prefetch(const Ids& above) const;  // for a coming note; changes nothing
  Scores values() const;  // by expert, under the current rule
  void resize(std::int64_t capacity) { choice_.resize(capacity); }
  int followed() const { return followed_; }

 private:
  struct Prediction {
    Ids experts, above, total;
  };

  Scores predicted() const;
  void settle(const Prediction& prediction);
  void move_averages(const Ids& experts, const Ids& weights);

  Options options_;
  Ids after_, below_;  // (num_experts, num_experts): rows by expert used here, and above
  Scores fast_, slow_;
  Scores last_use_, steady_;  // scores for the other rules
  RuleChoice choice_;
  int followed_ = kNextUse;  // since the last note
  std::uint32_t step_ = 0;
  Ids compared_;  // experts that the choice has not seen yet
  std::deque<Prediction> past_;
  Prediction spare_;  // reused
  Ids change_, first_use_;
};

// All layers of the prediction.
class RegressionTables {
 public:
  struct Options {
    std::int32_t num_layers, num_experts, first_row, num_buckets;
    double rate, token_rate;
    std::int32_t max_tokens;  // per step; more are a prompt
  };

  explicit RegressionTables(const Options& options);

  std::int32_t num_experts() const { return options_.num_experts; }
  std::int32_t max_tokens() const { return options_.max_tokens; }

  // Throws std::invalid_argument for a layer that does not exist.
  void require(std::int32_t layer) const;

  void begin_step(const std::vector<std::int64_t>& tokens);
  std::vector<std::uint32_t> scores(std::int32_t layer, const Ids& above, const Ids& before) const;
  void teach(std::int32_t layer, const Ids& experts, const Ids& tokens, const Ids& above,
             const Ids& before);

 private:
  std::int64_t sum(std::int32_t layer, const Ids& above, const Ids& before, Ids& total) const;

  Options options_;
  Ids below_, after_;  // (num_layers, num_experts, num_experts)
  std::vector<Ids> buckets_;  // (num_layers, num_experts) each, once a token has come
  std::vector<std::int64_t> tags_;  // bucket -> its token
  std::vector<std::int32_t> step_buckets_;  // of the step's tokens, in their order
};

}  // namespace tandem
