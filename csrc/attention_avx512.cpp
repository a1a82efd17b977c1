// Attention with AVX-512: registers of 16 floats, and for bf16 caches its dot products of bf16 pairs.
#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "attention.hpp"

#define TANDEM_LANES 16

namespace tandem {
namespace {

#include "attention_kernel.inl"

// ---- bf16 caches whose heads fill whole registers ----
//
// Scores: 32 products and their sums per instruction, four positions times four heads in
// registers; sixteen registers become one register of sixteen sums by adding halves. Weighted sums:
// the values of two positions take turns in a register, so that one instruction adds both, with
// their two weights, rounded to bf16, side by side. No value is unpacked.

using Bits = std::uint16_t;

constexpr std::int64_t kMaxBf16Dim = 512;

__m512bh as_bf16(__m512i bits) { return reinterpret_cast<__m512bh>(bits); }

// out[i] = the sum of v[i], for sixteen registers.
__m512 sums_of(const __m512* v) {
  __m512 pairs[8];
  for (int i = 0; i < 8; ++i) {
    const __m512 low = _mm512_shuffle_f32x4(v[i], v[i + 8], 0x44);   // halves of both, lower
    const __m512 high = _mm512_shuffle_f32x4(v[i], v[i + 8], 0xEE);  // and upper
    pairs[i] = _mm512_add_ps(low, high);  // 8 lanes of i, 8 lanes of i + 8
  }
  __m512 quads[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 even = _mm512_shuffle_f32x4(pairs[i], pairs[i + 4], 0x88);
    const __m512 odd = _mm512_shuffle_f32x4(pairs[i], pairs[i + 4], 0xDD);
    quads[i] = _mm512_add_ps(even, odd);  // 4 lanes each of i, i + 8, i + 4, i + 12
  }
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(quads[0], quads[2]),
                                 _mm512_unpackhi_ps(quads[0], quads[2]));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(quads[1], quads[3]),
                                 _mm512_unpackhi_ps(quads[1], quads[3]));
  // Lanes of a: quads 0, 2, 0, 2; of b: 1, 3, 1, 3; per 128 bits.
  const __m512 sum = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  // Now per 128 bits: 0, 1, 2, 3 of i, i + 8, i + 4, i + 12.
  return _mm512_shuffle_f32x4(sum, sum, 0xD8);
}

// scores[h * kAttentionChunk + p] for four heads and `count` positions, a multiple of four.
void bf16_scores(const Bits* keys, std::int64_t dim, std::int64_t count, const Bits* query,
                 float* scores) {
  for (std::int64_t p = 0; p < count; p += 4) {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
    for (std::int64_t d = 0; d < dim; d += 32) {
      __m512bh k[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) k[i] = as_bf16(_mm512_loadu_si512(keys + (p + i) * dim + d));
#pragma GCC unroll 4
      for (int h = 0; h < 4; ++h) {
        const __m512bh q = as_bf16(_mm512_loadu_si512(query + h * dim + d));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[h * 4 + i] = _mm512_dpbf16_ps(sums[h * 4 + i], k[i], q);
      }
    }
    const __m512 all = sums_of(sums);
    for (int h = 0; h < 4; ++h) {
      const __m512 mine = _mm512_maskz_compress_ps(static_cast<__mmask16>(15 << (4 * h)), all);
      _mm512_mask_storeu_ps(scores + h * kAttentionChunk + p, 15, mine);
    }
  }
}

// Adds `count` positions, an even number, to the weighted sums of four heads, 64 values at a time.
void bf16_values(const Bits* values, std::int64_t dim, std::int64_t count, const float* weights,
                 float* weighted, std::int64_t width) {
  std::int32_t pairs[4][kAttentionChunk / 2];  // (w[p], w[p + 1])
  for (int h = 0; h < 4; ++h) {
    const __m256i low = reinterpret_cast<__m256i>(
        _mm512_cvtneps_pbh(_mm512_loadu_ps(weights + h * kAttentionChunk)));
    const __m256i high = reinterpret_cast<__m256i>(
        _mm512_cvtneps_pbh(_mm512_loadu_ps(weights + h * kAttentionChunk + 16)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs[h]), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(pairs[h] + 8), high);
  }
  for (std::int64_t d = 0; d < dim; d += 64) {
    __m512 sums[4][4] = {};
    for (std::int64_t p = 0; p < count; p += 2) {
      const Bits* first = values + p * dim + d;
      const __m512i a0 = _mm512_loadu_si512(first), a1 = _mm512_loadu_si512(first + 32);
      const __m512i b0 = _mm512_loadu_si512(first + dim), b1 = _mm512_loadu_si512(first + dim + 32);
      const __m512bh v[4] = {
          as_bf16(_mm512_unpacklo_epi16(a0, b0)), as_bf16(_mm512_unpackhi_epi16(a0, b0)),
          as_bf16(_mm512_unpacklo_epi16(a1, b1)), as_bf16(_mm512_unpackhi_epi16(a1, b1))};
#pragma GCC unroll 4
      for (int h = 0; h < 4; ++h) {
        const __m512bh w = as_bf16(_mm512_set1_epi32(pairs[h][p / 2]));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sums[h][i] = _mm512_dpbf16_ps(sums[h][i], v[i], w);
      }
    }
    // The lower halves of each 128 bits went to sums 0 and 2, the upper ones to 1 and 3.
    const __m512i first_half = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22,
                                                 23);
    const __m512i second_half = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28,
                                                  29, 30, 31);
    for (int h = 0; h < 4; ++h)
      for (int i = 0; i < 2; ++i) {
        float* to = weighted + h * width + d + 32 * i;
        const __m512 low = sums[h][2 * i], high = sums[h][2 * i + 1];
        store(to, load(to) + _mm512_permutex2var_ps(low, first_half, high));
        store(to + 16, load(to + 16) + _mm512_permutex2var_ps(low, second_half, high));
      }
  }
}

