// Which experts the next layer of a captured step is expected to use, and which of them are worth a
// copy ahead. The same as RegressionPredictor of tandem.policy.prediction.regression_predictor and
// the choice `pays` of tandem.policy.prefetch, without hints and token ids, to the last bit; see
// there for the reasons.
#pragma once

#include <cstdint>
#include <vector>

#include "policy_tables.hpp"

namespace tandem {

class Foresight {
 public:
  // What is known between steps; chances are counted by bins of expected tokens.
  struct State {
    std::vector<Ids> before;  // by layer: experts in use one step before
    std::vector<double> seen, came_true;
    std::int64_t countdown, count_every;
  };

  // The tables must outlive it.
  Foresight(ForesightTables& tables, State state);

  void load(State state);  // between steps
  const State& state() const { return state_; }

  void begin_step();
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

  std::vector<std::uint32_t> scores(std::int32_t layer);
  void count(const std::vector<std::uint32_t>& scores, const Ids& active);
  void find_frequencies();

  ForesightTables& tables_;
  State state_;
  std::vector<double> frequencies_;
  Ids above_;  // experts in use in the layer above
  std::vector<Lesson> lessons_;
};

}  // namespace tandem
