#include "decider/regression_predictor.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "decider/entries.hpp"

namespace tandem {
namespace {

constexpr double kHalveAt = 1e6;
constexpr int kHintWeights = 3;  // not named, named by one token, named by several
constexpr int kHintLevels = 9;  // of two sources
constexpr double kTieBreak = 1.0 / 1024;  // per expected token; breaks ties between equal chances

double expected_tokens(std::uint32_t score) {
  return (static_cast<double>(score) - kSumOffset) / kOne;
}

int place_of(std::uint32_t score, std::size_t num_bins) {
  const auto bins = static_cast<int>(num_bins);
  return std::clamp(static_cast<int>(expected_tokens(score) * bins), 0, bins - 1);
}

bool is_due(RegressionPredictor::Counts& counts) {
  if (--counts.countdown != 0) return false;
  counts.countdown = counts.count_every;
  return true;
}

}  // namespace

double Forecast::chance(std::int32_t expert) const {
  if (!chances_.empty()) return std::min(1.0, chances_[expert]);
  return frequencies_[place_of(scores_[expert], frequencies_.size())];
}

double Forecast::rank(std::int32_t expert) const {
  return chances_.empty() ? expected_tokens(scores_[expert]) : chances_[expert];
}

Ids Forecast::best(const std::uint8_t* states, std::int64_t most, double least) const {
  double floor = least;  // lower limit of a rank
  if (chances_.empty()) {
    std::size_t bin = 0;
    while (bin < frequencies_.size() && frequencies_[bin] <= least) ++bin;
    if (bin == frequencies_.size()) return {};
    floor = static_cast<double>(bin) / static_cast<double>(frequencies_.size());
  }
  Ids likely;
  for (std::int32_t expert = 0; expert < static_cast<std::int32_t>(scores_.size()); ++expert)
    if (states[expert] == kEmpty && rank(expert) >= floor) likely.push_back(expert);
  std::stable_sort(likely.begin(), likely.end(),
                   [&](std::int32_t a, std::int32_t b) { return rank(a) > rank(b); });
  if (static_cast<std::int64_t>(likely.size()) > most)
    likely.resize(std::max<std::int64_t>(0, most));
  std::erase_if(likely, [&](std::int32_t expert) { return chance(expert) <= least; });
  return likely;
}

RegressionPredictor::RegressionPredictor(const RegressionTables::Options& options, State state)
    : tables_(options) {
  load(std::move(state));
}

void RegressionPredictor::load(State state) {
  const std::size_t bins = state.counts.seen.size();
  if (bins == 0 || bins != state.counts.came_true.size())
    throw std::invalid_argument("expected as many bins in came_true as in seen, and at least one");
  if (state.of_hints.seen.size() != kHintLevels * bins ||
      state.of_hints.came_true.size() != kHintLevels * bins)
    throw std::invalid_argument("expected nine hint levels for each bin");
  for (std::size_t layer = 0; layer < state.before.size(); ++layer) {
    tables_.require(static_cast<std::int32_t>(layer));
    for (const std::int32_t expert : state.before[layer])
      if (expert < 0 || expert >= tables_.num_experts())
        throw std::invalid_argument("expert " + std::to_string(expert) + ", expected 0 to " +
                                    std::to_string(tables_.num_experts() - 1));
  }
  state_ = std::move(state);
  levels_.assign(state_.before.size(), {});
  frequencies_.resize(bins);
  for (std::size_t i = 0; i < bins; ++i)
    frequencies_[i] = state_.counts.came_true[i] / state_.counts.seen[i];
}

void RegressionPredictor::begin_step(const std::vector<std::int64_t>& tokens) {
  learn();  // before the previous tokens' rows are replaced
  above_.clear();
  for (Levels& levels : levels_) levels.clear();
  const bool is_prompt = tokens.size() > static_cast<std::size_t>(tables_.max_tokens());
  has_tokens_ = !tokens.empty() && !is_prompt;
  tables_.begin_step(is_prompt ? std::vector<std::int64_t>{} : tokens);
}

void RegressionPredictor::hint(std::int32_t layer, const Ids& experts, const Ids& tokens,
                               int factor) {
  Levels& levels = levels_.at(layer);
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const int level = std::min(tokens[i], kHintWeights - 1) * factor;
    const auto at = std::find_if(levels.begin(), levels.end(),
                                 [&](const auto& named) { return named.first == experts[i]; });
    if (at == levels.end())
      levels.emplace_back(experts[i], level);
    else
      at->second = std::min(at->second + level, kHintLevels - 1);
  }
}

