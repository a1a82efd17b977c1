// bf16 attention on AMX's tiles. One instruction multiplies 16 query rows by 32 values of 16
// positions, or by 32 positions of 16 values; the cache's dwords already have a tile's layout.
// Included by attention_avx512.cpp after Bf16Math, whose packed queries and weights it uses.
//
// Tiles add in an order of their own, so a layer uses them either always or never.

// Instructions take tile numbers as literals: 0 and 1 are the left side (query rows), 2 the right
// side (16 dwords of 16 positions or values), 4 to 7 the sums.
constexpr std::int64_t kTileBytes = 64;  // bytes per row of a tile
constexpr std::int64_t kTileValues = 32;  // bf16 values per row of a tile

#define TANDEM_ADD_BLOCK(sum, from)                                   \
  do {                                                                \
    prefetch_lines((from) + kChunkBlocks * bytes, kTileBytes);        \
    _tile_loadd(2, (from), kTileBytes);                               \
    _tile_dpbf16ps(sum, 0, 2);                                        \
  } while (false)

class AmxMath : public Bf16Math {
 public:
  static constexpr int kMostRows = 16;

  AmxMath(const KvLayout& layout, const QueryTile& tile) : Bf16Math(layout, tile) {}
  ~AmxMath() { _tile_release(); }
  AmxMath(const AmxMath&) = delete;
  AmxMath& operator=(const AmxMath&) = delete;

  static bool takes(const KvLayout& layout) { return layout.key_width() % kTileValues == 0; }

  template <int R>
  void score(Bytes keys, std::int64_t blocks, std::int64_t row, float* scores) {
    use_rows(R);
    const std::int64_t bytes = layout_.key_block_bytes();
    Bytes left = query_ + row * row_bytes_;
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (std::int64_t at = 0; at < layout_.key_bytes(); at += 1024, left += kTileBytes) {
      _tile_loadd(0, left, row_bytes_);
      TANDEM_ADD_BLOCK(4, keys + at);
      if (blocks > 1) TANDEM_ADD_BLOCK(5, keys + bytes + at);
      if (blocks > 2) TANDEM_ADD_BLOCK(6, keys + 2 * bytes + at);
      if (blocks > 3) TANDEM_ADD_BLOCK(7, keys + 3 * bytes + at);
    }
    constexpr std::int64_t kStride = kKvChunk * 4;
    _tile_stored(4, scores, kStride);
    _tile_stored(5, scores + kKvBlock, kStride);  // zeros after the last block
    _tile_stored(6, scores + 2 * kKvBlock, kStride);
    _tile_stored(7, scores + 3 * kKvBlock, kStride);
  }

  template <int R>
  void add(Bytes values, std::int64_t blocks, std::int64_t row, const float*, float* weighted) {
    use_rows(R);
    Bytes left = weights_ + row * kKvChunk * 2;
    _tile_loadd(0, left, kKvChunk * 2);
    if (blocks > 2) {
      _tile_loadd(1, left + kTileBytes, kKvChunk * 2);
    }
    const std::int64_t width = layout_.value_width(), next = 2 * layout_.value_block_bytes();
    for (std::int64_t d = 0; d < width; d += kKvBlock) {
      _tile_loadd(4, weighted + d, width * 4);
      load_values(values + d * 4, blocks);
      _tile_dpbf16ps(4, 0, 2);
      if (blocks > 2) {
        load_values(values + next + d * 4, blocks - 2);
        _tile_dpbf16ps(4, 1, 2);
      }
      _tile_stored(4, weighted + d, width * 4);
    }
  }

 private:
  static void prefetch_lines(Bytes first, std::int64_t stride) {
#pragma GCC unroll 16
    for (int line = 0; line < 16; ++line) prefetch(first + line * stride);
  }

  // Loads the dwords of 16 values for two blocks' positions; for a single block, zeros follow.
  void load_values(Bytes values, std::int64_t blocks) {
    const std::int64_t stride = layout_.value_width() * 4;
    prefetch_lines(values + kChunkBlocks * layout_.value_block_bytes(), stride);
    if (blocks > 1) {
      _tile_loadd(2, values, stride);
      return;
    }
    alignas(64) std::uint8_t padded[16 * kTileBytes] = {};
    for (std::int64_t g = 0; g < kKvBlock / 2; ++g)
      std::memcpy(padded + g * kTileBytes, values + g * stride, kTileBytes);
    see_memory();
    _tile_loadd(2, padded, kTileBytes);
  }

  void use_rows(int rows) {
    see_memory();
    if (rows == rows_) return;
    rows_ = rows;
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = kTileBytes;
      config.rows[tile] = tile == 2 ? 16 : static_cast<std::uint8_t>(rows);
    }
    see_memory();
    _tile_loadconfig(&config);
  }

  int rows_ = 0;
};
