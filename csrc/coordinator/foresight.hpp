// Which experts the next layer of a captured step is expected to use, and which of them are worth a
// copy ahead. The same as RegressionPredictor of tandem.policy.prediction.regression_predictor, with
// the HintBlend of hint_blend.py, and the choice `pays` of tandem.policy.prefetch, without token ids,
// to the last bit; see there for the reasons.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "policy_tables.hpp"

namespace tandem {

class Foresight {
 public:
  // How often expectations came true, by bins of expected tokens; of hints, by what these say too.
  struct Counts {
    std::vector<double> seen, came_true;
    std::int64_t countdown, count_every;
  };

  // What is known between steps.
  struct State {
    std::vector<Ids> before;  // by layer: experts in use one step before
    Counts counts, of_hints;
  };

  // The tables must outlive it. `hint_factor` is the place of hints among those of other sources.
  Foresight(ForesightTables& tables, State state, int hint_factor);

  void load(State state);  // between steps
  const State& state() const { return state_; }

  void begin_step();
  // What a layer's own router says that this layer is about to use; before that is observed.
  void hint(std::int32_t layer, const Ids& experts, const Ids& tokens);
  void observe(std::int32_t layer, const Ids& experts, const Ids& tokens);
  void learn();  // what was observed; when, changes no answer

  // The experts of a layer whose chance is above `least`, best first: at most so many of those
  // without a slot (`slots` by expert, negative: none).
  Ids choose(std::int32_t layer, const std::int32_t* slots, std::int64_t most, double least);

 private:
  struct Lesson {
    std::int32_t layer;
    Ids experts, tokens, above, before;
  };
  using Levels = std::vector<std::pair<std::int32_t, std::int32_t>>;  // experts that hints name

  std::vector<std::uint32_t> scores(std::int32_t layer);
  int place_of(std::uint32_t score) const;
  void count(Counts& counts, const std::vector<std::uint32_t>& scores, const Ids& active,
             const Levels& levels);
  std::vector<double> chances(const std::vector<std::uint32_t>& scores, const Levels& levels) const;
  Ids choose_hinted(const std::vector<double>& chances, const std::int32_t* slots,
                    std::int64_t most, double least) const;

  ForesightTables& tables_;
  State state_;
  const int hint_factor_;
  int bins_ = 0;
  std::vector<double> frequencies_;  // of the state's counts
  Ids above_;  // experts in use in the layer above
  std::vector<Levels> levels_;  // by layer: of the step, until its load is observed
  std::vector<Lesson> lessons_;
};

}  // namespace tandem