bool RegressionPredictor::has_rows(std::int32_t layer) const {
  return has_tokens_ || !above_.empty() || !state_.before.at(layer).empty();
}

void RegressionPredictor::observe(std::int32_t layer, const Ids& experts, const Ids& tokens) {
  if (std::none_of(tokens.begin(), tokens.end(),
                   [this](std::int32_t count) { return count > tables_.max_tokens(); }))
    note(layer, experts, tokens);
  state_.before.at(layer) = experts;
  above_ = experts;
}

// Stores a lesson for later; counts are updated now.
void RegressionPredictor::note(std::int32_t layer, const Ids& experts, const Ids& tokens) {
  if (!has_rows(layer)) return;
  Levels& levels = levels_[layer];
  const bool is_counted = is_due(state_.counts);
  const bool are_hints_counted = !levels.empty() && is_due(state_.of_hints);
  if (is_counted || are_hints_counted) {
    const Scores found = scores(layer);
    if (is_counted) {
      count(state_.counts, found, experts, {});
      for (std::size_t i = 0; i < frequencies_.size(); ++i)
        frequencies_[i] = state_.counts.came_true[i] / state_.counts.seen[i];
    }
    if (are_hints_counted) count(state_.of_hints, found, experts, levels);
  }
  levels.clear();
  lessons_.push_back({layer, experts, tokens, above_, state_.before[layer]});
}

void RegressionPredictor::learn() {
  for (const Lesson& lesson : lessons_)
    tables_.teach(lesson.layer, lesson.experts, lesson.tokens, lesson.above, lesson.before);
  lessons_.clear();
}

Scores RegressionPredictor::scores(std::int32_t layer) {
  learn();
  return tables_.scores(layer, above_, state_.before.at(layer));
}

// Counts how often a forecast came true, and its hints.
void RegressionPredictor::count(Counts& counts, const Scores& scores, const Ids& active,
                                const Levels& levels) {
  const std::size_t bins = frequencies_.size();
  std::vector<std::int32_t> level_of(scores.size());
  for (const auto& [expert, level] : levels) level_of[expert] = level;
  for (std::size_t expert = 0; expert < scores.size(); ++expert) {
    const std::size_t place = place_of(scores[expert], bins) + level_of[expert] * bins;
    counts.seen[place] += 1.0;
    const auto id = static_cast<std::int32_t>(expert);
    counts.came_true[place] += std::find(active.begin(), active.end(), id) != active.end();
  }
  if (counts.seen[0] <= kHalveAt) return;
  for (double& seen : counts.seen) seen /= 2.0;
  for (double& came_true : counts.came_true) came_true /= 2.0;
}

// The chance of each expert, from its expected tokens and the hints.
std::vector<double> RegressionPredictor::chances(const Scores& scores, const Levels& levels) const {
  const Counts& counts = state_.of_hints;
  const std::size_t bins = frequencies_.size();
  std::vector<std::int32_t> level_of(scores.size(), -1);
  for (const auto& [expert, level] : levels) level_of[expert] = level;
  const double first_bin = kSumOffset + static_cast<double>(kOne) / static_cast<double>(bins);
  std::vector<double> found(scores.size(), counts.came_true[0] / counts.seen[0]);
  for (std::size_t expert = 0; expert < scores.size(); ++expert) {
    if (level_of[expert] < 0 && scores[expert] < first_bin) continue;
    const std::size_t place = place_of(scores[expert], bins) + std::max(0, level_of[expert]) * bins;
    found[expert] =
        counts.came_true[place] / counts.seen[place] + kTieBreak * expected_tokens(scores[expert]);
  }
  return found;
}

bool RegressionPredictor::may_exceed(std::int32_t layer, double least) const {
  if (!has_rows(layer)) return false;
  return is_hinted(layer) || std::any_of(frequencies_.begin(), frequencies_.end(),
                                         [&](double frequency) { return frequency > least; });
}

std::optional<Forecast> RegressionPredictor::forecast(std::int32_t layer) {
  if (!has_rows(layer)) return std::nullopt;
  Scores found = scores(layer);
  std::vector<double> hinted;
  if (is_hinted(layer)) hinted = chances(found, levels_[layer]);
  return Forecast(std::move(found), frequencies_, std::move(hinted));
}

}  // namespace tandem
