// Attention with AVX-512: registers of 16 floats. bf16 and int8 caches are multiplied without
// conversion, by the instructions that sum products of two bf16 or four int8 values per lane. bf16
// uses AMX's tiles if there are any.
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "amx.hpp"
#include "attention.hpp"
#include "cpu_features.hpp"

#define TANDEM_LANES 16

namespace tandem {
namespace {

#include "vectors.inl"

#include "attention_kernel.inl"

using Bytes = const std::uint8_t*;

// A thread's memory for the packed queries of its tile.
std::uint8_t* query_memory(std::int64_t bytes) {
  thread_local std::vector<std::uint8_t> memory;
  if (static_cast<std::int64_t>(memory.size()) < bytes) memory.resize(bytes);
  return memory.data();
}

inline __m512i dword_of(const void* left) {
  std::int32_t bits;
  std::memcpy(&bits, left, sizeof bits);
  return _mm512_set1_epi32(bits);
}

// Blocks of keys that R rows multiply at a time: enough sums to hide the multiplier's latency.
template <int R>
constexpr int kBlocksAtOnce = R >= 8 ? 2 : 4;
// The same for registers of values.
template <int R>
constexpr int kColumnsAtOnce = R >= 8 ? 2 : 4;

// Values d..d+15 of a query, zeros beyond its end.
inline __m512 load_query(const float* query, std::int64_t d, std::int64_t width) {
  const auto left = static_cast<unsigned>(std::min<std::int64_t>(16, width - d));
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), query + d);
}

// Prefetches what is a chunk ahead. The hardware prefetcher stops at the end of a page, and
// arithmetic should overlap with memory.
inline void prefetch(Bytes data) {
  _mm_prefetch(reinterpret_cast<const char*>(data), _MM_HINT_T1);
}

// Splits a chunk into pieces whose sums fit registers; `Own` multiplies a piece (`score_blocks` and
// `add_columns`).
template <class Own>
class InRegisters {
 public:
  static constexpr int kMostRows = 8;

  template <int R>
  void score(Bytes keys, std::int64_t blocks, std::int64_t row, float* scores) const {
    constexpr int B = kBlocksAtOnce<R>;
    std::int64_t b = 0;
    for (; b + B <= blocks; b += B) own().template score_blocks<R, B>(keys, b, row, scores);
    for (; b < blocks; ++b) own().template score_blocks<R, 1>(keys, b, row, scores);
  }

  template <int R>
  void add(Bytes values, std::int64_t blocks, std::int64_t row, const float*,
           float* weighted) const {
    constexpr int V = kColumnsAtOnce<R>;
    const std::int64_t width = layout_.value_width();
    std::int64_t d = 0;
    for (; d + V * 16 <= width; d += V * 16)
      own().template add_columns<R, V>(values, blocks, row, d, weighted);
    for (; d < width; d += 16) own().template add_columns<R, 1>(values, blocks, row, d, weighted);
  }

 protected:
  explicit InRegisters(const KvLayout& layout) : layout_(layout) {}

  const KvLayout& layout_;

 private:
  const Own& own() const { return static_cast<const Own&>(*this); }
};

// ---- bf16 ----

class Bf16Math : public InRegisters<Bf16Math> {
 public:
  Bf16Math(const KvLayout& layout, const QueryTile& tile)
      : InRegisters(layout), row_bytes_((layout.key_width() + 15) / 16 * 32) {
    std::uint8_t* to = query_memory(tile.num_rows * row_bytes_ + 64);
    query_ = to;
    for (std::int64_t r = 0; r < tile.num_rows; ++r)
      for (std::int64_t d = 0; d < layout.key_width(); d += 16) {
        const __m512 x = load_query(tile.query + r * layout.key_width(), d, layout.key_width());
        store_bf16(to + r * row_bytes_ + d * 2, x);
      }
  }

  void weigh(std::int64_t row, const float* weights, Bytes, std::int64_t) {
    for (std::int64_t p = 0; p < kKvChunk; p += 16)
      store_bf16(weights_ + (row * kKvChunk + p) * 2, _mm512_loadu_ps(weights + p));
  }

 protected:
  friend class InRegisters<Bf16Math>;

  static void store_bf16(std::uint8_t* to, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }

  template <int R, int V>
  static void multiply(Bytes data, std::int64_t column_bytes, std::int64_t step_bytes,
                       std::int64_t steps, Bytes left, std::int64_t stride, std::int64_t ahead,
                       __m512 (&sums)[R][V]) {
    for (std::int64_t s = 0; s < steps; ++s, data += step_bytes, left += 4) {
      __m512bh x[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        prefetch(data + v * column_bytes + ahead);
        x[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(data + v * column_bytes));
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const auto y = reinterpret_cast<__m512bh>(dword_of(left + r * stride));
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], x[v], y);
      }
    }
  }

  template <int R, int B>
  void score_blocks(Bytes keys, std::int64_t block, std::int64_t row, float* scores) const {
    __m512 sums[R][B] = {};
    multiply<R, B>(keys + block * layout_.key_block_bytes(), layout_.key_block_bytes(), 64,
                   layout_.key_width() / 2, query_ + row * row_bytes_, row_bytes_,
                   kChunkBlocks * layout_.key_block_bytes(), sums);
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b)
        _mm512_storeu_ps(scores + r * kKvChunk + (block + b) * kKvBlock, sums[r][b]);
  }

  template <int R, int V>
  void add_columns(Bytes values, std::int64_t blocks, std::int64_t row, std::int64_t first,
                   float* weighted) const {
    const std::int64_t width = layout_.value_width();
    __m512 sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = _mm512_loadu_ps(weighted + r * width + first + v * 16);
    // Blocks follow each other without a gap.
    multiply<R, V>(values + first * 4, 64, width * 4, blocks * (kKvBlock / 2),
                   weights_ + row * kKvChunk * 2, kKvChunk * 2,
                   kChunkBlocks * layout_.value_block_bytes(), sums);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        _mm512_storeu_ps(weighted + r * width + first + v * 16, sums[r][v]);
  }

  std::int64_t row_bytes_;
  Bytes query_;
  alignas(64) std::uint8_t weights_[kGroupRows * kKvChunk * 2];
};

#include "attention_amx.inl"

// ---- int8 ----

// Queries are rounded to int8 per row; weights, times the values' scales, to 0..255 per row and
// chunk.
class Int8Math : public InRegisters<Int8Math> {
 public:
  Int8Math(const KvLayout& layout, const QueryTile& tile)
      : InRegisters(layout), row_bytes_((layout.key_width() + 15) / 16 * 16) {
    std::uint8_t* to = query_memory(tile.num_rows * (row_bytes_ + 8) + 64);
    query_ = to;
    auto* scales = reinterpret_cast<float*>(to + tile.num_rows * row_bytes_);
    auto* offsets = reinterpret_cast<std::int32_t*>(scales + tile.num_rows);
    query_scales_ = scales, query_offsets_ = offsets;
    for (std::int64_t r = 0; r < tile.num_rows; ++r)
      pack_query(tile.query + r * layout.key_width(), to + r * row_bytes_, scales + r, offsets + r);
  }

