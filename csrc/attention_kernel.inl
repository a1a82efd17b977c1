// The attention kernel for one width of registers. Each instruction set's file includes it, after
// vectors.inl and inside its own namespace, with TANDEM_LANES set to the floats per register.
//
// Up to 16 query rows share a chunk of 64 positions: scores, softmax, weighted sums of values. Both
// products multiply rows by packed dwords whose lanes are positions (for keys) or dimensions (for
// values), so no sum runs across a register.

constexpr std::int64_t kGroupRows = 16;  // query rows that share a chunk
constexpr int kBlockVectors = kKvBlock / TANDEM_LANES;  // registers for a block's positions
constexpr std::int64_t kChunkBlocks = kKvChunk / kKvBlock;

// Calls f<n>(first) for rows 0..count-1 in groups of `Most`, then eight, four, two and one.
template <int Most, typename F>
inline void in_groups(std::int64_t count, const F& f) {
  std::int64_t row = 0;
  if constexpr (Most >= 16)
    for (; row + 16 <= count; row += 16) f.template operator()<16>(row);
  if constexpr (Most >= 8)
    for (; row + 8 <= count; row += 8) f.template operator()<8>(row);
  for (; row + 4 <= count; row += 4) f.template operator()<4>(row);
  for (; row + 2 <= count; row += 2) f.template operator()<2>(row);
  if (row < count) f.template operator()<1>(row);
}

// ---- arithmetic in fp32, whatever the cache holds ----

// Value j of each dword.
template <KvType Type, bool IsKey>
inline Vector part(Integers dwords, int j) {
  if constexpr (Type == KvType::kInt8) {
    if constexpr (IsKey)
      return __builtin_convertvector(((dwords >> (8 * j)) & 255) - kKeyOffset, Vector);
    return __builtin_convertvector((dwords << (24 - 8 * j)) >> 24, Vector);
  }
  if constexpr (Type == KvType::kBf16) {
    constexpr std::int32_t kHigh = -65536;  // 0xFFFF0000
    dwords = j == 0 ? dwords << 16 : dwords & kHigh;
  }
  Vector v;
  std::memcpy(&v, &dwords, sizeof v);
  return v;
}

// sums[r][v] += left[r][k] * values k of `steps` dwords, which are `step_bytes` apart.
template <KvType Type, bool IsKey, int R, int V>
inline void multiply_fp32(const std::uint8_t* data, std::int64_t step_bytes, std::int64_t steps,
                          const float* left, std::int64_t stride, Vector (&sums)[R][V]) {
  constexpr int kPack = Type == KvType::kFp32 ? 1 : Type == KvType::kBf16 ? 2 : 4;
  for (std::int64_t s = 0; s < steps; ++s, data += step_bytes) {
    Integers dwords[V];
    for (int v = 0; v < V; ++v) dwords[v] = load_dwords(data + v * TANDEM_LANES * 4);
#pragma GCC unroll 4
    for (int j = 0; j < kPack; ++j) {
      Vector x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) x[v] = part<Type, IsKey>(dwords[v], j);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float y = left[r * stride + s * kPack + j];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v] += x[v] * y;
      }
    }
  }
}

// How a tile multiplies a chunk; this one in fp32.
template <KvType Type>
class Fp32Math {
 public:
  static constexpr int kMostRows = TANDEM_LANES == 16 ? 8 : 4;

  Fp32Math(const KvLayout& layout, const QueryTile& tile)
      : layout_(layout), query_(tile.query), width_(layout.key_width()) {}

