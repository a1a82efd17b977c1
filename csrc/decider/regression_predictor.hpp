// Predicts which experts a coming layer will use. Results equal those of RegressionPredictor of
// tandem.policy.prediction.regression_predictor with the HintBlend of hint_blend.py, bit by bit;
// the reasons are explained there. Planned and captured steps share one predictor.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "policy_tables.hpp"

namespace tandem {

// The chances of a layer's experts to be used.
class Forecast {
 public:
  // `scores` are expected tokens in the tables' units. With hints, `chances` replaces them.
  Forecast(Scores scores, std::vector<double> frequencies, std::vector<double> chances)
      : scores_(std::move(scores)),
        frequencies_(std::move(frequencies)),
        chances_(std::move(chances)) {}

  const Scores& scores() const { return scores_; }
  const std::vector<double>& chances() const { return chances_; }  // empty: there are no hints
  double chance(std::int32_t expert) const;

  // Of the `most` best experts, those that are absent (`states` by expert) and whose chance is
  // above `least`.
  Ids best(const std::uint8_t* states, std::int64_t most, double least) const;

 private:
  double rank(std::int32_t expert) const;

  Scores scores_;
  std::vector<double> frequencies_, chances_;
};

class RegressionPredictor {
 public:
  // How often expectations came true, by bin of expected tokens; with hints, also by the hints'
  // level.
  struct Counts {
    std::vector<double> seen, came_true;
    std::int64_t countdown, count_every;
  };

  // The state between steps, besides the tables.
  struct State {
    std::vector<Ids> before;  // by layer: experts used in the step before
    Counts counts, of_hints;
  };

  RegressionPredictor(const RegressionTables::Options& options, State state);

  void load(State state);  // called between steps
  const State& state() const { return state_; }
  std::int32_t num_experts() const { return tables_.num_experts(); }
  void require(std::int32_t layer) const { tables_.require(layer); }

  void begin_step(const std::vector<std::int64_t>& tokens);  // none: unknown
  // Takes the choice of a router that was run ahead for a coming layer. `factor` is its source's
  // weight in the level: 1 or 3.
  void hint(std::int32_t layer, const Ids& experts, const Ids& tokens, int factor);
  bool is_hinted(std::int32_t layer) const { return !levels_.at(layer).empty(); }
  void observe(std::int32_t layer, const Ids& experts, const Ids& tokens);
  void learn();  // from what was observed; when it is called changes no results

  // Whether any chance may be above `least`; if not, no forecast is needed.
  bool may_exceed(std::int32_t layer, double least) const;
  std::optional<Forecast> forecast(std::int32_t layer);

 private:
  struct Lesson {
    std::int32_t layer;
    Ids experts, tokens, above, before;
  };
  // (expert named by hints, level).
  using Levels = std::vector<std::pair<std::int32_t, std::int32_t>>;

  bool has_rows(std::int32_t layer) const;
  void note(std::int32_t layer, const Ids& experts, const Ids& tokens);
  Scores scores(std::int32_t layer);
  void count(Counts& counts, const Scores& scores, const Ids& active, const Levels& levels);
  std::vector<double> chances(const Scores& scores, const Levels& levels) const;

  RegressionTables tables_;
  State state_;
  std::vector<double> frequencies_;  // of the state's counts
  bool has_tokens_ = false;
  Ids above_;  // experts used in the layer above
  std::vector<Levels> levels_;  // by layer, for this step, until its load is observed
  std::vector<Lesson> lessons_;
};

}  // namespace tandem
