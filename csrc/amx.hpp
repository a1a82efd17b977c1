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

}  // namespace
}  // namespace tandem
