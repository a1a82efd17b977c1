// The tiles of AMX, which the system grants to a process on request. Only for files compiled for
// AVX-512.
//
// Some compilers do not know that loading a tile reads memory. `see_memory` forces earlier stores
// to be written.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(TANDEM_EMULATE_TILES)
#include "checks/emulated_tiles.hpp"
#endif

namespace tandem {
namespace {

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

constexpr std::int64_t kTileTokens = 16;  // rows of a tile

inline void see_memory() { __asm__ volatile("" ::: "memory"); }

// Rows of each part, if tokens are in as few parts of at most `most` as possible and all parts have the same
// number of rows: to change it between parts takes a microsecond, as long as a part's products.
constexpr std::int64_t even_rows(std::int64_t num_tokens, std::int64_t most) {
  const std::int64_t parts = (num_tokens + most - 1) / most;
  return (num_tokens + parts - 1) / parts;
}

}  // namespace
}  // namespace tandem