  // Computes scores[r * kKvChunk + p] of R rows from `row` on, for the positions of `blocks`
  // blocks.
  template <int R>
  void score(const std::uint8_t* keys, std::int64_t blocks, std::int64_t row,
             float* scores) const {
    for (std::int64_t b = 0; b < blocks; ++b, keys += layout_.key_block_bytes()) {
      Vector sums[R][kBlockVectors] = {};
      multiply_fp32<Type, true>(keys, kKvBlock * 4, width_ / layout_.pack(),
                                query_ + row * width_, width_, sums);
      const auto* scales = reinterpret_cast<const float*>(keys + layout_.key_bytes());
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kBlockVectors; ++v) {
          if constexpr (Type == KvType::kInt8) sums[r][v] *= load(scales + v * TANDEM_LANES);
          store(scores + r * kKvChunk + b * kKvBlock + v * TANDEM_LANES, sums[r][v]);
        }
    }
  }

  // Prepares the weights (kKvChunk) of one row of a group, in place.
  void weigh(std::int64_t, float* weights, const std::uint8_t* values, std::int64_t blocks) {
    if constexpr (Type == KvType::kInt8) scale_weights(layout_, weights, values, blocks);
    (void)weights, (void)values, (void)blocks;
  }

  // weighted[r * width + d] += weights times values, for R rows of a group from `row` on.
  template <int R>
  void add(const std::uint8_t* values, std::int64_t blocks, std::int64_t row, const float* weights,
           float* weighted) const {
    constexpr int kVectors = 2;
    const std::int64_t width = layout_.value_width();
    std::int64_t d = 0;
    for (; d + kVectors * TANDEM_LANES <= width; d += kVectors * TANDEM_LANES)
      add_columns<R, kVectors>(values, blocks, weights + row * kKvChunk, weighted + d, d);
    for (; d < width; d += TANDEM_LANES)
      add_columns<R, 1>(values, blocks, weights + row * kKvChunk, weighted + d, d);
  }

  static void scale_weights(const KvLayout& layout, float* weights, const std::uint8_t* values,
                            std::int64_t blocks) {
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::uint8_t* block = values + b * layout.value_block_bytes();
      const auto* scales = reinterpret_cast<const float*>(block + layout.value_bytes());
      for (std::int64_t p = 0; p < kKvBlock; p += TANDEM_LANES) {
        float* at = weights + b * kKvBlock + p;
        store(at, load(at) * load(scales + p));
      }
    }
  }

 private:
  template <int R, int V>
  void add_columns(const std::uint8_t* values, std::int64_t blocks, const float* weights,
                   float* weighted, std::int64_t first) const {
    const std::int64_t width = layout_.value_width();
    Vector sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = load(weighted + r * width + v * TANDEM_LANES);
    for (std::int64_t b = 0; b < blocks; ++b)
      multiply_fp32<Type, false>(values + b * layout_.value_block_bytes() + first * 4, width * 4,
                                 kKvBlock / layout_.pack(), weights + b * kKvBlock, kKvChunk,
                                 sums);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(weighted + r * width + v * TANDEM_LANES, sums[r][v]);
  }

  const KvLayout& layout_;
  const float* query_;
  std::int64_t width_;
};

// ---- joint keys, spread into blocks of keys and of values ----

using KeyRows = const std::uint8_t* [kKvBlock];

// Dword g of row i moves to dword 16 g + i, with the bits in `turned` flipped.
#if TANDEM_LANES == 16
inline void transpose_dwords(const KeyRows& rows, std::int64_t count, std::int32_t turned,
                             std::uint8_t* to) {
  const __m512i flip = _mm512_set1_epi32(turned);
  for (std::int64_t g = 0; g < count; g += 16) {
    const auto left = static_cast<int>(std::min<std::int64_t>(16, count - g));
    const auto mask = static_cast<__mmask16>((1u << left) - 1);
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(mask, rows[i] + g * 4);
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    // After this, part p of a[i + c] is column 4 p + c of four rows from i on.
    for (int i = 0; i < 16; i += 4) {
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
      const __m512i even = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
      const __m512i odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xDD);
      const __m512i more_even = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
      const __m512i more_odd = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xDD);
      b[c] = _mm512_shuffle_i32x4(even, more_even, 0x88);
      b[4 + c] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
      b[8 + c] = _mm512_shuffle_i32x4(even, more_even, 0xDD);
      b[12 + c] = _mm512_shuffle_i32x4(odd, more_odd, 0xDD);
    }
    for (int i = 0; i < left; ++i)
      _mm512_storeu_si512(to + (g + i) * 64, _mm512_xor_si512(b[i], flip));
  }
}
#else
inline void transpose_dwords(const KeyRows& rows, std::int64_t count, std::int32_t turned,
                             std::uint8_t* to) {
  for (std::int64_t i = 0; i < kKvBlock; ++i)
    for (std::int64_t g = 0; g < count; ++g) {
      std::int32_t dword;
      std::memcpy(&dword, rows[i] + g * 4, sizeof dword);
      dword ^= turned;
      std::memcpy(to + (g * kKvBlock + i) * 4, &dword, sizeof dword);
    }
}
#endif