  void weigh(std::int64_t row, float* weights, Bytes values, std::int64_t blocks) {
    Fp32Math<KvType::kInt8>::scale_weights(layout_, weights, values, blocks);
    __m512 peaks = _mm512_setzero_ps(), sums = peaks;
    for (std::int64_t p = 0; p < kKvChunk; p += 16) {
      const __m512 weight = _mm512_loadu_ps(weights + p);
      peaks = _mm512_max_ps(peaks, weight);
      sums = _mm512_add_ps(sums, weight);
    }
    const float peak = _mm512_reduce_max_ps(peaks);
    weight_scales_[row] = scale_or_nan(peak / 255.0f, sums);
    const __m512 factor = _mm512_set1_ps(peak > 1e-36f ? 255.0f / peak : 0.0f);
    for (std::int64_t p = 0; p < kKvChunk; p += 16) {
      const __m512i codes =
          _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(weights + p), factor));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(weights_ + row * kKvChunk + p),
                       _mm512_cvtusepi32_epi8(codes));
    }
  }

 private:
  friend class InRegisters<Int8Math>;

  // Codes cannot hold NaN, so their scale is NaN if a sum is.
  static float scale_or_nan(float scale, __m512 sums) {
    return _mm512_cmp_ps_mask(sums, sums, _CMP_UNORD_Q) ? NAN : scale;
  }

  void pack_query(const float* query, std::uint8_t* to, float* scale, std::int32_t* offset) const {
    const std::int64_t width = layout_.key_width();
    __m512 peaks = _mm512_setzero_ps(), magnitudes = peaks;
    for (std::int64_t d = 0; d < width; d += 16) {
      const __m512 magnitude = _mm512_abs_ps(load_query(query, d, width));
      peaks = _mm512_max_ps(peaks, magnitude);
      magnitudes = _mm512_add_ps(magnitudes, magnitude);
    }
    const float peak = _mm512_reduce_max_ps(peaks);
    const __m512 factor = _mm512_set1_ps(peak > 1e-30f ? 127.0f / peak : 0.0f);
    *scale = scale_or_nan(peak / 127.0f, magnitudes);
    __m512i sums = _mm512_setzero_si512();
    for (std::int64_t d = 0; d < width; d += 16) {
      const __m512i codes =
          _mm512_cvtps_epi32(_mm512_mul_ps(load_query(query, d, width), factor));
      sums = _mm512_add_epi32(sums, codes);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d), _mm512_cvtsepi32_epi8(codes));
    }
    *offset = -kKeyOffset * _mm512_reduce_add_epi32(sums);
  }

  template <int R, int B>
  void score_blocks(Bytes keys, std::int64_t block, std::int64_t row, float* scores) const {
    const std::int64_t bytes = layout_.key_block_bytes();
    keys += block * bytes;
    __m512i sums[R][B];
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) sums[r][b] = _mm512_set1_epi32(query_offsets_[row + r]);
    Bytes at = keys, left = query_ + row * row_bytes_;
    for (std::int64_t s = 0; s < layout_.key_width() / 4; ++s, at += 64, left += 4) {
      __m512i x[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        prefetch(at + (b + kChunkBlocks) * bytes);
        x[b] = _mm512_loadu_si512(at + b * bytes);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512i y = dword_of(left + r * row_bytes_);
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) sums[r][b] = _mm512_dpbusd_epi32(sums[r][b], x[b], y);
      }
    }
    for (int b = 0; b < B; ++b) {
      const __m512 scales = _mm512_loadu_ps(keys + b * bytes + layout_.key_bytes());
      for (int r = 0; r < R; ++r)
        _mm512_storeu_ps(scores + r * kKvChunk + (block + b) * kKvBlock,
                         _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][b]),
                                       _mm512_mul_ps(scales, _mm512_set1_ps(query_scales_[row + r]))));
    }
  }

  template <int R, int V>
  void add_columns(Bytes values, std::int64_t blocks, std::int64_t row, std::int64_t first,
                   float* weighted) const {
    const std::int64_t width = layout_.value_width();
    __m512i sums[R][V] = {};
    for (std::int64_t b = 0; b < blocks; ++b) {
      Bytes at = values + b * layout_.value_block_bytes() + first * 4;
      Bytes left = weights_ + row * kKvChunk + b * kKvBlock;
      for (std::int64_t s = 0; s < kKvBlock / 4; ++s, at += width * 4, left += 4) {
        __m512i x[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          prefetch(at + v * 64 + kChunkBlocks * layout_.value_block_bytes());
          x[v] = _mm512_loadu_si512(at + v * 64);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512i y = dword_of(left + r * kKvChunk);
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], y, x[v]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      const __m512 scale = _mm512_set1_ps(weight_scales_[row + r]);
      for (int v = 0; v < V; ++v) {
        float* to = weighted + r * width + first + v * 16;
        _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][v]), scale,
                                             _mm512_loadu_ps(to)));
      }
    }
  }

  std::int64_t row_bytes_;
  Bytes query_;
  const float* query_scales_;
  const std::int32_t* query_offsets_;
  float weight_scales_[kGroupRows];
  alignas(64) std::uint8_t weights_[kGroupRows * kKvChunk];
};

template <bool HasTiles>
void attend_any(const KvLayout& layout, Bytes keys, Bytes values, const QueryTile& tile,
                std::int64_t begin, std::int64_t end, const PartialAttention& partial) {
  switch (layout.type) {
    case KvType::kFp32:
      return attend_fp32(layout, keys, values, tile, begin, end, partial);
    case KvType::kBf16:
      if (HasTiles && AmxMath::takes(layout))
        return attend_with<AmxMath>(layout, keys, values, tile, begin, end, partial);
      return attend_with<Bf16Math>(layout, keys, values, tile, begin, end, partial);
    case KvType::kInt8:
      return attend_with<Int8Math>(layout, keys, values, tile, begin, end, partial);
  }
}

}  // namespace

const AttentionKernel& avx512_attention() {
  static const AttentionKernel kernel{attend_any<false>};
  return kernel;
}

const AttentionKernel& amx_attention() {
  static const AttentionKernel kernel{attend_any<true>};
  return kernel;
}

}  // namespace tandem