// Four heads at a time; the places of heads that are not there repeat the last one.
void attend_bf16(const Bits* keys, std::int64_t key_dim, const Bits* values,
                 std::int64_t value_dim, std::int64_t begin, std::int64_t end, const float* query,
                 std::int64_t heads, float scale, float softcap, PartialAttention partial) {
  constexpr int kHeads = 4;
  const std::int64_t key_width = attention_padded(key_dim);
  const std::int64_t value_width = attention_padded(value_dim);
  alignas(64) static thread_local Bits q[kHeads * kMaxBf16Dim];
  alignas(64) float scores[kHeads * kAttentionChunk];
  alignas(64) static thread_local float sums[kHeads * kMaxBf16Dim];
  for (std::int64_t first = 0; first < heads; first += kHeads) {
    const std::int64_t count_heads = heads - first < kHeads ? heads - first : kHeads;
    for (std::int64_t h = 0; h < kHeads; ++h) {
      const std::int64_t head = first + (h < count_heads ? h : count_heads - 1);
      for (std::int64_t d = 0; d < key_dim; d += 16)
        _mm256_storeu_si256(
            reinterpret_cast<__m256i*>(q + h * key_dim + d),
            reinterpret_cast<__m256i>(
                _mm512_cvtneps_pbh(_mm512_loadu_ps(query + head * key_width + d))));
      std::memcpy(sums + h * value_width, partial.weighted + head * value_width,
                  value_width * sizeof(float));
    }
    std::int64_t at = begin;
    for (; at < end; at += kAttentionChunk) {
      const std::int64_t count = end - at < kAttentionChunk ? end - at : kAttentionChunk;
      const std::int64_t whole = count / 4 * 4;
      bf16_scores(keys + at * key_dim, key_dim, whole, q, scores);
      for (std::int64_t p = whole; p < count; ++p)  // behind them may be the end of the memory
        for (std::int64_t h = 0; h < kHeads; ++h) {
          __m512 sum = _mm512_setzero_ps();
          for (std::int64_t d = 0; d < key_dim; d += 32)
            sum = _mm512_dpbf16_ps(
                sum, as_bf16(_mm512_loadu_si512(keys + (at + p) * key_dim + d)),
                as_bf16(_mm512_loadu_si512(q + h * key_dim + d)));
          scores[h * kAttentionChunk + p] = _mm512_reduce_add_ps(sum);
        }
      for (std::int64_t h = 0; h < count_heads; ++h)
        soften(scores + h * kAttentionChunk, count, scale, softcap, partial.greatest[first + h],
               partial.sum[first + h], sums + h * value_width, value_width);
      for (std::int64_t h = count_heads; h < kHeads; ++h)
        std::memset(scores + h * kAttentionChunk, 0, kAttentionChunk * sizeof(float));
      const std::int64_t even = count / 2 * 2;
      const Bits* rows = values + at * value_dim;
      bf16_values(rows, value_dim, even, scores, sums, value_width);
      if (even < count)
        for (std::int64_t h = 0; h < count_heads; ++h) {
          const float weight = scores[h * kAttentionChunk + even];
          for (std::int64_t d = 0; d < value_dim; ++d)
            sums[h * value_width + d] += weight * bf16_to_float(rows[even * value_dim + d]);
        }
    }
    for (std::int64_t h = 0; h < count_heads; ++h)
      std::memcpy(partial.weighted + (first + h) * value_width, sums + h * value_width,
                  value_width * sizeof(float));
  }
}

void attend_any(const void* keys, std::int64_t key_dim, const void* values, std::int64_t value_dim,
                ValueType type, std::int64_t begin, std::int64_t end, const float* query,
                std::int64_t heads, float scale, float softcap, PartialAttention partial,
                float* scratch) {
  const bool is_whole = key_dim % 32 == 0 && value_dim % 64 == 0;
  if (type == ValueType::kBf16 && is_whole && key_dim <= kMaxBf16Dim && value_dim <= kMaxBf16Dim)
    attend_bf16(static_cast<const Bits*>(keys), key_dim, static_cast<const Bits*>(values),
                value_dim, begin, end, query, heads, scale, softcap, partial);
  else
    attend(keys, key_dim, values, value_dim, type, begin, end, query, heads, scale, softcap,
           partial, scratch);
}

}  // namespace

const AttentionKernel& avx512_attention() {
  static const AttentionKernel kernel{attend_any};
  return kernel;
}

}  // namespace tandem