// Value d of `pack` rows becomes one dword.
inline void interleave(const KvLayout& layout, const KeyRows& rows, std::uint8_t* to) {
  const std::int64_t width = layout.value_width();
  for (std::int64_t p = 0; p < kKvBlock; p += layout.pack(), to += width * 4) {
    auto* dwords = reinterpret_cast<std::uint32_t*>(to);
    if (layout.type == KvType::kFp32) {
      std::memcpy(to, rows[p], width * 4);
    } else if (layout.type == KvType::kBf16) {
      const auto* low = reinterpret_cast<const std::uint16_t*>(rows[p]);
      const auto* high = reinterpret_cast<const std::uint16_t*>(rows[p + 1]);
      for (std::int64_t d = 0; d < width; ++d)
        dwords[d] = low[d] | static_cast<std::uint32_t>(high[d]) << 16;
    } else {
      for (std::int64_t d = 0; d < width; ++d)
        dwords[d] = rows[p][d] | static_cast<std::uint32_t>(rows[p + 1][d]) << 8 |
                    static_cast<std::uint32_t>(rows[p + 2][d]) << 16 |
                    static_cast<std::uint32_t>(rows[p + 3][d]) << 24;
    }
  }
}

// Spreads a chunk of joint keys into blocks. A thread has one at a time.
class SpreadChunk {
 public:
  // Takes the first kKvChunk of `count` keys, or fewer if there are no more; zeros fill the last
  // block.
  SpreadChunk(const KvLayout& layout, const std::uint8_t* const* keys, std::int64_t count)
      : key_block_bytes_(layout.key_block_bytes()) {
    thread_local std::vector<std::uint8_t> memory, zeros;
    memory.resize(kChunkBlocks * (key_block_bytes_ + layout.value_block_bytes()));
    zeros.resize(layout.joint_bytes());
    data_ = memory.data();
    for (std::int64_t p = 0; p < std::min(count, kKvChunk); p += kKvBlock) {
      KeyRows rows;
      for (std::int64_t i = 0; i < kKvBlock; ++i) {
        rows[i] = p + i < count ? keys[p + i] : zeros.data();
        if (p + i + kKvBlock < count) ask_for(keys[p + i + kKvBlock], layout.joint_bytes());
      }
      std::uint8_t* to_keys = data_ + p / kKvBlock * key_block_bytes_;
      std::uint8_t* to_values = values_of() + p / kKvBlock * layout.value_block_bytes();
      const bool is_int8 = layout.type == KvType::kInt8;
      transpose_dwords(rows, layout.key_width() / layout.pack(),
                       is_int8 ? static_cast<std::int32_t>(0x80808080) : 0, to_keys);
      interleave(layout, rows, to_values);
      for (std::int64_t i = 0; is_int8 && i < kKvBlock; ++i)
        for (std::uint8_t* scales : {to_keys + layout.key_bytes(), to_values + layout.value_bytes()})
          std::memcpy(scales + i * 4, rows[i] + layout.joint_values(), 4);
    }
  }

  const std::uint8_t* keys() const { return data_; }
  const std::uint8_t* values() { return values_of(); }

 private:
  static void ask_for(const std::uint8_t* data, std::int64_t bytes) {
    for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at);
  }
  std::uint8_t* values_of() { return data_ + kChunkBlocks * key_block_bytes_; }

  std::int64_t key_block_bytes_;
  std::uint8_t* data_ = nullptr;
};

#include "attention_softmax.inl"

// ---- a tile with one head ----

struct Group {
  std::int64_t first_row, num_rows;
  std::int64_t at;  // the chunk's first position
};

static_assert(kKvChunk == 64);  // a word has one bit per position

