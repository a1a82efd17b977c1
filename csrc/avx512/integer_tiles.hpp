// Integer products on AMX's tiles: one instruction multiplies 16 tokens by 64 columns of a block's
// 16 rows. A panel's registers already have a tile's layout. Results have the same bits as those of
// tiles.hpp: sums of integers are exact, and scales are multiplied and added in the same order.
#pragma once

#include "../amx.hpp"
#include "tiles.hpp"

namespace tandem {
namespace {

constexpr int kTileBlocks = 4;
// Fewer tokens, or scales for fewer columns, take as long as in registers: scaling and adding a
// tile's sums takes three times as long as computing them.
constexpr std::int64_t kFewestOnTiles = 17, kColumnsOnTiles = 128;

// Instructions take tile numbers as literals: 0 and 1 are activations, 2 and 3 codes, 4 and 5 the
// sums of two groups in turn.
#define TANDEM_MULTIPLY_TILES(sum, activations, stride, codes, out)  \
  do {                                                               \
    _tile_zero(sum);                                                 \
    _tile_loadd(0, (activations), (stride));                         \
    _tile_loadd(2, (codes), 64);                                     \
    _tile_dpbsud(sum, 0, 2);                                         \
    if constexpr (kCount > 1) {                                      \
      _tile_loadd(1, (activations) + 64, (stride));                  \
      _tile_loadd(3, (codes) + 1024, 64);                            \
      _tile_dpbsud(sum, 1, 3);                                       \
    }                                                                \
    _tile_stored(sum, (out), 64);                                    \
  } while (false)

// The sums of one group for up to 16 tokens and a block's rows.
template <int Group>
class IntegerTiles {
 public:
  IntegerTiles() = default;
  ~IntegerTiles() { _tile_release(); }
  IntegerTiles(const IntegerTiles&) = delete;
  IntegerTiles& operator=(const IntegerTiles&) = delete;

  void use_tokens(std::int64_t tokens) {
    if (tokens == tokens_) return;
    tokens_ = tokens;
    constexpr int kColumns = Group / kCount;
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      const bool has_codes = tile == 2 || tile == 3;
      config.row_bytes[tile] = tile < 2 ? kColumns : 64;
      config.rows[tile] = static_cast<std::uint8_t>(has_codes ? kColumns / 4 : tokens);
    }
    see_memory();
    _tile_loadconfig(&config);
  }

  template <int Turn>
  TANDEM_INLINE void multiply(const std::int8_t* activations, std::int64_t stride,
                              const std::uint8_t* codes, std::int32_t* sums) {
    if constexpr (Turn == 0)
      TANDEM_MULTIPLY_TILES(4, activations, stride, codes, sums);
    else
      TANDEM_MULTIPLY_TILES(5, activations, stride, codes, sums);
  }

 private:
  static constexpr int kCount = Group > 64 ? 2 : 1;  // tiles per group

  std::int64_t tokens_ = 0;
};

#undef TANDEM_MULTIPLY_TILES

// Activations of up to 16 tokens in a panel's columns; a group's columns of one token are
// contiguous.
template <Format F, int Group>
class TokensOfTile {
 public:
  static constexpr std::int64_t kMostGroups = kPanelColumns<F> / Group;

  TokensOfTile(const Activations& x, Columns columns, std::int64_t token, std::int64_t count)
      : q_(x.quantized + token * x.stride + columns.begin), stride_(x.stride) {
    const std::int64_t first = token * x.group_stride + columns.begin / Group;
    const __m512i at = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
                                                            13, 14, 15),
                                          _mm512_set1_epi32(static_cast<int>(x.group_stride)));
    const auto mask = static_cast<__mmask16>((1u << count) - 1);
    const __m512i zero = _mm512_setzero_si512();
    for (std::int64_t g = 0; g < columns.count() / Group; ++g) {
      const auto of_tokens = [&](const void* values) {
        return _mm512_mask_i32gather_epi32(zero, mask, at, values, 4);
      };
      _mm512_store_si512(sums_[g], of_tokens(x.sums + first + g));
      _mm512_store_si512(scales_[g], of_tokens(x.scales + first + g));
    }
  }

  const std::int8_t* group(std::int64_t g) const { return q_ + g * Group; }
  std::int64_t stride() const { return stride_; }

  // Adds a group's sums after scaling.
  TANDEM_INLINE void add(const Panel& panel, std::int64_t g, int block, const std::int32_t* sums,
                         __m512 (&totals)[kTileTokens]) const {
    const SumScale<F> w_scale(_mm512_load_ps(panel.scales(g, block)));
    [[maybe_unused]] const __m512 minima =
        kHasMinima<F> ? _mm512_load_ps(panel.minima(g, block)) : _mm512_setzero_ps();
    each<kTileTokens>([&](auto t) TANDEM_INLINED {
      const __m512i start = _mm512_set1_epi32(kHasMinima<F> ? kSumStart : sums_[g][t]);
      const __m512i sum = _mm512_add_epi32(_mm512_load_si512(sums + t * kBlockRows), start);
      totals[t] = _mm512_fmadd_ps(w_scale.times(sum),
                                  _mm512_set1_ps(std::bit_cast<float>(scales_[g][t])), totals[t]);
      if constexpr (kHasMinima<F>)
        totals[t] = _mm512_fmadd_ps(minima, _mm512_set1_ps(std::bit_cast<float>(sums_[g][t])),
                                    totals[t]);
    });
  }

 private:
  const std::int8_t* q_;
  std::int64_t stride_;
  alignas(64) std::int32_t sums_[kMostGroups][kTileTokens], scales_[kMostGroups][kTileTokens];
};

