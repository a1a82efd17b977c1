// Attention over a KV cache whose rows have lengths of their own: of a step's few tokens (flash
// decoding: a row's positions are shared out among the threads) and of a prompt's many (tiles of
// tokens, each up to its own position).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kv_layout.hpp"
#include "thread_pool.hpp"

namespace tandem {

// One token's tensor (heads, dim), tokens `token_stride` values apart, heads `head_stride`.
struct TokenView {
  const void* data;
  std::int64_t token_stride, head_stride;
};

// Keys that stand for `ratio` tokens of a row each, beside the tokens' own; each is its value, too, and lies
// alone. The token that ends such a window brings its key; a token sees the keys of all windows that have
// ended.
struct CompressedKeys {
  std::uint8_t* keys;  // (rows, capacity, bytes of a key)
  std::int64_t num_rows, capacity;
  std::int64_t ratio;  // 0: there are none
  TokenView new_key;   // of each token; those that end no window bring none

  std::int64_t num_seen(std::int64_t position) const { return (position + 1) / ratio; }
  bool ends_window(std::int64_t position) const { return (position + 1) % ratio == 0; }
};

// What is added to scores by distance: a token and head have the product of their states with a profile
// of each distance 0..extent-1, and nothing beyond.
struct DistanceBias {
  TokenView states;       // of each token, (num_heads, dim)
  const float* profiles;  // (dim, width()), the farthest distance first, with kMargin zeros on both sides
  std::int64_t dim, extent;

  static constexpr std::int64_t kMargin = kKvChunk;
  std::int64_t width() const { return extent + 2 * kMargin; }
  // Where the profiles begin for the positions from `at` on, as the token at `position` sees them.
  std::int64_t first(std::int64_t position, std::int64_t at) const {
    return kMargin + extent - 1 - (position - at);
  }
};

struct AttentionCall {
  KvLayout layout;
  ValueType type;  // of queries, new keys and values, and the output
  std::int64_t num_tokens, num_heads, num_kv_heads;
  std::uint8_t* keys;    // blocks of row r, head h from ((r * num_kv_heads) + h) * capacity_blocks on
  std::uint8_t* values;
  std::int64_t capacity_blocks;   // of a row and head; whole chunks
  const std::int64_t* rows;       // the cache row of each token
  const std::int64_t* positions;  // of each token in its row; it sees 0..position
  TokenView query, new_key, new_value;
  float scale;
  float softcap;         // scores become softcap * tanh(score / softcap); 0: they do not
  std::int64_t window;   // positions that a token sees, itself included; 0: all
  const float* sinks;    // one more score per head that takes its share of the softmax, or null
  // Positions that a token sees, of those it could see: (num_tokens, selected_heads, num_selected), in any
  // order, with -1 where there are fewer; as numbers of blocks of so many positions. Where the first one is
  // -1 it sees all; so do all tokens if it is null. Where there are compressed keys, of these, each once.
  const std::int32_t* selected;
  std::int64_t num_selected;
  void* out;             // (num_tokens, num_heads, value_dim)
  std::int64_t num_rows = INT64_MAX;  // of the cache
  CompressedKeys compressed{};
  // How many of a row's first positions its tokens see besides those of the window, by row; null: none.
  const std::int64_t* always_seen = nullptr;
  std::int64_t num_always_seen = 0;  // rows
  DistanceBias bias{};               // of no dimensions: there is none
  const void* token_sinks = nullptr;  // as `sinks`, but (num_tokens, num_heads), or null
  std::int64_t selected_heads = 1;    // num_kv_heads where each has a selection of its own
  std::int64_t selected_block = 1;
  std::int64_t chunk = 0;  // a token sees its own chunk of so many positions; 0: all

  const std::int32_t* selected_by(std::int64_t token, std::int64_t kv_head) const {
    const std::int64_t head = selected_heads == 1 ? 0 : kv_head;
    return selected + (token * selected_heads + head) * num_selected;
  }
  // Whether keys are their values, too: of one head, each alone. There are compressed keys only then.
  bool is_joint = false;