inline std::uint64_t lowest_bits(std::int64_t count) {
  return count == kKvChunk ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}

// The positions of a chunk that a row sees, as bits.
inline std::uint64_t seen_of(const SeenByRow& row, std::int64_t at, std::int64_t end) {
  const auto before = [&](std::int64_t position) {
    return lowest_bits(std::clamp<std::int64_t>(position - at, 0, kKvChunk));
  };
  const std::uint64_t last = before(std::min(row.end, end));
  const std::uint64_t seen = last & (~before(row.begin) | before(row.always));
  return row.selected && seen != 0 ? seen & row.selected[at / kKvChunk] : seen;
}

template <class Math>
void attend_group(Math& math, const KvLayout& layout, const std::uint8_t* keys,
                  const std::uint8_t* values, const QueryTile& tile, const Group& group,
                  std::int64_t end, const PartialAttention& partial) {
  const std::int64_t width = layout.value_width();
  std::uint64_t seen[kGroupRows], any = 0;
  for (std::int64_t r = 0; r < group.num_rows; ++r) {
    seen[r] = seen_of(tile.seen[group.first_row + r], group.at, end);
    any |= seen[r];
  }
  if (any == 0) return;
  const std::int64_t blocks = (kKvChunk - std::countl_zero(any) + kKvBlock - 1) / kKvBlock;
  alignas(64) float scores[kGroupRows * kKvChunk];
  in_groups<Math::kMostRows>(group.num_rows, [&]<int R>(std::int64_t r) {
    math.template score<R>(keys, blocks, group.first_row + r, scores + r * kKvChunk);
  });
  for (std::int64_t r = 0; r < group.num_rows; ++r) {
    const std::int64_t row = group.first_row + r;
    float* of_row = scores + r * kKvChunk;
    if (seen[r] != 0) scale_scores(of_row, tile, row, group.at);
    soften(of_row, seen[r], {partial.greatest + row, partial.sum + row, partial.weighted + row * width},
           width);
    math.weigh(r, scores + r * kKvChunk, values, blocks);
  }
  in_groups<Math::kMostRows>(group.num_rows, [&]<int R>(std::int64_t r) {
    math.template add<R>(values, blocks, r, scores,
                         partial.weighted + (group.first_row + r) * width);
  });
}

template <class Math>
void attend_with(const KvLayout& layout, const std::uint8_t* keys, const std::uint8_t* values,
                 const QueryTile& tile, std::int64_t begin, std::int64_t end,
                 const PartialAttention& partial) {
  Math math(layout, tile);
  const auto attend_chunk = [&](std::int64_t at, const std::uint8_t* of_keys,
                                const std::uint8_t* of_values) {
    for (std::int64_t row = 0; row < tile.num_rows; row += kGroupRows)
      attend_group(math, layout, of_keys, of_values, tile,
                   {row, std::min(kGroupRows, tile.num_rows - row), at}, end, partial);
  };
  for (std::int64_t at = begin / kKvChunk * kKvChunk; at < end; at += kKvChunk) {
    const std::int64_t block = at % tile.capacity / kKvBlock;
    if (tile.joint) {
      SpreadChunk chunk(layout, tile.joint + at, end - at);
      attend_chunk(at, chunk.keys(), chunk.values());
    } else {
      attend_chunk(at, keys + block * layout.key_block_bytes(),
                   values + block * layout.value_block_bytes());
    }
  }
}

void attend_fp32(const KvLayout& layout, const std::uint8_t* keys, const std::uint8_t* values,
                 const QueryTile& tile, std::int64_t begin, std::int64_t end,
                 const PartialAttention& partial) {
  switch (layout.type) {
    case KvType::kFp32:
      return attend_with<Fp32Math<KvType::kFp32>>(layout, keys, values, tile, begin, end, partial);
    case KvType::kBf16:
      return attend_with<Fp32Math<KvType::kBf16>>(layout, keys, values, tile, begin, end, partial);
    case KvType::kInt8:
      return attend_with<Fp32Math<KvType::kInt8>>(layout, keys, values, tile, begin, end, partial);
  }
}
