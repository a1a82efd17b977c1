#include "sampling.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <vector>

#include "cpu_features.hpp"
#include "experts.hpp"

namespace tandem {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLeastNumber = std::numeric_limits<float>::lowest();
// Finite, so that the best score's exponent, 0 times this, is not NaN.
constexpr float kLargestFactor = 1e30f;
// Values are collected when a quarter of them is left, unless there are only this many.
constexpr std::int64_t kFewValues = 1024;

const SamplingKernel& choose_kernel(const std::string& isa) {
  const std::vector<std::string> available = available_isas();
  const std::string name = isa.empty() ? available.front() : isa;
  if (std::find(available.begin(), available.end(), name) == available.end())
    throw std::invalid_argument(name);
#if defined(__x86_64__)
  if (has_avx512(name)) return avx512_sampling();
  if (name == "avx2" || name == "avxvnni") return avx2_sampling();
#endif
  return portable_sampling();
}

std::int64_t whole_blocks(std::int64_t count) {
  return (count + kSamplingBlock - 1) / kSamplingBlock * kSamplingBlock;
}

// Kept between calls, per thread: allocating it would cost more than a pass.
struct Scratch {
  std::vector<float> scores, weights, sums, collected;

  void resize(std::int64_t count) {
    if (static_cast<std::int64_t>(scores.size()) >= count) return;
    for (std::vector<float>* values : {&scores, &weights, &collected})
      values->resize(count + kSamplingBlock);
    sums.resize(count / kSamplingBlock);
  }
};

// Maps floats to integers of the same order, so that the range between two of them can be halved.
std::int32_t key_of(float value) {
  const auto bits = std::bit_cast<std::int32_t>(value);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

float value_at(std::int64_t key) {
  const auto bits = static_cast<std::int32_t>(key);
  return std::bit_cast<float>(bits ^ ((bits >> 31) & 0x7FFFFFFF));
}

// Returns the least value above which there is not enough; it and all greater values stay. Above
// `low` there is enough, above `high` there is not.
template <typename IsEnough>
float least_kept(const SamplingKernel& kernel, const float* values, std::int64_t count, float low,
                 float high, std::vector<float>& collected, const IsEnough& is_enough) {
  Above above_low = kernel.above(values, count, low), above_high{0, 0.0}, beyond{0, 0.0};
  std::int64_t low_key = key_of(low), high_key = key_of(high);
  for (int step = 0; high_key - low_key > 1; ++step) {
    // Halving keys bounds the number of steps, but values are distributed more evenly between two
    // values of similar size. The first step tries only the greatest value, because halving would
    // never separate equal values.
    std::int64_t middle = step == 0 ? high_key - 1 : low_key + (high_key - low_key) / 2;
    if (step % 2 == 0 && step > 0) {
      const float mean = value_at(low_key) / 2 + value_at(high_key) / 2;
      middle = std::clamp<std::int64_t>(key_of(mean), low_key + 1, high_key - 1);
    }
    Above above = kernel.above(values, count, value_at(middle));
    above.count += beyond.count;
    above.sum += beyond.sum;
    (is_enough(above) ? low_key : high_key) = middle;
    (is_enough(above) ? above_low : above_high) = above;
    if (count <= kFewValues || 4 * (above_low.count - above_high.count) > count) continue;
    const std::int64_t number =
        kernel.collect(values, count, value_at(low_key), value_at(high_key), collected.data());
    values = collected.data();
    count = whole_blocks(number);
    std::fill(collected.data() + number, collected.data() + count, -kInfinity);
    beyond = above_high;
  }
  return value_at(high_key);
}

// Copies the scores, with the penalty, to whole blocks.
std::int64_t load_scores(const SamplingRule& rule, const TokenScores& from, float* to) {
  const std::int64_t count = whole_blocks(from.vocabulary);
  load_values(from.logits, from.type, from.vocabulary, to);
  std::fill(to + from.vocabulary, to + count, -kInfinity);
  for (std::int64_t i = 0; i < from.num_seen; ++i) {
    const std::int64_t token = from.seen[i];
    if (token < 0 || token >= from.vocabulary) continue;
    to[token] =
        to[token] < 0 ? to[token] * rule.repetition_penalty : to[token] / rule.repetition_penalty;
  }
  return count;
}

// Returns the token at which the running sum of weights, of those at least `least`, exceeds a share
// of their total. In spite of rounding it always has a weight.
std::int64_t token_at(const float* weights, const float* sums, std::int64_t num_blocks,
                      float least, double uniform) {
  double total = 0;
  for (std::int64_t i = 0; i < num_blocks; ++i) total += sums[i];
  double left = uniform * total;
  std::int64_t block = -1;
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    if (!(sums[i] > 0)) continue;
    block = i;
    if (left < sums[i]) break;
    left -= sums[i];
  }
  std::int64_t token = 0;
  const std::int64_t first = block * kSamplingBlock;
  for (std::int64_t i = first; block >= 0 && i < first + kSamplingBlock; ++i) {
    if (weights[i] < least || !(weights[i] > 0)) continue;
    token = i;
    if (left < weights[i]) break;
    left -= weights[i];
  }
  return token;
}

}  // namespace

TokenSampler::TokenSampler(const std::string& isa) : kernel_(choose_kernel(isa)) {}

std::int64_t TokenSampler::choose(const SamplingRule& rule, const TokenScores& from,
                                  double uniform) const {
  thread_local Scratch scratch;
  scratch.resize(whole_blocks(from.vocabulary));
  float *scores = scratch.scores.data(), *weights = scratch.weights.data();
  const std::int64_t count = load_scores(rule, from, scores), num_blocks = count / kSamplingBlock;
  const float best = kernel_.greatest(scores, count);
  if (rule.temperature == 0 || best == kInfinity || best == -kInfinity)
    return kernel_.find(scores, count, best) % from.vocabulary;  // if all are NaN, the first

  float least_score = kLeastNumber;
  if (rule.top_k > 0 && kernel_.above(scores, count, kLeastNumber).count >= rule.top_k)
    least_score = least_kept(kernel_, scores, count, kLeastNumber, best, scratch.collected,
                             [&](const Above& above) { return above.count >= rule.top_k; });
  kernel_.weigh(scores, count, least_score, best, std::min(1 / rule.temperature, kLargestFactor),
                weights, scratch.sums.data());
  float least = rule.min_p;
  if (rule.top_p < 1) {
    double total = 0;
    for (std::int64_t i = 0; i < num_blocks; ++i) total += scratch.sums[i];
    // Values below the mean of all that may be cut cannot add up to that much.
    const auto low = static_cast<float>((1 - double{rule.top_p}) * total / count / 2);
    least = std::max(least, least_kept(kernel_, weights, count, low, 1.0f, scratch.collected,
                                       [&](const Above& above) {
                                         return above.sum >= double{rule.top_p} * total;
                                       }));
  }
  if (least > 0) kernel_.add_up(weights, count, least, scratch.sums.data());
  return token_at(weights, scratch.sums.data(), num_blocks, least, uniform);
}

}  // namespace tandem
