#include "attention_tile.hpp"

#include <algorithm>
#include <cmath>

#include "cpu_features.hpp"

namespace tandem {
namespace {

// Positions of a segment are summed by themselves and then merged in order. Segments are the same
// however the work is distributed, so a token's result does not depend on what else is in the
// batch. A task reads at least one segment: for less, merging costs more than a second thread
// saves.
constexpr std::int64_t kSegment = 512;
// The same for joint keys. All heads share them, so a segment has many query rows and fewer keys
// are enough work.
constexpr std::int64_t kJointSegment = 256;
constexpr std::int64_t kAttentionTasksPerThread = 4;
// Query rows of a prompt's tile. They share each chunk of keys and values while it is in the cache.
constexpr std::int64_t kTileRows = 64;
// If a call appends more keys and values than this, all threads share the work: each is written to
// its own cache lines.
constexpr std::int64_t kManyHeads = 32;
// If a call selects more positions than this, all threads share the marking.
constexpr std::int64_t kManySelected = 1 << 14;
constexpr std::int64_t kMostPositions = std::int64_t{1} << 31;  // positions of a ring

const AttentionKernel& choose_attention([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "amx") return amx_attention();
  if (has_avx512(isa)) return avx512_attention();
  if (has_avx2(isa)) return avx2_attention();
#endif
  return portable_attention();
}

std::int64_t segments(std::int64_t positions) { return (positions + kSegment - 1) / kSegment; }

std::int64_t part_values(const AttentionCall& call, std::int64_t rows) {
  return rows * (2 + call.layout.value_width());
}

PartialAttention partial_at(float* values, std::int64_t rows) {
  return {values, values + rows, values + 2 * rows};
}

void begin_partial(const PartialAttention& partial, std::int64_t rows, std::int64_t width) {
  std::fill_n(partial.greatest, rows, -1e30f);
  std::fill_n(partial.sum, rows, 0.0f);
  std::fill_n(partial.weighted, rows * width, 0.0f);
}

// Offset of a head's blocks in a row of the cache.
std::int64_t head_offset(const AttentionCall& call, std::int64_t row, std::int64_t head,
                         std::int64_t block_bytes) {
  return (row * call.num_kv_heads + head) * call.capacity_blocks * block_bytes;
}

void append_heads(const AttentionCall& call, std::int64_t head, bool is_key) {
  const TokenView& from = is_key ? call.new_key : call.new_value;
  const std::int64_t dim = is_key ? call.layout.key_dim : call.layout.value_dim;
  const std::int64_t block = is_key ? call.key_block_bytes() : call.value_block_bytes();
  thread_local std::vector<float> values;
  values.resize(dim);
  for (std::int64_t t = 0; t < call.num_tokens; ++t) {
    load_values(value_at(from.data, call.type, t * from.token_stride + head * from.head_stride),
                call.type, dim, values.data());
    if (call.is_joint) {
      write_joint(call.layout, joint_key(call, t, call.positions[t]), values.data());
      continue;
    }
    std::uint8_t* to =
        (is_key ? call.keys : call.values) + head_offset(call, call.rows[t], head, block);
    (is_key ? append_key : append_value)(call.layout, to, call.positions[t] % call.capacity(),
                                         values.data());
  }
}

void append_compressed(const AttentionCall& call) {
  const CompressedKeys& compressed = call.compressed;
  thread_local std::vector<float> values;
  values.resize(call.layout.key_dim);
  for (std::int64_t t = 0; t < call.num_tokens; ++t) {
    if (!compressed.ends_window(call.positions[t])) continue;
    load_values(value_at(compressed.new_key.data, call.type, t * compressed.new_key.token_stride),
                call.type, call.layout.key_dim, values.data());
    write_joint(call.layout, compressed_key(call, t, call.positions[t] / compressed.ratio),
                values.data());
  }
}

// Merges the softmax of the positions that follow into a row's.
void merge_row(const PartialAttention& total, const PartialAttention& next, std::int64_t row,
               std::int64_t width) {
  float* weighted = total.weighted + row * width;
  const float* from = next.weighted + row * width;
  const float greatest = std::max(total.greatest[row], next.greatest[row]);
  const float kept = std::exp(total.greatest[row] - greatest);
  const float added = std::exp(next.greatest[row] - greatest);
  total.sum[row] = kept * total.sum[row] + added * next.sum[row];
  for (std::int64_t d = 0; d < width; ++d) weighted[d] = kept * weighted[d] + added * from[d];
  total.greatest[row] = greatest;
}

float sink_of(const AttentionCall& call, std::int64_t token, std::int64_t head) {
  if (!call.token_sinks) return call.sinks[head];
  float sink;
  const std::int64_t at = token * call.num_heads + head;
  load_values(value_at(call.token_sinks, call.type, at), call.type, 1, &sink);
  return sink;
}

// Writes the result of one query row: its weighted sums divided by the sum of weights.
void finish_row(const AttentionCall& call, const PartialAttention& total, std::int64_t row,
                std::int64_t token, std::int64_t head) {
  const std::int64_t width = call.layout.value_width();
  float* weighted = total.weighted + row * width;
  const bool has_sink = call.sinks || call.token_sinks;
  const float sink = has_sink ? sink_of(call, token, head) : -1e30f;
  const float greatest = std::max(total.greatest[row], sink);
  const float weight = std::exp(total.greatest[row] - greatest);
  const float sum = (has_sink ? std::exp(sink - greatest) : 0.0f) + weight * total.sum[row];
  for (std::int64_t d = 0; d < width; ++d) weighted[d] = weight * weighted[d] / sum;
  store_values(weighted, call.layout.value_dim, call.type,
               value_at(call.out, call.type,
                        (token * call.num_heads + head) * call.layout.value_dim));
}

void require_inside(const AttentionCall& call) {
  const std::int64_t capacity = call.is_ring() ? kMostPositions : call.capacity();
  for (std::int64_t t = 0; t < call.num_tokens; ++t) {
    const std::int64_t row = call.rows[t], position = call.positions[t];
    if (row < 0 || row >= call.num_rows || position < 0 || position >= capacity)
      throw std::invalid_argument("a token is at position " + std::to_string(position) +
                                  " of slot " + std::to_string(row) + ", expected position 0 to " +
                                  std::to_string(capacity - 1) + " of slot 0 to " +
                                  std::to_string(call.num_rows - 1));
    if (call.always_seen && row >= call.num_always_seen)
      throw std::invalid_argument("a token is in slot " + std::to_string(row) + ", expected 0 to " +
                                  std::to_string(call.num_always_seen - 1) + ", as in counts");
  }
  const CompressedKeys& compressed = call.compressed;
  if (compressed.ratio == 0) return;
  for (std::int64_t t = 0; t < call.num_tokens; ++t) {
    if (compressed.num_seen(call.positions[t]) > compressed.capacity ||
        call.rows[t] >= compressed.num_rows)
      throw std::invalid_argument("a token at position " + std::to_string(call.positions[t]) +
                                  " sees more than the " + std::to_string(compressed.capacity) +
                                  " compressed keys of a slot");
  }
}

// Sets the bits of a block's positions before `end`; does nothing if there is no such block.
void mark_block(std::uint64_t* words, std::int64_t number, std::int64_t block, std::int64_t end) {
  if (number < 0 || number > end / block) return;
  const std::int64_t last = std::min((number + 1) * block, end);
  for (std::int64_t at = number * block; at < last;) {
    const std::int64_t bit = at % kKvChunk, count = std::min(kKvChunk - bit, last - at);
    words[at / kKvChunk] |= (~std::uint64_t{0} >> (kKvChunk - count)) << bit;
    at += count;
  }
}

// The rows of the tile that this thread works on.
TileRows& queries() {
  thread_local TileRows rows;
  return rows;
}

}  // namespace

AttentionEngine::AttentionEngine(ThreadPool& pool, const std::string& isa)
    : kernel_(choose_attention(isa)), pool_(pool) {}

void AttentionEngine::append(const AttentionCall& call) {
  require_inside(call);
  const std::int64_t tasks = (call.is_joint ? 1 : 2) * call.num_kv_heads;
  if (call.num_tokens * call.num_kv_heads > kManyHeads) {
    pool_.run(tasks, [&](std::int64_t i) { append_heads(call, i / 2, i % 2 == 0); });
  } else {
    for (std::int64_t i = 0; i < tasks; ++i) append_heads(call, i / 2, i % 2 == 0);
  }
  if (call.compressed.ratio > 0) append_compressed(call);
}

// Returns null if the token sees all positions.
std::uint64_t* AttentionEngine::marks_of(const AttentionCall& call, std::int64_t token,
                                         std::int64_t kv_head) {
  if (call.is_joint || !sees_some(call, token, kv_head)) return nullptr;
  const std::int64_t head = call.selected_heads == 1 ? 0 : kv_head;
  return selected_.data() + (token * call.selected_heads + head) * selected_words_;
}

void AttentionEngine::mark_selected(const AttentionCall& call) {
  if (!call.selected || call.is_joint) return;
  std::int64_t last = 0;
  for (std::int64_t t = 0; t < call.num_tokens; ++t) last = std::max(last, call.positions[t] + 1);
  selected_words_ = (last + kKvChunk - 1) / kKvChunk;
  const std::int64_t count = call.num_tokens * call.selected_heads;
  if (static_cast<std::int64_t>(selected_.size()) < count * selected_words_)
    selected_.resize(count * selected_words_);
  const auto mark = [&](std::int64_t i) {
    const std::int64_t token = i / call.selected_heads, head = i % call.selected_heads;
    std::uint64_t* words = marks_of(call, token, head);
    if (!words) return;
    std::fill_n(words, selected_words_, std::uint64_t{0});
    const std::int32_t* numbers = call.selected_by(token, head);
    for (std::int64_t n = 0; n < call.num_selected; ++n)
      mark_block(words, numbers[n], call.selected_block, call.positions[token] + 1);
  };
  if (count * call.num_selected > kManySelected) return pool_.run(count, mark);
  for (std::int64_t i = 0; i < count; ++i) mark(i);
}

void AttentionEngine::plan_tiles(const AttentionCall& call) {
  const std::int64_t most =
      call.is_joint ? 1 : std::max<std::int64_t>(1, kTileRows / heads_of(call));
  tiles_.clear();
  for (std::int64_t head = 0; head < call.num_kv_heads; ++head)
    for (std::int64_t t = 0; t < call.num_tokens;) {
      std::int64_t n = 1;
      while (n < most && t + n < call.num_tokens && call.rows[t + n] == call.rows[t]) ++n;
      if (call.is_joint) {
        std::int64_t num_keys = 0;
        each_joint(call, t, [&](const std::uint8_t*) { ++num_keys; });
        tiles_.push_back({t, n, head, 0, num_keys, kJointSegment, 0, 0});
      } else {
        const std::int64_t first = always_seen(call, t) > 0 ? 0 : first_position(call, t);
        const std::int64_t end = call.positions[t + n - 1] + 1;
        tiles_.push_back({t, n, head, first / kSegment * kSegment, end, kSegment, 0, 0});
      }
      t += n;
    }
}

void AttentionEngine::plan_tasks() {
  std::int64_t positions = 0;
  for (const Tile& tile : tiles_) positions += tile.end - tile.begin;
  const std::int64_t share = std::max<std::int64_t>(
      1, segments(positions / (kAttentionTasksPerThread * pool_.num_threads())));
  tasks_.clear();
  num_parts_ = 0;
  for (std::size_t i = 0; i < tiles_.size(); ++i) {
    Tile& tile = tiles_[i];
    const std::int64_t all = tile.num_segments();
    tile.first_part = num_parts_;
    tile.num_parts = all <= share ? 0 : all;
    num_parts_ += tile.num_parts;
    for (std::int64_t s = 0; s < all; s += share)
      tasks_.push_back({static_cast<std::int64_t>(i), s, std::min(share, all - s),
                        tile.num_parts == 0 ? -1 : tile.first_part + s});
  }
}

PartialAttention AttentionEngine::part(const AttentionCall& call, std::int64_t number) {
  const std::int64_t rows = std::max(kTileRows, heads_of(call));
  return partial_at(parts_.data() + number * part_values(call, rows), rows);
}

void AttentionEngine::run(const AttentionCall& call) {
  if (call.num_tokens == 0) return;
  require_inside(call);
  mark_selected(call);
  plan_tiles(call);
  plan_tasks();
  const std::int64_t heads = heads_of(call);
  const auto needed = num_parts_ * part_values(call, std::max(kTileRows, heads));
  if (static_cast<std::int64_t>(parts_.size()) < needed) parts_.resize(needed);
  pool_.run(static_cast<std::int64_t>(tasks_.size()),
            [&](std::int64_t i) { attend(call, tasks_[i]); });
  // A merge takes a microsecond or two, so waking threads would cost more.
  for (const Tile& tile : tiles_) {
    if (tile.num_parts == 0) continue;
    const PartialAttention total = part(call, tile.first_part);
    for (std::int64_t i = 1; i < tile.num_parts; ++i)
      merge(call, tile, total, part(call, tile.first_part + i));
    finish(call, tile, total);
  }
  pool_.wake();  // threads wake up for the output projection, which comes next
}

void AttentionEngine::attend(const AttentionCall& call, const Task& task) {
  const Tile& tile = tiles_[task.tile];
  const std::int64_t rows = tile.num_tokens * heads_of(call), width = call.layout.value_width();
  queries().fill(call, tile.first_token, tile.num_tokens, tile.kv_head,
                 [&](std::int64_t token) { return marks_of(call, token, tile.kv_head); });
  thread_local std::vector<float> own;  // the tile's total, and the next segment's result
  own.resize(2 * part_values(call, rows));
  const bool is_whole = task.part < 0;
  const PartialAttention total = partial_at(own.data(), rows);
  const PartialAttention next = partial_at(own.data() + part_values(call, rows), rows);
  for (std::int64_t i = 0; i < task.num_segments; ++i) {
    const PartialAttention partial = !is_whole ? part(call, task.part + i) : i == 0 ? total : next;
    begin_partial(partial, rows, width);
    attend_segment(call, tile, task.first_segment + i, partial);
    if (is_whole && i > 0) merge(call, tile, total, next);
  }
  if (is_whole) finish(call, tile, total);
}

// The thread has filled `queries()` for this tile.
void AttentionEngine::attend_segment(const AttentionCall& call, const Tile& tile,
                                     std::int64_t segment, const PartialAttention& partial) {
  const TileRows& rows = queries();
  const QueryTile query{tile.num_tokens * heads_of(call), rows.query.data(), rows.seen.data(),
                        call.capacity(), call.is_joint ? rows.joint.data() : nullptr, call.scale,
                        call.softcap, &call.bias, rows.bias_states.data()};
  const std::int64_t row = call.rows[tile.first_token], at = tile.begin + segment * tile.segment;
  kernel_.attend(call.layout, call.keys + head_offset(call, row, tile.kv_head, call.key_block_bytes()),
                 call.values + head_offset(call, row, tile.kv_head, call.value_block_bytes()), query, at,
                 std::min(at + tile.segment, tile.end), partial);
}

void AttentionEngine::merge(const AttentionCall& call, const Tile& tile,
                            const PartialAttention& total, const PartialAttention& next) {
  for (std::int64_t row = 0; row < tile.num_tokens * heads_of(call); ++row)
    merge_row(total, next, row, call.layout.value_width());
}

void AttentionEngine::finish(const AttentionCall& call, const Tile& tile,
                             const PartialAttention& total) {
  const std::int64_t heads = heads_of(call);
  for (std::int64_t row = 0; row < tile.num_tokens * heads; ++row)
    finish_row(call, total, row, tile.first_token + row / heads,
               tile.kv_head * heads + row % heads);
}

}  // namespace tandem
