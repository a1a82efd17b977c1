// The layout of the keys and values of one KV head: blocks of 16 positions, which vector
// instructions read directly and with which a query is multiplied without rearranging.
//
// A dword holds `pack` contiguous values: one fp32, two bf16 or four int8. In a block of keys,
// dword 16 g + i holds values g * pack and following of position i, so a register holds the same
// values of 16 positions. In a block of values, dword width * g + d holds value d of positions
// g * pack and following, so a register holds 16 values of the same positions. int8 blocks end with
// 16 fp32 scales, one per position; keys are stored + 128. A key or value that is not finite has a
// NaN scale.
//
// Joint keys may be stored alone, one after the other: a key's values are contiguous, followed by
// its scale for int8. Kernels spread a chunk of them into blocks of keys and of values.
#pragma once

#include <cstdint>

#include "values.hpp"

namespace tandem {

// The values are those that tandem.kernels.attention passes.
enum class KvType : int { kFp32 = 0, kBf16 = 1, kInt8 = 2 };

constexpr std::int64_t kKvBlock = 16;  // positions
// Positions per step of attention; capacities are multiples of it.
constexpr std::int64_t kKvChunk = 64;
constexpr int kKeyOffset = 128;  // added to int8 keys

struct KvLayout {
  KvType type;
  std::int64_t key_dim, value_dim;

  constexpr std::int64_t pack() const {
    return type == KvType::kFp32 ? 1 : type == KvType::kBf16 ? 2 : 4;
  }
  // Widths are padded with zeros.
  constexpr std::int64_t key_width() const { return (key_dim + 3) / 4 * 4; }
  constexpr std::int64_t value_width() const { return (value_dim + 15) / 16 * 16; }
  constexpr std::int64_t scale_bytes() const { return type == KvType::kInt8 ? kKvBlock * 4 : 0; }
  constexpr std::int64_t key_bytes() const { return key_width() * kKvBlock * 4 / pack(); }
  constexpr std::int64_t value_bytes() const { return value_width() * kKvBlock * 4 / pack(); }
  constexpr std::int64_t key_block_bytes() const { return key_bytes() + scale_bytes(); }
  constexpr std::int64_t value_block_bytes() const { return value_bytes() + scale_bytes(); }
  // Per joint key.
  constexpr std::int64_t joint_values() const { return value_width() * 4 / pack(); }
  constexpr std::int64_t joint_bytes() const { return joint_values() + scale_bytes() / kKvBlock; }
  bool operator==(const KvLayout&) const = default;
};

// Writes one position's key (or value) of `dim` values into a head's blocks. A block's first
// position clears the block, because positions that are not yet written are read with a weight of
// zero.
void append_key(const KvLayout& layout, std::uint8_t* blocks, std::int64_t position,
                const float* key);
void append_value(const KvLayout& layout, std::uint8_t* blocks, std::int64_t position,
                  const float* value);
void write_joint(const KvLayout& layout, std::uint8_t* to, const float* key);

}  // namespace tandem
