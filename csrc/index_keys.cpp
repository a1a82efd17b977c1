#include "index_keys.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>

namespace tandem {
namespace {

constexpr std::int64_t kKeysOfTask = 256;

}  // namespace

void IndexEngine::load_queries(const IndexSelection& call, std::int64_t token, float* queries,
                               float* weights) {
  const std::int64_t dim = call.layer->dim, heads = call.num_heads;
  const std::int64_t padded = padded_heads(heads);
  const auto copy = [&](const Operand& x, const Four& at, const Four& sizes, const Four& strides,
                        const Target& to) {
    const std::int64_t first =
        at[1] * x.strides[1] + at[2] * x.strides[2] + at[3] * x.strides[3];
    Operand part = x;
    part.data = static_cast<const std::uint8_t*>(x.data) + first * element_bytes(x.type);
    kernels_.combine({ElementwiseKind::kCopy, sizes, part, {}, {}, {to.type, to.data, strides}});
  };
  const auto to_fp32 = [&](const Operand& x, const Four& at, const Four& sizes, const Four& strides,
                           float* to) {
    copy(x, at, sizes, strides, {ElementType::kFp32, to, {}});
  };
  const std::int64_t slot = call.tokens.slots[token], position = call.tokens.positions[token];
  const std::int64_t ratio = call.layer->ratio;
  if ((position + 1) % ratio == 0)
    copy(call.key, {0, 0, token, 0}, {1, 1, 1, dim}, {0, 0, 0, 1},
         {static_cast<ElementType>(call.layer->type), call.layer->key_at(slot, position / ratio), {}});
  if (call.num_keys(token) <= call.most) return;
  std::fill_n(queries, dim * padded, 0.0f);
  to_fp32(call.query, {0, token, 0, 0}, {1, 1, heads, dim}, {0, 0, 1, padded}, queries);
  for (std::int64_t i = 0; i < dim * padded; ++i) queries[i] *= call.scale;
  std::fill_n(weights, padded, call.weights.data ? 0.0f : 1.0f);
  if (call.weights.data)
    to_fp32(call.weights, {0, 0, token, 0}, {1, 1, 1, heads}, {0, 0, 0, 1}, weights);
}

void IndexEngine::run(const IndexSelection& call) {
  const std::int64_t num_tokens = call.tokens.count, dim = call.layer->dim;
  const std::int64_t padded = padded_heads(call.num_heads);
  queries_.resize(num_tokens * dim * padded);
  weights_.resize(num_tokens * padded);
  begin_.assign(1, 0);
  std::int64_t longest = 0;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const std::int64_t slot = call.tokens.slots[t], at = call.tokens.positions[t];
    if (slot < 0 || slot >= call.layer->num_slots || at < 0 ||
        call.num_keys(t) > call.layer->capacity)
      throw std::invalid_argument("an index key is at position " + std::to_string(at) +
                                  " of slot " + std::to_string(slot) +
                                  ", expected one that the layer has");
    load_queries(call, t, queries_.data() + t * dim * padded, weights_.data() + t * padded);
    const std::int64_t keys = call.num_keys(t), count = keys <= call.most ? 0 : keys;
    begin_.push_back(begin_.back() + count);
    longest = std::max(longest, count);
  }
  scores_.resize(begin_.back());
  const std::int64_t parts = (longest + kKeysOfTask - 1) / kKeysOfTask;
  pool_.run(num_tokens * parts, [&](std::int64_t i) {
    const std::int64_t t = i / parts, first = i % parts * kKeysOfTask;
    const std::int64_t count = std::min(kKeysOfTask, begin_[t + 1] - begin_[t] - first);
    if (count <= 0) return;
    const void* keys = call.layer->key_at(call.tokens.slots[t], first);
    kernels_.score_keys({call.layer->type, keys, count, dim, padded,
                         queries_.data() + t * dim * padded, weights_.data() + t * padded,
                         scores_.data() + begin_[t] + first});
  });
  pool_.run(num_tokens, [&](std::int64_t t) { select(call, t); });
}

void IndexEngine::select(const IndexSelection& call, std::int64_t token) {
  std::int32_t* out = call.out + token * call.most;
  const std::int64_t count = begin_[token + 1] - begin_[token];
  if (count == 0) {
    std::fill_n(out, call.most, -1);
    return;
  }
  float* scores = scores_.data() + begin_[token];
  for (std::int64_t i = 0; i < count; ++i)
    if (std::isnan(scores[i])) scores[i] = INFINITY;
  thread_local std::vector<float> sorted;
  sorted.assign(scores, scores + count);
  std::nth_element(sorted.begin(), sorted.begin() + call.most - 1, sorted.end(), std::greater<>());
  const float least = sorted[call.most - 1];
  std::int64_t missing = call.most;  // of those that are just as good as the last one
  for (std::int64_t i = 0; i < count; ++i) missing -= scores[i] > least;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool is_equal = scores[i] == least && missing > 0;
    missing -= is_equal;
    if (scores[i] > least || is_equal) *out++ = static_cast<std::int32_t>(i);
  }
}

}  // namespace tandem
