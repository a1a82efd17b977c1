// The query rows of a tile in the kernels' form, and what each of them sees.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.hpp"

namespace tandem {

inline std::int64_t first_position(const AttentionCall& call, std::int64_t token) {
  const std::int64_t position = call.positions[token];
  const std::int64_t of_chunk = call.chunk > 0 ? position / call.chunk * call.chunk : 0;
  return call.window > 0 ? std::max(of_chunk, position + 1 - call.window) : of_chunk;
}

// How many of a row's first positions a token sees besides its window.
inline std::int64_t always_seen(const AttentionCall& call, std::int64_t token) {
  return call.always_seen ? call.always_seen[call.rows[token]] : 0;
}

inline std::int64_t heads_of(const AttentionCall& call) { return call.num_heads / call.num_kv_heads; }

// Whether a token sees only some of what `selected` refers to: positions or compressed keys.
inline bool sees_some(const AttentionCall& call, std::int64_t token, std::int64_t kv_head = 0) {
  return call.selected && *call.selected_by(token, kv_head) >= 0;
}

inline std::uint8_t* compressed_key(const AttentionCall& call, std::int64_t token, std::int64_t number) {
  const CompressedKeys& compressed = call.compressed;
  return compressed.keys +
         (call.rows[token] * compressed.capacity + number) * call.layout.joint_bytes();
}

inline std::uint8_t* joint_key(const AttentionCall& call, std::int64_t token, std::int64_t position) {
  return call.keys +
         (call.rows[token] * call.capacity() + position % call.capacity()) * call.layout.joint_bytes();
}

// Calls f with the number of each compressed key that a token sees.
template <typename F>
void each_compressed(const AttentionCall& call, std::int64_t token, const F& f) {
  if (call.compressed.ratio == 0) return;
  const std::int64_t seen = call.compressed.num_seen(call.positions[token]);
  if (!sees_some(call, token)) {
    for (std::int64_t number = 0; number < seen; ++number) f(number);
    return;
  }
  const std::int32_t* numbers = call.selected_by(token, 0);
  for (std::int64_t i = 0; i < call.num_selected; ++i)
    if (numbers[i] >= 0 && numbers[i] < seen) f(numbers[i]);
}

// Calls f with each joint key that a token sees, those of its window first.
template <typename F>
void each_joint(const AttentionCall& call, std::int64_t token, const F& f) {
  for (std::int64_t p = first_position(call, token); p <= call.positions[token]; ++p)
    f(joint_key(call, token, p));
  each_compressed(call, token, [&](std::int64_t number) { f(compressed_key(call, token, number)); });
}

// The queries of a tile in the kernels' form: row t * heads + h for token t and head h.
struct TileRows {
  std::vector<float> query, bias_states;
  std::vector<SeenByRow> seen;
  std::vector<const std::uint8_t*> joint;  // joint keys of the tile's only token

  template <typename SelectedOf>
  void fill(const AttentionCall& call, std::int64_t first_token, std::int64_t num_tokens,
            std::int64_t kv_head, const SelectedOf& selected_of) {
    const std::int64_t heads = heads_of(call), width = call.layout.key_width();
    query.resize(num_tokens * heads * width);
    bias_states.resize(num_tokens * heads * call.bias.dim);
    seen.resize(num_tokens * heads);
    joint.clear();
    if (call.is_joint)
      each_joint(call, first_token, [&](const std::uint8_t* key) { joint.push_back(key); });
    const auto num_joint = static_cast<std::int64_t>(joint.size());
    for (std::int64_t t = 0; t < num_tokens; ++t)
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t token = first_token + t, row = t * heads + h;
        const auto load = [&](const TokenView& from, std::int64_t dim, float* to) {
          const std::int64_t at = token * from.token_stride + (kv_head * heads + h) * from.head_stride;
          load_values(value_at(from.data, call.type, at), call.type, dim, to);
        };
        float* to = query.data() + row * width;
        load(call.query, call.layout.key_dim, to);
        std::fill(to + call.layout.key_dim, to + width, 0.0f);
        if (call.bias.dim > 0)
          load(call.bias.states, call.bias.dim, bias_states.data() + row * call.bias.dim);
        seen[row] = {first_position(call, token), call.positions[token] + 1,
                     always_seen(call, token), selected_of(token)};
        if (call.is_joint) seen[row] = {0, num_joint, 0, nullptr};
      }
  }
};

}  // namespace tandem
