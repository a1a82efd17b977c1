#include "coordinator/foresight.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace tandem {
namespace {

constexpr double kHalveAt = 1e6;

double expected_tokens(std::uint32_t score) {
  return (static_cast<double>(score) - kSumOffset) / kOne;
}

}  // namespace

Foresight::Foresight(ForesightTables& tables, State state) : tables_(tables) {
  load(std::move(state));
}

void Foresight::load(State state) {
  if (state.seen.empty() || state.seen.size() != state.came_true.size())
    throw std::invalid_argument("expected as many bins that were seen as that came true");
  for (std::size_t layer = 0; layer < state.before.size(); ++layer) {
    tables_.require(static_cast<std::int32_t>(layer));
    for (const std::int32_t expert : state.before[layer])
      if (expert < 0 || expert >= tables_.num_experts())
        throw std::invalid_argument("an expert that there is not");
  }
  state_ = std::move(state);
  find_frequencies();
}

void Foresight::find_frequencies() {
  frequencies_.resize(state_.seen.size());
  for (std::size_t i = 0; i < frequencies_.size(); ++i)
    frequencies_[i] = state_.came_true[i] / state_.seen[i];
}

void Foresight::begin_step() {
  learn();  // with the rows of the tokens that were
  above_.clear();
  tables_.begin_step({});
}

void Foresight::observe(std::int32_t layer, const Ids& experts, const Ids& tokens) {
  Ids& before = state_.before.at(layer);
  if (!above_.empty() || !before.empty()) {
    if (--state_.countdown == 0) {
      state_.countdown = state_.count_every;
      count(scores(layer), experts);
    }
    lessons_.push_back({layer, experts, tokens, above_, before});
  }
  before = experts;
  above_ = experts;
}

void Foresight::learn() {
  for (const Lesson& lesson : lessons_)
    tables_.teach(lesson.layer, lesson.experts, lesson.tokens, lesson.above, lesson.before);
  lessons_.clear();
}

std::vector<std::uint32_t> Foresight::scores(std::int32_t layer) {
  learn();
  return tables_.scores(layer, above_, state_.before.at(layer));
}

// Counts how a forecast came out.
void Foresight::count(const std::vector<std::uint32_t>& scores, const Ids& active) {
  const auto bins = static_cast<int>(state_.seen.size());
  for (std::size_t expert = 0; expert < scores.size(); ++expert) {
    const int place =
        std::clamp(static_cast<int>(expected_tokens(scores[expert]) * bins), 0, bins - 1);
    state_.seen[place] += 1.0;
    const auto id = static_cast<std::int32_t>(expert);
    state_.came_true[place] += std::find(active.begin(), active.end(), id) != active.end();
  }
  find_frequencies();
  if (state_.seen[0] <= kHalveAt) return;
  for (double& seen : state_.seen) seen /= 2.0;
  for (double& came_true : state_.came_true) came_true /= 2.0;
}

Ids Foresight::choose(std::int32_t layer, const std::int32_t* slots, std::int64_t most,
                      double least) {
  if (most <= 0 || (above_.empty() && state_.before.at(layer).empty())) return {};
  const auto bins = static_cast<int>(frequencies_.size());
  int first_likely = 0;
  while (first_likely < bins && frequencies_[first_likely] <= least) ++first_likely;
  if (first_likely == bins) return {};
  const double floor = static_cast<double>(first_likely) / bins;
  const std::vector<std::uint32_t> found = scores(layer);
  Ids likely;
  for (std::size_t expert = 0; expert < found.size(); ++expert)
    if (slots[expert] < 0 && expected_tokens(found[expert]) >= floor)
      likely.push_back(static_cast<std::int32_t>(expert));
  std::stable_sort(likely.begin(), likely.end(),
                   [&](std::int32_t a, std::int32_t b) { return found[a] > found[b]; });
  if (static_cast<std::int64_t>(likely.size()) > most) likely.resize(most);
  std::erase_if(likely, [&](std::int32_t expert) {
    const int place =
        std::clamp(static_cast<int>(expected_tokens(found[expert]) * bins), 0, bins - 1);
    return frequencies_[place] <= least;
  });
  return likely;
}

}  // namespace tandem
