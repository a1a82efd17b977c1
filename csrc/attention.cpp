#include "attention.hpp"

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

// Positions that one task reads at least: below it, merging costs more than a second thread saves.
constexpr std::int64_t kLeastSegment = 256;
constexpr std::int64_t kTasksPerThread = 4;

const AttentionKernel& choose(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return avx512_attention();
  if (isa == "avx2" || isa == "avxvnni") return avx2_attention();
#endif
  (void)isa;
  return portable_attention();
}

std::int64_t first_position(const AttentionCall& call, std::int64_t token) {
  const std::int64_t end = call.positions[token] + 1;
  return call.window > 0 ? std::max<std::int64_t>(0, end - call.window) : 0;
}

const void* head_of(const CacheView& cache, ValueType type, std::int64_t row, std::int64_t head) {
  return value_at(static_cast<const void*>(cache.data), type,
                  row * cache.row_stride + head * cache.head_stride);
}

// Copies one head of a token into the cache, converting where the types differ.
void append_head(const AttentionCall& call, const TokenView& from, const CacheView& to,
                 std::int64_t token, std::int64_t head) {
  const void* source =
      value_at(from.data, call.type, token * from.token_stride + head * from.head_stride);
  void* target = value_at(to.data, call.cache_type,
                          call.rows[token] * to.row_stride + head * to.head_stride +
                              call.positions[token] * to.dim);
  if (call.type == call.cache_type) {
    std::memcpy(target, source, to.dim * value_bytes(call.type));
    return;
  }
  thread_local std::vector<float> values;
  values.resize(to.dim);
  load_values(source, call.type, to.dim, values.data());
  store_values(values.data(), to.dim, call.cache_type, target);
}

}  // namespace

AttentionEngine::AttentionEngine(ThreadPool& pool, const std::string& isa)
    : kernel_(choose(isa)), pool_(pool) {}

void AttentionEngine::append(const AttentionCall& call) {
  for (std::int64_t t = 0; t < call.num_tokens; ++t)
    for (std::int64_t h = 0; h < call.num_kv_heads; ++h) {
      append_head(call, call.new_key, call.keys, t, h);
      append_head(call, call.new_value, call.values, t, h);
    }
}

void AttentionEngine::plan_tasks(const AttentionCall& call) {
  std::int64_t positions = 0;
  for (std::int64_t t = 0; t < call.num_tokens; ++t)
    positions += call.positions[t] + 1 - first_position(call, t);
  const std::int64_t wanted = kTasksPerThread * pool_.num_threads();
  const std::int64_t segment =
      std::max(kLeastSegment, positions * call.num_kv_heads / wanted / kAttentionChunk *
                                  kAttentionChunk);
  tasks_.clear();
  first_task_.clear();
  for (std::int64_t t = 0; t < call.num_tokens; ++t)
    for (std::int64_t h = 0; h < call.num_kv_heads; ++h) {
      first_task_.push_back(static_cast<std::int64_t>(tasks_.size()));
      const std::int64_t end = call.positions[t] + 1;
      for (std::int64_t begin = first_position(call, t); begin < end; begin += segment)
        tasks_.push_back({t, h, begin, std::min(begin + segment, end)});
    }
  first_task_.push_back(static_cast<std::int64_t>(tasks_.size()));
}

PartialAttention AttentionEngine::partial(std::int64_t task, std::int64_t heads,
                                          std::int64_t width) {
  float* at = partials_.data() + task * heads * (2 + width);
  return {at, at + heads, at + 2 * heads};
}

void AttentionEngine::run(const AttentionCall& call) {
  if (call.num_tokens == 0) return;
  plan_tasks(call);
  const std::int64_t heads = call.num_heads / call.num_kv_heads;
  const std::int64_t width = attention_padded(call.values.dim);
  const auto needed = tasks_.size() * heads * (2 + width);
  if (partials_.size() < needed) partials_.resize(needed);
  pool_.run(static_cast<std::int64_t>(tasks_.size()), [&](std::int64_t i) { attend(call, i); });
  const std::int64_t merges = call.num_tokens * call.num_kv_heads;
  // A merge takes a microsecond or two: waking threads for a few of them would cost more.
  if (merges <= 64) {
    for (std::int64_t i = 0; i < merges; ++i)
      merge(call, i / call.num_kv_heads, i % call.num_kv_heads);
  } else {
    pool_.run(merges, [&](std::int64_t i) {
      merge(call, i / call.num_kv_heads, i % call.num_kv_heads);
    });
  }
  pool_.wake();  // the output projection comes next
}

void AttentionEngine::attend(const AttentionCall& call, std::int64_t index) {
  const Task& task = tasks_[index];
  const std::int64_t heads = call.num_heads / call.num_kv_heads;
  const std::int64_t key_width = attention_padded(call.keys.dim);
  const std::int64_t value_width = attention_padded(call.values.dim);
  thread_local std::vector<float> scratch;
  const std::int64_t query_values = heads * key_width;
  scratch.resize(std::max<std::size_t>(
      scratch.size(),
      query_values + attention_scratch(call.keys.dim, call.values.dim, heads)));
  float* query = scratch.data();
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t head = task.kv_head * heads + h;
    float* to = query + h * key_width;
    load_values(value_at(call.query.data, call.type,
                         task.token * call.query.token_stride + head * call.query.head_stride),
                call.type, call.keys.dim, to);
    std::fill(to + call.keys.dim, to + key_width, 0.0f);
  }
  const PartialAttention result = partial(index, heads, value_width);
  std::fill(result.greatest, result.greatest + heads, -1e30f);
  std::fill(result.sum, result.sum + heads, 0.0f);
  std::fill(result.weighted, result.weighted + heads * value_width, 0.0f);
  const std::int64_t row = call.rows[task.token];
  kernel_.attend(head_of(call.keys, call.cache_type, row, task.kv_head), call.keys.dim,
                 head_of(call.values, call.cache_type, row, task.kv_head), call.values.dim,
                 call.cache_type, task.begin, task.end, query, heads, call.scale, call.softcap, result,
                 query + query_values);
}

void AttentionEngine::merge(const AttentionCall& call, std::int64_t token, std::int64_t kv_head) {
  const std::int64_t heads = call.num_heads / call.num_kv_heads;
  const std::int64_t width = attention_padded(call.values.dim);
  const std::int64_t group = token * call.num_kv_heads + kv_head;
  const std::int64_t first = first_task_[group], last = first_task_[group + 1];
  thread_local std::vector<float> total;
  total.resize(width);
  for (std::int64_t h = 0; h < heads; ++h) {
    const std::int64_t head = kv_head * heads + h;
    float greatest = call.sinks ? call.sinks[head] : -1e30f;
    for (std::int64_t i = first; i < last; ++i)
      greatest = std::max(greatest, partial(i, heads, width).greatest[h]);
    float sum = call.sinks ? std::exp(call.sinks[head] - greatest) : 0.0f;
    std::fill(total.begin(), total.end(), 0.0f);
    for (std::int64_t i = first; i < last; ++i) {
      const PartialAttention part = partial(i, heads, width);
      const float weight = std::exp(part.greatest[h] - greatest);
      sum += weight * part.sum[h];
      for (std::int64_t d = 0; d < width; ++d) total[d] += weight * part.weighted[h * width + d];
    }
    for (std::int64_t d = 0; d < width; ++d) total[d] /= sum;
    store_values(total.data(), call.values.dim, call.type,
                 value_at(call.out, call.type,
                          (token * call.num_heads + head) * call.values.dim));
  }
}

}  // namespace tandem
