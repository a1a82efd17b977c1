// Attention over a KV cache whose rows have different lengths. A step has few tokens: threads share
// the positions of a row (flash decoding). A prompt has many: threads share tiles of tokens, each
// of which ends at its own position.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kv_layout.hpp"
#include "thread_pool.hpp"

namespace tandem {

// One tensor (heads, dim) per token; strides are in values.
struct TokenView {
  const void* data;
  std::int64_t token_stride, head_stride;
};

// Compressed keys: each stands for `ratio` tokens of a row, is stored alone and is also its value.
// The token that ends a window brings the window's key. A token sees the keys of all windows that
// have ended, besides its own layer's keys.
struct CompressedKeys {
  std::uint8_t* keys;  // (rows, capacity, bytes of a key)
  std::int64_t num_rows, capacity;
  std::int64_t ratio;  // 0: no compressed keys
  TokenView new_key;  // per token; ignored for tokens that end no window

  std::int64_t num_seen(std::int64_t position) const { return (position + 1) / ratio; }
  bool ends_window(std::int64_t position) const { return (position + 1) % ratio == 0; }
};

// A bias on scores by distance: the product of a token's and head's states with the profile of each
// distance 0..extent-1. Larger distances have none.
struct DistanceBias {
  TokenView states;  // (num_heads, dim) per token
  const float* profiles;  // (dim, width()), farthest distance first, kMargin zeros on both sides
  std::int64_t dim, extent;

  static constexpr std::int64_t kMargin = kKvChunk;
  std::int64_t width() const { return extent + 2 * kMargin; }
  // Index of the first profile for positions from `at` on, for a token at `position`.
  std::int64_t first(std::int64_t position, std::int64_t at) const {
    return kMargin + extent - 1 - (position - at);
  }
};

struct AttentionCall {
  KvLayout layout;
  ValueType type;  // of queries, new keys and values, and the output
  std::int64_t num_tokens, num_heads, num_kv_heads;
  std::uint8_t* keys;  // blocks of row r, head h begin at (r * num_kv_heads + h) * capacity_blocks
  std::uint8_t* values;
  std::int64_t capacity_blocks;  // per row and head; whole chunks
  const std::int64_t* rows;  // the cache row of each token
  const std::int64_t* positions;  // per token, in its row; a token sees 0..position
  TokenView query, new_key, new_value;
  float scale;
  float softcap;  // scores become softcap * tanh(score / softcap); 0: no softcap
  std::int64_t window;  // positions that a token sees, itself included; 0: all
  const float* sinks;  // one more score per head that takes part in the softmax, or null
  // The positions that a token sees of those it could see: (num_tokens, selected_heads,
  // num_selected), in any order, padded with -1; or numbers of blocks of `selected_block`
  // positions. A token sees all if its first number is -1; null: all tokens see all. In layers with
  // compressed keys these are numbers of compressed keys, each once.
  const std::int32_t* selected;
  std::int64_t num_selected;
  void* out;  // (num_tokens, num_heads, value_dim)
  std::int64_t num_rows = INT64_MAX;  // rows of the cache
  CompressedKeys compressed{};
  // By row: how many of its first positions tokens see besides their window; null: none.
  const std::int64_t* always_seen = nullptr;
  std::int64_t num_always_seen = 0;  // number of rows
  DistanceBias bias{};  // without dimensions: no bias
  const void* token_sinks = nullptr;  // like `sinks`, but (num_tokens, num_heads), or null
  std::int64_t selected_heads = 1;  // num_kv_heads if each selects for itself
  std::int64_t selected_block = 1;
  std::int64_t chunk = 0;  // a token sees its own chunk of so many positions; 0: all

  const std::int32_t* selected_by(std::int64_t token, std::int64_t kv_head) const {
    const std::int64_t head = selected_heads == 1 ? 0 : kv_head;
    return selected + (token * selected_heads + head) * num_selected;
  }
  // Whether keys are joint keys: one head, each stored alone and also its value. Layers with
  // compressed keys always have them.
  bool is_joint = false;

  std::int64_t capacity() const { return capacity_blocks * kKvBlock; }
  // A row whose tokens see only a window is a ring: position p is stored at p modulo capacity. The
  // caller must not overwrite positions that a token still has to see.
  bool is_ring() const { return window > 0 && !always_seen && window + kKvBlock <= capacity(); }
  std::int64_t key_block_bytes() const {
    return is_joint ? kKvBlock * layout.joint_bytes() : layout.key_block_bytes();
  }
  std::int64_t value_block_bytes() const { return is_joint ? 0 : layout.value_block_bytes(); }
};

// The positions that a query row sees: begin..end-1, and 0..always-1 as far as they come before the
// end. If `selected` is not null, only those of them whose bit is set (word p / 64, bit p % 64).
struct SeenByRow {
  std::int64_t begin, end, always;
  const std::uint64_t* selected;
};

// Queries that share a KV head; row r is (key_width) fp32 values. If `joint` is not null, it points
// to each key, and positions are indices into it. Otherwise keys are in blocks, at the position
// modulo `capacity`.
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

// Running softmax of a tile. By row: greatest score, sum of the weights, and `value_width` weighted
// sums.
struct PartialAttention {
  float* greatest;
  float* sum;
  float* weighted;
};

struct AttentionKernel {
  // Adds positions begin..end-1 of one head, whose blocks are `keys` and `values`, to a tile's
  // partial result.
  void (*attend)(const KvLayout& layout, const std::uint8_t* keys, const std::uint8_t* values,
                 const QueryTile& tile, std::int64_t begin, std::int64_t end,
                 const PartialAttention& partial);
};

const AttentionKernel& portable_attention();
#if defined(__x86_64__)
const AttentionKernel& avx2_attention();
const AttentionKernel& amx_attention();  // AVX-512 with AMX's tiles, for caches that they support
const AttentionKernel& avx512_attention();
#endif

class AttentionEngine {
 public:
  // `isa` names the kernels as in ExpertEngine::isa. AVX-512's may use AMX's tiles.
  AttentionEngine(ThreadPool& pool, const std::string& isa);

  // Writes the tokens' keys and values into the cache. A row's tokens come in the order of their
  // positions, after those that the row holds. Like `run`, throws std::invalid_argument for a token
  // outside the cache.
  void append(const AttentionCall& call);
  // Computes attention. The tokens' own keys and values must have been appended.
  void run(const AttentionCall& call);
  std::mutex& busy() { return pool_.busy(); }

 private:
  // Consecutive tokens of one row with one KV head.
  struct Tile {
    std::int64_t first_token, num_tokens, kv_head;
    std::int64_t begin, end;  // of positions, or of joint keys
    std::int64_t segment;  // number of them
    // One part per segment, to be merged; none: a single task computes the tile.
    std::int64_t first_part, num_parts;

    std::int64_t num_segments() const { return (end - begin + segment - 1) / segment; }
  };
  struct Task {
    std::int64_t tile, first_segment, num_segments;
    std::int64_t part;  // where the first segment's result is stored; -1: the tile's only task
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
  std::vector<std::uint64_t> selected_;  // one bit per position; by token and selecting head
  std::int64_t selected_words_ = 0;  // per token and head
};

}  // namespace tandem
