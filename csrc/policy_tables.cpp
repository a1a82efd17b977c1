#include "policy_tables.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace tandem {
namespace {

// The change of each row: (truth - predicted) / 2**shift, rounded.
std::int32_t change_of(std::int32_t truth, std::int32_t predicted, int shift) {
  const std::int32_t half = (1 << shift) >> 1;
  const auto error = static_cast<std::uint32_t>(truth - predicted + kErrorOffset + half);
  return static_cast<std::int32_t>(error >> shift) - (kErrorOffset >> shift);
}

// Modulo as in Python: models mark positions that are not text by negative ids.
std::int32_t bucket_of(std::int64_t token, std::int32_t num_buckets) {
  const std::int64_t rest = token % num_buckets;
  return static_cast<std::int32_t>(rest < 0 ? rest + num_buckets : rest);
}

void add(Ids& to, const std::int32_t* row) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += row[i];
}

// Adds up the rows of some experts, a few columns at a time, so that the sums stay in registers.
void add_rows(Ids& to, const Ids& table, const Ids& experts) {
  constexpr std::size_t columns = 16;
  std::size_t first = 0;
  for (; first + columns <= to.size(); first += columns) {
    std::array<std::int32_t, columns> sums;
    std::copy_n(&to[first], columns, sums.begin());
    for (const std::int32_t expert : experts) {
      const std::int32_t* row = &table[expert * to.size() + first];
      for (std::size_t i = 0; i < columns; ++i) sums[i] += row[i];
    }
    std::copy_n(sums.begin(), columns, &to[first]);
  }
  for (; first < to.size(); ++first)
    for (const std::int32_t expert : experts) to[first] += table[expert * to.size() + first];
}

void add(std::int32_t* to, const Ids& row) {
  for (std::size_t i = 0; i < row.size(); ++i) to[i] += row[i];
}

}  // namespace

int rate_shift(double rate, std::int64_t num_rows) {
  int shift = 0;
  while (static_cast<double>(std::int64_t{1} << shift) <
         static_cast<double>(num_rows) / (1.4 * rate))
    ++shift;
  return std::min(shift, 16);
}

NextUseTable::NextUseTable(const Options& options)
    : options_(options),
      after_(static_cast<std::size_t>(options.num_experts) * options.num_experts,
             options.first_row),
      below_(after_),
      fast_(options.num_experts, options.first_average),
      slow_(fast_),
      last_use_(options.num_experts),
      steady_(fast_),
      choice_(options.num_experts, options.choice),
      change_(options.num_experts),
      first_use_(options.num_experts) {}

void NextUseTable::note(const Ids& loaded, const Ids& tokens, std::int32_t divisor,
                        const Ids& experts, const Ids& above) {
  learn();
  past_.push_back(std::move(spare_));
  Prediction& now = past_.back();
  now.experts = experts;
  now.above = above;
  now.total.assign(options_.num_experts, 0);
  add_rows(now.total, after_, experts);
  add_rows(now.total, below_, above);
  ++step_;
  for (const std::int32_t expert : loaded) last_use_[expert] = step_;
  compared_ = loaded;
  followed_ = choice_.choose();
  if (*std::max_element(tokens.begin(), tokens.end()) == 1) {
    move_averages(experts, {});
    return;
  }
  Ids weights(tokens);  // in larger batches a busy expert saves more CPU time
  for (std::int32_t& weight : weights)
    weight = std::min((weight + divisor / 2) / divisor, options_.max_tokens);
  move_averages(loaded, weights);
}

// Prefetches rows of all experts here and of those above, and everything else that a note reads and
// writes.
void NextUseTable::prefetch(const Ids& above) const {
  constexpr std::size_t line = 64;
  const auto ask = [](const void* memory, std::size_t bytes) {
    const auto* first = static_cast<const char*>(memory);
    for (std::size_t at = 0; at < bytes; at += line) __builtin_prefetch(first + at);
  };
  const std::size_t row = after_.size() / fast_.size() * sizeof(std::int32_t);
  ask(after_.data(), after_.size() * sizeof(std::int32_t));
  for (const std::int32_t expert : above) ask(&below_[expert * fast_.size()], row);
  for (const Scores* scores : {&fast_, &slow_, &last_use_, &steady_}) ask(scores->data(), row);
}

// Updates the moving averages by one step: `weights` (or 1) for these experts, 0 for the others.
void NextUseTable::move_averages(const Ids& experts, const Ids& weights) {
  const auto move = [&](Scores& averages, int shift) {
    for (std::uint32_t& average : averages) average -= average >> shift;
    for (std::size_t i = 0; i < experts.size(); ++i)
      averages[experts[i]] += static_cast<std::uint32_t>(weights.empty() ? 1 : weights[i])
                              << (16 - shift);
  };
  move(fast_, options_.fast_shift);
  move(slow_, options_.slow_shift);
  move(steady_, options_.steady_shift);
}

