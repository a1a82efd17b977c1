#include "rowwise.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cpu_features.hpp"

namespace tandem {

const RowKernels& row_kernels([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (has_avx512(isa)) return avx512_rows();
  if (has_avx2(isa)) return avx2_rows();
#endif
  return portable_rows();
}

namespace {

// Moves the `count` elements of `order` with the greatest values to the front, best first. If
// values are equal, the lesser number wins.
void put_best_first(const float* values, std::int64_t count, std::vector<std::int64_t>& order) {
  std::partial_sort(order.begin(), order.begin() + count, order.end(),
                    [&](std::int64_t a, std::int64_t b) {
                      return values[a] != values[b] ? values[a] > values[b] : a < b;
                    });
}

// Fills `order` with the experts of the groups that are kept.
void list_candidates(const RankedChoice& call, const float* ranks,
                     std::vector<std::int64_t>& order) {
  thread_local std::vector<float> sums;
  thread_local std::vector<std::int64_t> groups;
  const std::int64_t size = call.num_experts / call.groups;
  sums.assign(call.groups, 0.0f);
  for (std::int64_t g = 0; g < call.groups; ++g) {
    order.resize(size);
    std::iota(order.begin(), order.end(), g * size);
    put_best_first(ranks, call.best_of_group, order);
    for (std::int64_t k = 0; k < call.best_of_group; ++k) sums[g] += ranks[order[k]];
  }
  groups.resize(call.groups);
  std::iota(groups.begin(), groups.end(), 0);
  put_best_first(sums.data(), call.kept_groups, groups);
  order.clear();
  for (std::int64_t g = 0; g < call.kept_groups; ++g)
    for (std::int64_t e = groups[g] * size; e < (groups[g] + 1) * size; ++e) order.push_back(e);
}

}  // namespace

void choose(const RankedChoice& call) {
  thread_local std::vector<std::int64_t> order;
  thread_local std::vector<float> chosen;
  chosen.resize(call.top_k);
  for (std::int64_t t = 0; t < call.num_tokens; ++t) {
    const float* ranks = call.ranks + t * call.num_experts;
    if (call.kept_groups < call.groups) {
      list_candidates(call, ranks, order);
    } else {
      order.resize(call.num_experts);
      std::iota(order.begin(), order.end(), 0);
    }
    put_best_first(ranks, call.top_k, order);
    float* weights = chosen.data();
    float total = 0;
    for (std::int64_t k = 0; k < call.top_k; ++k) {
      call.index[t * call.top_k + k] = order[k];
      load_values(value_at(call.scores, call.score_type, t * call.num_experts + order[k]),
                  call.score_type, 1, weights + k);
      total += weights[k];
    }
    if (call.is_normalised)
      for (std::int64_t k = 0; k < call.top_k; ++k) weights[k] /= total + call.epsilon;
    for (std::int64_t k = 0; k < call.top_k; ++k) weights[k] *= call.scale;
    store_values(weights, call.top_k, call.weight_type,
                 value_at(call.weights, call.weight_type, t * call.top_k));
  }
}

void choose(const Choice& call) {
  thread_local std::vector<float> scores, chosen_weights;
  thread_local std::vector<std::int64_t> order;
  scores.resize(call.num_experts);
  chosen_weights.resize(call.num_experts);
  order.resize(call.num_experts);
  float *logits = scores.data(), *weights = chosen_weights.data();
  for (std::int64_t t = 0; t < call.num_tokens; ++t) {
    load_values(value_at(call.logits, call.type, t * call.num_experts), call.type,
                call.num_experts, logits);
    std::iota(order.begin(), order.end(), 0);
    put_best_first(logits, call.top_k, order);
    const float greatest = logits[order[0]];
    float total = 0, chosen = 0;
    for (std::int64_t e = 0; e < call.num_experts; ++e) total += std::exp(logits[e] - greatest);
    for (std::int64_t k = 0; k < call.top_k; ++k) {
      weights[k] = std::exp(logits[order[k]] - greatest) / total;
      chosen += weights[k];
      call.index[t * call.top_k + k] = order[k];
    }
    if (call.is_normalised)
      for (std::int64_t k = 0; k < call.top_k; ++k) weights[k] /= chosen;
    for (std::int64_t k = 0; k < call.top_k; ++k) weights[k] *= call.scale;
    store_values(weights, call.top_k, call.weight_type,
                 value_at(call.weights, call.weight_type, t * call.top_k));
  }
}

}  // namespace tandem
