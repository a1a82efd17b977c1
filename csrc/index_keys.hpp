// An indexer's selection in a decode step: the positions of a slot whose keys score best.
#pragma once

#include <cstdint>
#include <vector>

#include "recurrent.hpp"
#include "tensor_ops.hpp"
#include "thread_pool.hpp"

namespace tandem {

// The index keys of a layer by slot: (slots, capacity, dim). Their address changes when they grow.
struct IndexLayer {
  ValueType type;
  void* keys;
  std::int64_t capacity, dim;
  std::int64_t num_slots = INT64_MAX;
  std::int64_t ratio = 1;  // tokens per key; the last of them brings it

  void* key_at(std::int64_t slot, std::int64_t number) const {
    return value_at(keys, type, (slot * capacity + number) * dim);
  }
};

// Stores each token's key, then selects the `most` keys with the greatest scores:
//   the sum over heads of weight * relu(scale * query . key)
// If scores are equal, the first wins; NaN counts as the greatest. A token with at most that many
// keys sees all, which -1 marks.
//
// With a `block`, each head selects for itself: blocks of this many keys, each by the best
// scale * query . key in it. The token's own block and those before it, `num_local` in total, are
// always selected.
struct IndexSelection {
  const IndexLayer* layer;
  StateTokens tokens;  // one token per slot
  std::int64_t num_heads, most;
  float scale;
  Operand key;  // (tokens, dim), with strides in the last two
  Operand query;  // (tokens, heads, dim), with strides in the last three
  Operand weights;  // (tokens, heads), with strides in the last two; without data: 1
  std::int32_t* out;  // (tokens, most); with a block (tokens, heads, most)
  std::int64_t block = 0, num_local = 0;

  // The keys of a token's slot, including its own.
  std::int64_t num_keys(std::int64_t token) const {
    return (tokens.positions[token] + 1) / layer->ratio;
  }
  // The number of keys, or of blocks of them, to select from.
  std::int64_t num_choices(std::int64_t token) const {
    return block > 0 ? (num_keys(token) + block - 1) / block : num_keys(token);
  }
  // Selections per token, which are contiguous.
  std::int64_t num_selections() const { return block > 0 ? num_heads : 1; }
};

// Uses a pool that must outlive it and be idle.
class IndexEngine {
 public:
  IndexEngine(ThreadPool& pool, const TensorKernels& kernels) : pool_(pool), kernels_(kernels) {}

  // Throws std::invalid_argument for a token outside the layer's keys.
  void run(const IndexSelection& call);

 private:
  void load_queries(const IndexSelection& call, std::int64_t token, float* queries, float* weights);
  void score(const IndexSelection& call, std::int64_t token, std::int64_t first,
             std::int64_t count);
  void select_blocks(const IndexSelection& call, std::int64_t token);

  ThreadPool& pool_;
  const TensorKernels& kernels_;
  std::vector<float> queries_, weights_, scores_;
  std::vector<std::int64_t> begin_;  // where each token's scores begin
};

}  // namespace tandem