// many_tokens' way to multiply a panel on tiles.
template <Format F, int Group>
class OnTiles {
 public:
  static constexpr int kBlocks = kTileBlocks;

  static std::int64_t count(std::int64_t num_tokens) {
    return (num_tokens + kTileTokens - 1) / kTileTokens;
  }

  // All tiles have the same number of tokens (`even_rows`), so the last ones are also in the tile before.
  void multiply(const Panel& panel, Columns columns, const Activations& x, std::int64_t num_tokens,
                const Results& results, Ahead ahead) {
    see_memory();  // stores that filled the panel
    const std::int64_t rows = even_rows(num_tokens, kTileTokens);
    tiles_.use_tokens(rows);
    for (std::int64_t t = 0; t < num_tokens; t += rows) {
      const Tokens some = Tokens::from(std::min(t, num_tokens - rows), t, rows);
      const TokensOfTile<F, Group> tokens(x, columns, some.first, rows);
      multiply_tokens(panel, tokens, columns.count() / Group, some, results, ahead);
    }
  }

 private:
  // A tile's tokens, and in which of its rows they are its own; those before are also in another tile.
  struct Tokens {
    std::int64_t first;
    std::uint32_t own;

    static Tokens from(std::int64_t first, std::int64_t own, std::int64_t rows) {
      return {first, (1u << rows) - (1u << (own - first))};
    }

    bool has(int row) const { return (own >> row & 1) != 0; }
  };

  // While tiles multiply a group, the stored sums of the previous one are scaled and added.
  TANDEM_INLINE void multiply_tokens(const Panel& panel, const TokensOfTile<F, Group>& tokens,
                                     std::int64_t groups, Tokens some, const Results& results,
                                     Ahead& ahead) {
    for (int b = 0; b < results.num_blocks; ++b) {
      __m512 totals[kTileTokens];
      load(results, some, b, totals);
      start<0>(panel, tokens, 0, b);
      for (std::int64_t g = 0; g < groups; g += 2) {
        if (g * Group % kPieceColumns == 0 && b == 0) ahead.fetch_piece();
        if (g + 1 < groups) start<1>(panel, tokens, g + 1, b);
        tokens.add(panel, g, b, sums_[0], totals);
        if (g + 1 == groups) break;
        if (g + 2 < groups) start<0>(panel, tokens, g + 2, b);
        tokens.add(panel, g + 1, b, sums_[1], totals);
      }
      store(results, some, b, totals);
    }
  }

  template <int Turn>
  TANDEM_INLINE void start(const Panel& panel, const TokensOfTile<F, Group>& tokens, std::int64_t g,
                           int b) {
    tiles_.template multiply<Turn>(tokens.group(g), tokens.stride(),
                                   panel.codes[b] + g * Group * kBlockRows, sums_[Turn]);
  }

  // Sums so far; without meaning in rows that are not the tile's own.
  static void load(const Results& results, Tokens some, int b, __m512 (&totals)[kTileTokens]) {
    each<kTileTokens>([&](auto t) TANDEM_INLINED {
      totals[t] =
          results.is_first ? _mm512_setzero_ps() : _mm512_load_ps(results.at(some.first + t, b, 0));
    });
  }

  static void store(const Results& results, Tokens some, int b,
                    const __m512 (&totals)[kTileTokens]) {
    const auto store_if = [&](auto t, bool is_own) TANDEM_INLINED {
      if (is_own) results.store(some.first + t, b, totals[t]);
    };
    if (some.own == (1u << kTileTokens) - 1)
      each<kTileTokens>([&](auto t) TANDEM_INLINED { store_if(t, true); });
    else
      each<kTileTokens>([&](auto t) TANDEM_INLINED { store_if(t, some.has(t)); });
  }

  IntegerTiles<Group> tiles_;
  alignas(64) std::int32_t sums_[2][kTileTokens * kBlockRows] = {};
};

// The peak of the tiles, for comparison; see Kernels::multiply_int8.
inline std::int64_t multiply_int8_tiles(std::int64_t count) {
  alignas(64) const std::uint8_t ones[1024] = {};
  IntegerTiles<64> tiles;
  tiles.use_tokens(kTileTokens);
  _tile_loadd(0, ones, 64);
  _tile_loadd(2, ones, 64);
  for (std::int64_t i = 0; i < count; ++i) {
    _tile_dpbsud(4, 0, 2);
    _tile_dpbsud(5, 0, 2);
    _tile_dpbsud(6, 0, 2);
    _tile_dpbsud(7, 0, 2);
  }
  return count * 4 * kTileTokens * kBlockRows * 64 * 2;
}

}  // namespace
}  // namespace tandem
