#include "coordinator/foresight.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace tandem {
namespace {

constexpr double kHalveAt = 1e6;
constexpr int kHintWeights = 3;                 // not named, named by one token, by several
constexpr int kHintLevels = 9;                  // of two sources
constexpr double kTieBreak = 1.0 / 1024;        // of the expected tokens, among equal chances

double expected_tokens(std::uint32_t score) {
  return (static_cast<double>(score) - kSumOffset) / kOne;
}

bool is_due(Foresight::Counts& counts) {
  if (--counts.countdown != 0) return false;
  counts.countdown = counts.count_every;
  return true;
}

}  // namespace

Foresight::Foresight(ForesightTables& tables, State state, int hint_factor)
    : tables_(tables), hint_factor_(hint_factor) {
  load(std::move(state));
}

void Foresight::load(State state) {
  const std::size_t bins = state.counts.seen.size();
  if (bins == 0 || bins != state.counts.came_true.size())
    throw std::invalid_argument("expected as many bins that were seen as that came true");
  if (state.of_hints.seen.size() != kHintLevels * bins ||
      state.of_hints.came_true.size() != kHintLevels * bins)
    throw std::invalid_argument("expected nine levels of what hints say for each bin");
  for (std::size_t layer = 0; layer < state.before.size(); ++layer) {
    tables_.require(static_cast<std::int32_t>(layer));
    for (const std::int32_t expert : state.before[layer])
      if (expert < 0 || expert >= tables_.num_experts())
        throw std::invalid_argument("an expert that there is not");
  }
  state_ = std::move(state);
  bins_ = static_cast<int>(bins);
  levels_.assign(state_.before.size(), {});
  frequencies_.resize(bins);
  for (std::size_t i = 0; i < bins; ++i)
    frequencies_[i] = state_.counts.came_true[i] / state_.counts.seen[i];
}

void Foresight::begin_step() {
  learn();  // with the rows of the tokens that were
  above_.clear();
  for (Levels& levels : levels_) levels.clear();
  tables_.begin_step({});
}

void Foresight::hint(std::int32_t layer, const Ids& experts, const Ids& tokens) {
  Levels& levels = levels_.at(layer);
  levels.clear();
  for (std::size_t i = 0; i < experts.size(); ++i)
    levels.emplace_back(experts[i], std::min(tokens[i], kHintWeights - 1) * hint_factor_);
}

void Foresight::observe(std::int32_t layer, const Ids& experts, const Ids& tokens) {
  Ids& before = state_.before.at(layer);
  if (!above_.empty() || !before.empty()) {
    Levels& levels = levels_[layer];
    const bool is_counted = is_due(state_.counts);
    const bool are_hints_counted = !levels.empty() && is_due(state_.of_hints);
    if (is_counted || are_hints_counted) {
      const std::vector<std::uint32_t> found = scores(layer);
      if (is_counted) {
        count(state_.counts, found, experts, {});
        for (int i = 0; i < bins_; ++i)
          frequencies_[i] = state_.counts.came_true[i] / state_.counts.seen[i];
      }
      if (are_hints_counted) count(state_.of_hints, found, experts, levels);
    }
    levels.clear();
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

int Foresight::place_of(std::uint32_t score) const {
  return std::clamp(static_cast<int>(expected_tokens(score) * bins_), 0, bins_ - 1);
}

// Counts how a forecast came out, and the hints beside it.
void Foresight::count(Counts& counts, const std::vector<std::uint32_t>& scores, const Ids& active,
                      const Levels& levels) {
  std::vector<std::int32_t> level_of(scores.size());
  for (const auto& [expert, level] : levels) level_of[expert] = level;
  for (std::size_t expert = 0; expert < scores.size(); ++expert) {
    const int place = place_of(scores[expert]) + level_of[expert] * bins_;
    counts.seen[place] += 1.0;
    const auto id = static_cast<std::int32_t>(expert);
    counts.came_true[place] += std::find(active.begin(), active.end(), id) != active.end();
  }
  if (counts.seen[0] <= kHalveAt) return;
  for (double& seen : counts.seen) seen /= 2.0;
  for (double& came_true : counts.came_true) came_true /= 2.0;
}

// The chance of each expert, given what is expected of it and what hints say.
std::vector<double> Foresight::chances(const std::vector<std::uint32_t>& scores,
                                       const Levels& levels) const {
  const Counts& counts = state_.of_hints;
  std::vector<std::int32_t> level_of(scores.size(), -1);
  for (const auto& [expert, level] : levels) level_of[expert] = level;
  const double first_bin = kSumOffset + static_cast<double>(kOne) / bins_;
  std::vector<double> found(scores.size(), counts.came_true[0] / counts.seen[0]);
  for (std::size_t expert = 0; expert < scores.size(); ++expert) {
    if (level_of[expert] < 0 && scores[expert] < first_bin) continue;
    const int place = place_of(scores[expert]) + std::max(0, level_of[expert]) * bins_;
    found[expert] =
        counts.came_true[place] / counts.seen[place] + kTieBreak * expected_tokens(scores[expert]);
  }
  return found;
}

Ids Foresight::choose_hinted(const std::vector<double>& chances, const std::int32_t* slots,
                             std::int64_t most, double least) const {
  Ids likely;
  for (std::size_t expert = 0; expert < chances.size(); ++expert)
    if (slots[expert] < 0 && chances[expert] >= least)
      likely.push_back(static_cast<std::int32_t>(expert));
  std::stable_sort(likely.begin(), likely.end(),
                   [&](std::int32_t a, std::int32_t b) { return chances[a] > chances[b]; });
  if (static_cast<std::int64_t>(likely.size()) > most) likely.resize(most);
  std::erase_if(likely, [&](std::int32_t e) { return std::min(1.0, chances[e]) <= least; });
  return likely;
}

Ids Foresight::choose(std::int32_t layer, const std::int32_t* slots, std::int64_t most,
                      double least) {
  if (most <= 0 || (above_.empty() && state_.before.at(layer).empty())) return {};
  if (!levels_[layer].empty())
    return choose_hinted(chances(scores(layer), levels_[layer]), slots, most, least);
  int first_likely = 0;
  while (first_likely < bins_ && frequencies_[first_likely] <= least) ++first_likely;
  if (first_likely == bins_) return {};
  const double floor = static_cast<double>(first_likely) / bins_;
  const std::vector<std::uint32_t> found = scores(layer);
  Ids likely;
  for (std::size_t expert = 0; expert < found.size(); ++expert)
    if (slots[expert] < 0 && expected_tokens(found[expert]) >= floor)
      likely.push_back(static_cast<std::int32_t>(expert));
  std::stable_sort(likely.begin(), likely.end(),
                   [&](std::int32_t a, std::int32_t b) { return found[a] > found[b]; });
  if (static_cast<std::int64_t>(likely.size()) > most) likely.resize(most);
  std::erase_if(likely,
                [&](std::int32_t expert) { return frequencies_[place_of(found[expert])] <= least; });
  return likely;
}

}  // namespace tandem
