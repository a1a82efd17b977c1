// AMX's tiles in portable C++, as defined in Intel's manual. amx.hpp includes this instead of the
// instructions if TANDEM_EMULATE_TILES is set, so that the layout of tiles is checked on processors
// without AMX, too.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "../half.hpp"

namespace tandem {
namespace {

class EmulatedTiles {
 public:
  void configure(const void* memory) {
    const auto* bytes = static_cast<const std::uint8_t*>(memory);
    for (int tile = 0; tile < 8; ++tile) {
      std::memcpy(&row_bytes_[tile], bytes + 16 + 2 * tile, 2);
      rows_[tile] = bytes[48 + tile];
      if (row_bytes_[tile] > 64 || rows_[tile] > 16) std::abort();
    }
    std::memset(data_, 0, sizeof data_);
  }

  void release() { std::memset(rows_, 0, sizeof rows_); }
  void zero(int tile) { std::memset(data_[tile], 0, sizeof data_[tile]); }

  void load(int tile, const void* base, std::int64_t stride) {
    zero(tile);
    for (int r = 0; r < rows_of(tile); ++r)
      std::memcpy(data_[tile][r], static_cast<const std::uint8_t*>(base) + r * stride,
                  row_bytes_[tile]);
  }

  void store(int tile, void* base, std::int64_t stride) const {
    for (int r = 0; r < rows_of(tile); ++r)
      std::memcpy(static_cast<std::uint8_t*>(base) + r * stride, data_[tile][r], row_bytes_[tile]);
  }

  // c += signed bytes of a times unsigned bytes of b, four per lane.
  void add_bytes(int c, int a, int b) {
    each_lane(c, a, b, [&](int row, int lane, int steps) {
      std::int32_t sum;
      std::memcpy(&sum, data_[c][row] + 4 * lane, 4);
      for (int k = 0; k < steps; ++k)
        for (int i = 0; i < 4; ++i)
          sum += static_cast<std::int8_t>(data_[a][row][4 * k + i]) * data_[b][k][4 * lane + i];
      std::memcpy(data_[c][row] + 4 * lane, &sum, 4);
    });
  }

  // c += pairs of bf16. Even and odd values are summed separately, and subnormals count as zero.
  void add_bf16(int c, int a, int b) {
    each_lane(c, a, b, [&](int row, int lane, int steps) {
      float sums[2] = {}, sum;
      for (int k = 0; k < steps; ++k)
        for (int i = 0; i < 2; ++i)
          sums[i] = multiply_add(value(data_[a][row] + 4 * k + 2 * i),
                                 value(data_[b][k] + 4 * lane + 2 * i), sums[i]);
      std::memcpy(&sum, data_[c][row] + 4 * lane, 4);
      sum = normal(normal(sum) + normal(sums[0] + sums[1]));
      std::memcpy(data_[c][row] + 4 * lane, &sum, 4);
    });
  }

 private:
  int rows_of(int tile) const {
    if (rows_[tile] == 0) std::abort();  // not configured
    return rows_[tile];
  }

  static float normal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

  // Only what 24 bits hold no nearer than the smallest normal number becomes one: fma alone rounds to fewer.
  static float multiply_add(float a, float b, float sum) {
    constexpr double kRoundsUp = 0x1.ffffffp-127;
    const float result = std::fma(a, b, sum);
    const bool is_below = std::fabs(static_cast<double>(a) * b + sum) < kRoundsUp;
    return is_below ? std::copysign(0.0f, result) : result;
  }

  static float value(const std::uint8_t* at) {
    std::uint16_t bits;
    std::memcpy(&bits, at, 2);
    return normal(bf16_to_float(bits));
  }

  template <typename Add>
  void each_lane(int c, int a, int b, const Add& add) const {
    const int steps = row_bytes_[a] / 4;
    if (rows_of(c) != rows_of(a) || row_bytes_[c] != row_bytes_[b] || steps != rows_of(b))
      std::abort();
    for (int row = 0; row < rows_[c]; ++row)
      for (int lane = 0; lane < row_bytes_[c] / 4; ++lane) add(row, lane, steps);
  }

  std::uint8_t data_[8][16][64] = {};
  std::uint16_t row_bytes_[8] = {};
  std::uint8_t rows_[8] = {};
};

inline EmulatedTiles& emulated_tiles() {
  thread_local EmulatedTiles tiles;
  return tiles;
}

}  // namespace
}  // namespace tandem

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) tandem::emulated_tiles().configure(config)
#define _tile_release() tandem::emulated_tiles().release()
#define _tile_zero(tile) tandem::emulated_tiles().zero(tile)
#define _tile_loadd(tile, base, stride) tandem::emulated_tiles().load(tile, base, stride)
#define _tile_stored(tile, base, stride) tandem::emulated_tiles().store(tile, base, stride)
#define _tile_dpbsud(c, a, b) tandem::emulated_tiles().add_bytes(c, a, b)
#define _tile_dpbf16ps(c, a, b) tandem::emulated_tiles().add_bf16(c, a, b)
