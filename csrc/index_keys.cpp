#include "index_keys.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>

namespace tandem {
namespace {

constexpr std::int64_t kKeysOfTask = 256;

// Writes the indices of the `most` greatest scores; `count` must be larger.
void select_greatest(float* scores, std::int64_t count, std::int64_t most, std::int32_t* out) {
  for (std::int64_t i = 0; i < count; ++i)
    if (std::isnan(scores[i])) scores[i] = INFINITY;
  thread_local std::vector<float> sorted;
  sorted.assign(scores, scores + count);
  std::nth_element(sorted.begin(), sorted.begin() + most - 1, sorted.end(), std::greater<>());
  const float least = sorted[most - 1];
  std::int64_t missing = most;  // how many of those equal to the last one are needed
  for (std::int64_t i = 0; i < count; ++i) missing -= scores[i] > least;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool is_equal = scores[i] == least && missing > 0;
    missing -= is_equal;
    if (scores[i] > least || is_equal) *out++ = static_cast<std::int32_t>(i);
  }
}

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
  if (call.num_choices(token) <= call.most) return;
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
                                  ", expected a slot and a position of the layer");
    load_queries(call, t, queries_.data() + t * dim * padded, weights_.data() + t * padded);
    const std::int64_t choices = call.num_choices(t), count = choices <= call.most ? 0 : choices;
    begin_.push_back(begin_.back() + count * (call.block > 0 ? padded : 1));
    longest = std::max(longest, count);
  }
  scores_.resize(begin_.back());
  const std::int64_t each = call.block > 0 ? (kKeysOfTask + call.block - 1) / call.block : kKeysOfTask;
  const std::int64_t parts = (longest + each - 1) / each;
  pool_.run(num_tokens * parts, [&](std::int64_t i) {
    const std::int64_t t = i / parts, first = i % parts * each;
    const std::int64_t choices = begin_[t] == begin_[t + 1] ? 0 : call.num_choices(t);
    if (const std::int64_t count = std::min(each, choices - first); count > 0) score(call, t, first, count);
  });
  pool_.run(num_tokens, [&](std::int64_t t) {
    const std::int64_t selections = call.num_selections();
    std::int32_t* out = call.out + t * selections * call.most;
    if (begin_[t] == begin_[t + 1]) std::fill_n(out, selections * call.most, -1);
    else if (call.block > 0) select_blocks(call, t);
    else select_greatest(scores_.data() + begin_[t], call.num_keys(t), call.most, out);
  });
}

// Scores some keys or blocks of a token's slot.
void IndexEngine::score(const IndexSelection& call, std::int64_t token, std::int64_t first,
                        std::int64_t count) {
  const std::int64_t dim = call.layer->dim, padded = padded_heads(call.num_heads);
  const std::int64_t slot = call.tokens.slots[token];
  const float* queries = queries_.data() + token * dim * padded;
  const float* weights = weights_.data() + token * padded;
  float* scores = scores_.data() + begin_[token];
  if (call.block == 0) {
    const void* keys = call.layer->key_at(slot, first);
    return kernels_.score_keys({call.layer->type, keys, count, dim, padded, queries, weights, scores + first});
  }
  for (std::int64_t b = first; b < first + count; ++b) {
    const std::int64_t some = std::min(call.block, call.num_keys(token) - b * call.block);
    const void* keys = call.layer->key_at(slot, b * call.block);
    kernels_.best_keys({call.layer->type, keys, some, dim, padded, queries, weights, scores + b * padded});
  }
}

void IndexEngine::select_blocks(const IndexSelection& call, std::int64_t token) {
  const std::int64_t count = call.num_choices(token), padded = padded_heads(call.num_heads);
  const float* scores = scores_.data() + begin_[token];
  thread_local std::vector<float> own;
  own.resize(count);
  for (std::int64_t head = 0; head < call.num_heads; ++head) {
    for (std::int64_t b = 0; b < count; ++b)
      own[b] = b < count - call.num_local ? scores[b * padded + head] : INFINITY;
    select_greatest(own.data(), count, call.most,
                    call.out + (token * call.num_heads + head) * call.most);
  }
}

}  // namespace tandem
