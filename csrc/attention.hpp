// Attention of few queries over a KV cache whose rows have lengths of their own (flash decoding).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "thread_pool.hpp"
#include "values.hpp"

namespace tandem {

// Keys or values of one layer: row r, head h, position p begin at
// r * row_stride + h * head_stride + p * dim values after `data`.
struct CacheView {
  void* data;
  std::int64_t row_stride, head_stride;
  std::int64_t dim;
};

// One token's tensor (heads, dim), tokens `token_stride` values apart, heads `head_stride`.
struct TokenView {
  const void* data;
  std::int64_t token_stride, head_stride;
};

struct AttentionCall {
  ValueType cache_type;  // of keys and values
  ValueType type;        // of queries, new keys and values, and the output
  std::int64_t num_tokens, num_heads, num_kv_heads;
  CacheView keys, values;
  const std::int64_t* rows;       // the cache row of each token
  const std::int64_t* positions;  // of each token in its row; it sees 0..position
  TokenView query, new_key, new_value;
  float scale;
  float softcap;         // scores become softcap * tanh(score / softcap); 0: they do not
  std::int64_t window;   // positions that a token sees, itself included; 0: all
  const float* sinks;    // one more score per head that takes its share of the softmax, or null
  void* out;             // (num_tokens, num_heads, values.dim)
};

// Running softmax of the query heads that share one KV head: greatest score, sum of the weights,
// and `values.dim` weighted sums (padded to whole registers), per query head.
struct PartialAttention {
  float* greatest;
  float* sum;
  float* weighted;  // (heads, padded dim)
};

struct AttentionKernel {
  // Adds positions begin..end-1 of one KV head to a partial result. `query` is fp32 as
  // (heads, padded key dim), where padded is a multiple of kAttentionPadding; `scratch` has
  // attention_scratch() values.
  void (*attend)(const void* keys, std::int64_t key_dim, const void* values,
                 std::int64_t value_dim, ValueType type, std::int64_t begin, std::int64_t end,
                 const float* query, std::int64_t heads, float scale, float softcap,
                 PartialAttention partial, float* scratch);
};

constexpr std::int64_t kAttentionPadding = 16;
constexpr std::int64_t kAttentionChunk = 32;  // positions that are unpacked together

constexpr std::int64_t attention_padded(std::int64_t dim) {
  return (dim + kAttentionPadding - 1) / kAttentionPadding * kAttentionPadding;
}
constexpr std::int64_t attention_scratch(std::int64_t key_dim, std::int64_t value_dim,
                                         std::int64_t heads) {
  return kAttentionChunk * (attention_padded(key_dim) + attention_padded(value_dim) + heads + 3);
}

const AttentionKernel& portable_attention();
#if defined(__x86_64__)
const AttentionKernel& avx2_attention();
const AttentionKernel& avx512_attention();
#endif

class AttentionEngine {
 public:
  // `isa` names the kernels as ExpertEngine::isa does.
  AttentionEngine(ThreadPool& pool, const std::string& isa);

  // Writes the tokens' keys and values into the cache.
  void append(const AttentionCall& call);
  // Attends; the tokens' own keys and values have been appended.
  void run(const AttentionCall& call);

 private:
  struct Task {
    std::int64_t token, kv_head, begin, end;
  };

  void plan_tasks(const AttentionCall& call);
  PartialAttention partial(std::int64_t task, std::int64_t heads, std::int64_t width);
  void attend(const AttentionCall& call, std::int64_t task);
  void merge(const AttentionCall& call, std::int64_t token, std::int64_t kv_head);

  const AttentionKernel& kernel_;
  ThreadPool& pool_;
  std::vector<Task> tasks_;
  std::vector<std::int64_t> first_task_;  // of each (token, KV head), and the end
  std::vector<float> partials_;
};

}  // namespace tandem
