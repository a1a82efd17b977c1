#include "rowwise.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace tandem {

const RowKernels& row_kernels([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return avx512_rows();
  if (isa == "avx2" || isa == "avxvnni") return avx2_rows();
#endif
  return portable_rows();
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
    const auto better = [&](std::int64_t a, std::int64_t b) {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    };
    std::partial_sort(order.begin(), order.begin() + call.top_k, order.end(), better);
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