  std::int64_t capacity() const { return capacity_blocks * kKvBlock; }
  // A row whose tokens see a window alone is a ring: a position lies at its remainder by the capacity.
  // The caller leaves what a token sees where it is until it has attended.
  bool is_ring() const { return window > 0 && !always_seen && window + kKvBlock <= capacity(); }
  std::int64_t key_block_bytes() const {
    return is_joint ? kKvBlock * layout.joint_bytes() : layout.key_block_bytes();
  }
  std::int64_t value_block_bytes() const { return is_joint ? 0 : layout.value_block_bytes(); }
};

// What a query row sees: positions begin..end-1, and 0..always-1 as far as they are before the end; of
// those the ones whose bit is set in `selected` (word p / 64, bit p % 64), unless it is null.
struct SeenByRow {
  std::int64_t begin, end, always;
  const std::uint64_t* selected;
};

// Queries that share a KV head: row r is (key_width) fp32 values. Keys lie where `joint` says, alone, and
// positions are places in that list, unless it is null: then in blocks, a position at its remainder by
// `capacity`.
struct QueryTile {
  std::int64_t num_rows;
  const float* query;
  const SeenByRow* seen;
  std::int64_t capacity;
  const std::uint8_t* const* joint;
  float scale, softcap;
  const DistanceBias* bias;
  const float* bias_states;  // (num_rows, dim)
};

// Running softmax of a tile: greatest score, sum of the weights, and `value_width` weighted sums, by
// row.
struct PartialAttention {
  float* greatest;
  float* sum;
  float* weighted;
};

struct AttentionKernel {
  // Adds positions begin..end-1 of one head to a tile's partial result; `keys` and `values` are its blocks.
  void (*attend)(const KvLayout& layout, const std::uint8_t* keys, const std::uint8_t* values,
                 const QueryTile& tile, std::int64_t begin, std::int64_t end,
                 const PartialAttention& partial);
};

const AttentionKernel& portable_attention();
#if defined(__x86_64__)
const AttentionKernel& avx2_attention();
const AttentionKernel& amx_attention();  // AVX-512's, on tiles where they take a cache
const AttentionKernel& avx512_attention();
#endif

class AttentionEngine {
 public:
  // `isa` names the kernels as ExpertEngine::isa does; AVX-512's may use the tiles of AMX.
  AttentionEngine(ThreadPool& pool, const std::string& isa);

  // Both throw std::invalid_argument for a token outside the cache.
  // Writes the tokens' keys and values into the cache. A row's tokens come in the order of their
  // positions, which follow what the row holds.
  void append(const AttentionCall& call);
  // Attends; the tokens' own keys and values have been appended.
  void run(const AttentionCall& call);
  std::mutex& busy() { return pool_.busy(); }

 private:
  // Tokens of one row, next to each other in the call, with one KV head.
  struct Tile {
    std::int64_t first_token, num_tokens, kv_head;
    std::int64_t begin, end;             // of positions, or of keys that lie alone
    std::int64_t segment;                // so many of them
    std::int64_t first_part, num_parts;  // one a segment, to be merged; none: one task does it all

    std::int64_t num_segments() const { return (end - begin + segment - 1) / segment; }
  };
  struct Task {
    std::int64_t tile, first_segment, num_segments;
    std::int64_t part;  // where its first segment's result is kept; -1: it is the tile's only task
  };

  void mark_selected(const AttentionCall& call);
  std::uint64_t* marks_of(const AttentionCall& call, std::int64_t token, std::int64_t kv_head);
  void plan_tiles(const AttentionCall& call);
  void plan_tasks();
  void attend(const AttentionCall& call, const Task& task);
  void attend_segment(const AttentionCall& call, const Tile& tile, std::int64_t segment,
                      const PartialAttention& partial);
  PartialAttention part(const AttentionCall& call, std::int64_t number);
  static void merge(const AttentionCall& call, const Tile& tile, const PartialAttention& total,
                    const PartialAttention& next);
  static void finish(const AttentionCall& call, const Tile& tile, const PartialAttention& total);

  const AttentionKernel& kernel_;
  ThreadPool& pool_;
  std::vector<Tile> tiles_;
  std::vector<Task> tasks_;
  std::vector<float> parts_;
  std::int64_t num_parts_ = 0;
  std::vector<std::uint64_t> selected_;  // a bit per position, by token and selecting head
  std::int64_t selected_words_ = 0;      // of one of them
};

}  // namespace tandem