void NextUseTable::learn() {
  if (!compared_.empty() && choice_.is_open())
    choice_.use(compared_, {predicted(), last_use_, steady_}, compared_ != past_.back().experts);
  compared_.clear();
  if (past_.size() <= options_.losses.size()) return;
  settle(past_.front());
  spare_ = std::move(past_.front());
  past_.pop_front();
}

// Adds a share of the error to each row that contributed. `past_` holds the prediction and the
// steps after it.
void NextUseTable::settle(const Prediction& prediction) {
  const auto horizon = static_cast<std::int32_t>(options_.losses.size());
  std::fill(first_use_.begin(), first_use_.end(), horizon);
  for (std::int32_t step = horizon; step > 0; --step)
    for (const std::int32_t expert : past_[step].experts) first_use_[expert] = step - 1;
  Ids truth(horizon + 1);  // by step of the first use
  for (std::int32_t step = horizon; step-- > 0;)
    truth[step] = truth[step + 1] + options_.losses[step];
  const auto rows = static_cast<std::int64_t>(prediction.experts.size() + prediction.above.size());
  const int shift = rate_shift(options_.rate, rows);
  for (std::size_t e = 0; e < change_.size(); ++e)
    change_[e] = change_of(truth[first_use_[e]], prediction.total[e], shift);
  const std::size_t size = options_.num_experts;
  for (const std::int32_t expert : prediction.experts) add(&after_[expert * size], change_);
  for (const std::int32_t expert : prediction.above) add(&below_[expert * size], change_);
}

Scores NextUseTable::values() const {
  if (followed_ == kRecency) return last_use_;
  return followed_ == kDecayed ? steady_ : predicted();
}

// Scores from the predictions of the experts in use, and two averages.
Scores NextUseTable::predicted() const {
  Scores found(fast_.size());
  for (std::size_t e = 0; e < found.size(); ++e) {
    const std::uint32_t total = past_.empty() ? 0u : past_.back().total[e];
    found[e] = ((total + kSumOffset) << options_.predicted_shift) + fast_[e] + slow_[e];
  }
  return found;
}

RegressionTables::RegressionTables(const Options& options)
    : options_(options),
      below_(
          static_cast<std::size_t>(options.num_layers) * options.num_experts * options.num_experts,
          options.first_row),
      after_(below_),
      buckets_(options.num_buckets),
      tags_(options.num_buckets) {}

void RegressionTables::require(std::int32_t layer) const {
  if (layer < 0 || layer >= options_.num_layers)
    throw std::invalid_argument("layer " + std::to_string(layer) + ", expected 0 to " +
                                std::to_string(options_.num_layers - 1));
}

void RegressionTables::begin_step(const std::vector<std::int64_t>& tokens) {
  step_buckets_.clear();
  for (const std::int64_t token : tokens) {
    const std::int32_t bucket = bucket_of(token, options_.num_buckets);
    if (buckets_[bucket].empty() || tags_[bucket] != token) {
      tags_[bucket] = token;
      buckets_[bucket].assign(
          static_cast<std::size_t>(options_.num_layers) * options_.num_experts, 0);
    }
    step_buckets_.push_back(bucket);
  }
}

std::int64_t RegressionTables::sum(std::int32_t layer, const Ids& above, const Ids& before,
                                   Ids& total) const {
  const std::size_t size = options_.num_experts, first = layer * size;
  total.assign(size, 0);
  for (const std::int32_t expert : above) add(total, &below_[(first + expert) * size]);
  for (const std::int32_t expert : before) add(total, &after_[(first + expert) * size]);
  for (const std::int32_t bucket : step_buckets_) add(total, &buckets_[bucket][first]);
  return static_cast<std::int64_t>(above.size() + before.size() + step_buckets_.size());
}

std::vector<std::uint32_t> RegressionTables::scores(std::int32_t layer, const Ids& above,
                                                    const Ids& before) const {
  Ids total;
  sum(layer, above, before, total);
  std::vector<std::uint32_t> found(total.begin(), total.end());
  for (std::uint32_t& score : found) score += kSumOffset;
  return found;
}

void RegressionTables::teach(std::int32_t layer, const Ids& experts, const Ids& tokens,
                             const Ids& above, const Ids& before) {
  Ids total;
  sum(layer, above, before, total);
  const std::size_t size = options_.num_experts, first = layer * size;
  Ids truth(size), change(size);
  for (std::size_t i = 0; i < experts.size(); ++i) truth[experts[i]] = tokens[i] * kOne;
  const auto change_by = [&](int shift) {
    for (std::size_t e = 0; e < size; ++e) change[e] = change_of(truth[e], total[e], shift);
  };
  change_by(rate_shift(options_.rate, static_cast<std::int64_t>(above.size() + before.size())));
  for (const std::int32_t expert : above) add(&below_[(first + expert) * size], change);
  for (const std::int32_t expert : before) add(&after_[(first + expert) * size], change);
  if (step_buckets_.empty()) return;
  change_by(rate_shift(options_.token_rate, static_cast<std::int64_t>(step_buckets_.size())));
  for (const std::int32_t bucket : step_buckets_) add(&buckets_[bucket][first], change);
}

}  // namespace tandem
