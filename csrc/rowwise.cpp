#include "rowwise.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace tandem {
namespace {

// What a value becomes when it is kept in a tensor of this type.
inline float rounded(float value, ValueType type) {
  return type == ValueType::kBf16 ? bf16_to_float(float_to_bf16(value)) : value;
}

struct Scratch {
  std::vector<float> row, other, weight;
};

Scratch& scratch_of(std::int64_t cols) {
  thread_local Scratch scratch;
  for (std::vector<float>* values : {&scratch.row, &scratch.other, &scratch.weight})
    if (static_cast<std::int64_t>(values->size()) < cols) values->resize(cols);
  return scratch;
}

float mean_square(const float* row, std::int64_t cols) {
  constexpr std::int64_t kLanes = 16;  // independent sums, which the compiler keeps in registers
  float sums[kLanes] = {};
  const std::int64_t whole = cols / kLanes * kLanes;
  for (std::int64_t k = 0; k < whole; k += kLanes)
    for (std::int64_t i = 0; i < kLanes; ++i) sums[i] += row[k + i] * row[k + i];
  for (std::int64_t k = whole; k < cols; ++k) sums[0] += row[k] * row[k];
  float total = 0;
  for (const float sum : sums) total += sum;
  return total / static_cast<float>(cols);
}

}  // namespace

void rms_norm(const RmsNorm& call) {
  Scratch& scratch = scratch_of(call.cols);
  float* row = scratch.row.data();
  for (std::int64_t r = 0; r < call.num_rows; ++r) {
    load_values(value_at(call.input, call.type, r * call.input_stride), call.type, call.cols, row);
    const float scale = 1.0f / std::sqrt(mean_square(row, call.cols) + call.eps);
    for (std::int64_t k = 0; k < call.cols; ++k) row[k] *= scale;
    if (call.rounds_first && call.type == ValueType::kBf16)
      for (std::int64_t k = 0; k < call.cols; ++k) row[k] = rounded(row[k], call.type);
    if (call.weight)
      for (std::int64_t k = 0; k < call.cols; ++k) row[k] *= call.weight[k];
    store_values(row, call.cols, call.type, value_at(call.out, call.type, r * call.cols));
  }
}

void rotate(const Rotary& call) {
  Scratch& scratch = scratch_of(call.dim);
  float *x = scratch.row.data(), *cos = scratch.other.data(), *sin = scratch.weight.data();
  const std::int64_t half = call.rotated / 2;
  for (std::int64_t t = 0; t < call.num_tokens; ++t) {
    load_values(value_at(call.cos, call.type, t * call.rotated), call.type, call.rotated, cos);
    load_values(value_at(call.sin, call.type, t * call.rotated), call.type, call.rotated, sin);
    for (std::int64_t h = 0; h < call.num_heads; ++h) {
      load_values(value_at(call.input, call.type, t * call.token_stride + h * call.head_stride),
                  call.type, call.dim, x);
      for (std::int64_t d = 0; d < half; ++d) {
        const float first = x[d], second = x[d + half];
        x[d] = rounded(first * cos[d], call.type) + rounded(-second * sin[d], call.type);
        x[d + half] = rounded(second * cos[d + half], call.type) +
                      rounded(first * sin[d + half], call.type);
      }
      store_values(x, call.dim, call.type,
                   value_at(call.out, call.type, (t * call.num_heads + h) * call.dim));
    }
  }
}

void combine(const Elementwise& call) {
  constexpr std::int64_t kPart = 1024;  // stays in the first-level cache
  float a[kPart], b[kPart];
  for (std::int64_t first = 0; first < call.count; first += kPart) {
    const std::int64_t count = std::min(kPart, call.count - first);
    load_values(value_at(call.a, call.type, first), call.type, count, a);
    if (call.kind == ElementwiseKind::kSilu) {
      for (std::int64_t i = 0; i < count; ++i) a[i] /= 1.0f + std::exp(-a[i]);
    } else {
      load_values(value_at(call.b, call.type, first), call.type, count, b);
      if (call.kind == ElementwiseKind::kAdd)
        for (std::int64_t i = 0; i < count; ++i) a[i] += b[i];
      else
        for (std::int64_t i = 0; i < count; ++i) a[i] *= b[i];
    }
    store_values(a, count, call.type, value_at(call.out, call.type, first));
  }
}

void choose(const Choice& call) {
  Scratch& scratch = scratch_of(call.num_experts);
  float *logits = scratch.row.data(), *weights = scratch.other.data();
  thread_local std::vector<std::int64_t> order;
  order.resize(call.num_experts);
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
    store_values(weights, call.top_k, call.weight_type,
                 value_at(call.weights, call.weight_type, t * call.top_k));
  }
}

}  // namespace tandem
