// Which experts a layer to come is expected to use. The same as RegressionPredictor of
// tandem.policy.prediction.regression_predictor, with the HintBlend of hint_blend.py, to the last bit;
// see there for the reasons. One for planned steps and captured ones.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "policy_tables.hpp"

namespace tandem {

// Chances of a layer's experts to be used.
class Forecast {
 public:
  // `scores` are expected tokens in the tables' units; `chances` take their place where hints join in.
  Forecast(Scores scores, std::vector<double> frequencies, std::vector<double> chances)
      : scores_(std::move(scores)),
        frequencies_(std::move(frequencies)),
        chances_(std::move(chances)) {}

  const Scores& scores() const { return scores_; }
  const std::vector<double>& chances() const { return chances_; }  // empty: there are no hints
  double chance(std::int32_t expert) const;

  // The absent experts (`states` by expert) whose chance is above `least`, of the `most` best ones.
  Ids best(const std::uint8_t* states, std::int64_t most, double least) const;

 private:
  double rank(std::int32_t expert) const;

  Scores scores_;
  std::vector<double> frequencies_, chances_;
};

class RegressionPredictor {
 public:
  // How often expectations came true, by bins of expected tokens; of hints, by what these say too.
  struct Counts {
    std::vector<double> seen, came_true;
    std::int64_t countdown, count_every;
  };

  // What is known between steps beside the tables.
  struct State {
    std::vector<Ids> before;  // by layer: experts in use one step before
    Counts counts, of_hints;
  };

  RegressionPredictor(const RegressionTables::Options& options, State state);

  void load(State state);  // between steps
  const State& state() const { return state_; }
  std::int32_t num_experts() const { return tables_.num_experts(); }
  void require(std::int32_t layer) const { tables_.require(layer); }

  void begin_step(const std::vector<std::int64_t>& tokens);  // none: they are unknown
  // What a router that was asked ahead says of a layer to come; `factor` is the place of its kind among
  // those of all, 1 or 3.
  void hint(std::int32_t layer, const Ids& experts, const Ids& tokens, int factor);
  bool is_hinted(std::int32_t layer) const { return !levels_.at(layer).empty(); }
  void observe(std::int32_t layer, const Ids& experts, const Ids& tokens);
  void learn();  // what was observed; when, changes no answer

  // Whether some chance may be above `least`: else no forecast is needed.
  bool may_exceed(std::int32_t layer, double least) const;
  std::optional<Forecast> forecast(std::int32_t layer);

 private:
  struct Lesson {
    std::int32_t layer;
    Ids experts, tokens, above, before;
  };
  using Levels = std::vector<std::pair<std::int32_t, std::int32_t>>;  // experts that hints name

  bool has_rows(std::int32_t layer) const;
  void note(std::int32_t layer, const Ids& experts, const Ids& tokens);
  Scores scores(std::int32_t layer);
  void count(Counts& counts, const Scores& scores, const Ids& active, const Levels& levels);
  std::vector<double> chances(const Scores& scores, const Levels& levels) const;

  RegressionTables tables_;
  State state_;
  std::vector<double> frequencies_;  // of the state's counts
  bool has_tokens_ = false;
  Ids above_;  // experts in use in the layer above
  std::vector<Levels> levels_;  // by layer: of the step, until its load is observed
  std::vector<Lesson> lessons_;
};

}  // namespace tandem
