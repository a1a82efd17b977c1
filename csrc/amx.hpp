// The tiles of AMX, which the system lends to a process that asks for them. For files that are compiled
// for AVX-512 alone.
//
// Some compilers do not know that loading a tile reads memory: `see_memory` makes them write it before.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tandem {
namespace {

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

inline void see_memory() { __asm__ volatile("" ::: "memory"); }

}  // namespace
}  // namespace tandem
