// Reads packed weights with AVX-512: one register is one column (four for int8, two for bf16) of a
// block's 16 rows. Only kernels_avx512.cpp may include this, because it needs that file's compiler
// flags.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "../codes.hpp"
#include "../half.hpp"

namespace tandem {
namespace {

// Unpacks codes, see codes.hpp.
struct Bytes64 {
  using Register = __m512i;

  // The barrier keeps the compiler from loading a line again for each instruction that uses it.
  // With four tokens, loads are the bottleneck.
  static __m512i load(const std::uint8_t* data) {
    __m512i bytes = _mm512_loadu_si512(data);
    asm("" : "+v"(bytes));
    return bytes;
  }
  template <int Bits>
  static __m512i shift_left(__m512i bytes) {
    return _mm512_slli_epi16(bytes, Bits);
  }
  template <int Bits>
  static __m512i shift_right(__m512i bytes) {
    return _mm512_srli_epi16(bytes, Bits);
  }
  static __m512i keep(__m512i bytes, std::uint8_t bits) {
    return _mm512_and_si512(bytes, _mm512_set1_epi8(static_cast<char>(bits)));
  }
  static __m512i either(__m512i a, __m512i b) { return _mm512_or_si512(a, b); }
  static __m512i look_up(const std::uint8_t* table, __m512i bytes) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), bytes);
  }
};

TANDEM_INLINE __m512i broadcast4(const void* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof four);
  return _mm512_set1_epi32(four);
}

// sum += four unsigned codes times four signed activations, per row. Assembly, because GCC 12
// copies the intrinsic's sums between registers, which costs a third of the speed with many tokens.
TANDEM_INLINE __m512i multiply_add_int8(__m512i sum, __m512i codes, __m512i four) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(four));
  return sum;
}

TANDEM_INLINE __m512 multiply_add_bf16(__m512 sum, __m512i weights, __m512i two) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(two));
  return sum;
}

// Converts e4m3 to bf16 by a table that is indexed by the low seven bits; the sign is added.
struct E4m3Table {
  alignas(64) std::uint8_t low[128];
  alignas(64) std::uint8_t high[128];

  E4m3Table() {
    for (int code = 0; code < 128; ++code) {
      const std::uint16_t bits = float_to_bf16(e4m3_to_float(static_cast<std::uint8_t>(code)));
      low[code] = static_cast<std::uint8_t>(bits & 255);
      high[code] = static_cast<std::uint8_t>(bits >> 8);
    }
  }
};

class E4m3Decoder {
 public:
  E4m3Decoder() {
    static const E4m3Table table;
    table_ = &table;
  }

  // 64 bytes, four columns of 16 rows, to two registers of two columns each. Most have only normal numbers,
  // for which shifts are twice as fast as tables on Intel's, where a table of 128 bytes takes three operations.
  TANDEM_INLINE void decode(const std::uint8_t* data, __m512i* columns) const {
    const __m512i codes = _mm512_loadu_si512(data);
    const __m512i doubled_codes = _mm512_add_epi8(codes, codes);  // which leaves the sign out
    const __m512i above = _mm512_add_epi8(doubled_codes, _mm512_set1_epi8(2));
    const __mmask64 others =
        _mm512_cmple_epu8_mask(above, _mm512_set1_epi8(16));  // 0 to 7, and NaN
    if (__builtin_expect(others == 0, 1)) {
      columns[0] = shifted(_mm512_maskz_shuffle_epi8(kHighBytes, codes, doubled(0)));
      columns[1] = shifted(_mm512_maskz_shuffle_epi8(kHighBytes, codes, doubled(2)));
    } else {
      columns[0] = looked_up(_mm512_shuffle_epi8(codes, doubled(0)));
      columns[1] = looked_up(_mm512_shuffle_epi8(codes, doubled(2)));
    }
  }

 private:
  static constexpr __mmask64 kHighBytes = 0xAAAAAAAAAAAAAAAAull;

  // Codes in the upper bytes: exponents count from 120 more in bf16.
  TANDEM_INLINE static __m512i shifted(__m512i codes) {
    const __m512i bits = _mm512_and_si512(_mm512_srai_epi16(codes, 4), _mm512_set1_epi16(-0x7810));
    return _mm512_add_epi16(bits, _mm512_set1_epi16(120 << 7));
  }

  // Selects bytes `first` and `first` + 1 of each row, twice each.
  static __m512i doubled(char first) {
    const char second = first + 1;
    return _mm512_broadcast_i32x4(_mm_add_epi8(
        _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12),
        _mm_setr_epi8(first, first, second, second, first, first, second, second, first, first,
                      second, second, first, first, second, second)));
  }

  TANDEM_INLINE __m512i looked_up(__m512i codes) const {
    const auto of = [&](const std::uint8_t* table) TANDEM_INLINED {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes,
                                      _mm512_load_si512(table + 64));
    };
    const __m512i magnitude = _mm512_mask_mov_epi8(of(table_->low), kHighBytes, of(table_->high));
    constexpr int kOrAnd = 0xF8;  // a | (b & c)
    return _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi16(-0x8000), kOrAnd);
  }

  const E4m3Table* table_;
};

// Returns the scales of a block's group; `index` counts groups over all blocks.
template <Format F>
TANDEM_INLINE const std::uint8_t* scales_at(const PackedMatrix& m, std::int64_t block,
                                            std::int64_t index) {
  if constexpr (has_supers(F)) return m.scales + super_begin(F, index) + in_super(F, index);
  if constexpr (encoding(F).scale == ScaleKind::kE4m3OfRow)
    return m.scales + e4m3_begin(block, index);
  return m.scales + index * scale_bytes(F, kSuperCols, kSuperCols);
}

TANDEM_INLINE __m512 load_halves(const std::uint8_t* data) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)));
}

// The bits of an e4m3 number, shifted, are those of a half whose exponent has another bias.
TANDEM_INLINE __m512 load_e4m3(const std::uint8_t* data) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  const __m512 halves = _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
  return _mm512_mul_ps(halves, _mm512_set1_ps(kE4m3OfHalf));
}

// The low four bits of 16 bytes, or the high ones.
template <bool IsHigh>
TANDEM_INLINE __m512 load_nibbles(const std::uint8_t* data) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  const __m128i moved = IsHigh ? _mm_srli_epi16(bytes, 4) : bytes;
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_and_si128(moved, _mm_set1_epi8(15))));
}

template <Format F>
TANDEM_INLINE __m512 in_units(__m512 scales) {
  if constexpr (encoding(F).unit == 1) return scales;
  return _mm512_mul_ps(scales, _mm512_set1_ps(encoding(F).unit));
}

TANDEM_INLINE __m512 load_int8(const std::uint8_t* data) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// The scales of a block's 16 rows in one group.
template <Format F>
TANDEM_INLINE __m512 load_scales(const PackedMatrix& m, std::int64_t block, std::int64_t index) {
  constexpr ScaleKind kKind = encoding(F).scale;
  const std::uint8_t* at = scales_at<F>(m, block, index);
  if constexpr (kKind == ScaleKind::kFp32OfBlock) {
    float scale;
    std::memcpy(&scale, at, sizeof scale);
    return _mm512_set1_ps(scale);
  } else if constexpr (kKind == ScaleKind::kFp32) {
    return _mm512_loadu_ps(at);
  } else if constexpr (kKind == ScaleKind::kE8m0) {
    // 2^(e - 127) is the float with exponent e. Here the exponent is one less, because codes are
    // doubled. e = 0 would need a subnormal, but 2^-128 is as good as zero.
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    const __m512i halved = _mm512_max_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)),
                                            _mm512_setzero_si512());
    return _mm512_castsi512_ps(_mm512_slli_epi32(halved, 23));
  } else if constexpr (kKind == ScaleKind::kE4m3OfRow) {
    const std::uint8_t* factors = m.scales + row_factors(F, block, m.cols);
    return _mm512_mul_ps(in_units<F>(load_e4m3(at)), _mm512_loadu_ps(factors));
  } else if constexpr (has_supers(F)) {
    const __m512 factors = in_units<F>(load_halves(m.scales + super_begin(F, index)));
    if constexpr (kKind == ScaleKind::kNibblesOfSuper)
      return _mm512_mul_ps(load_nibbles<false>(at), factors);
    else
      return _mm512_mul_ps(load_int8(at), factors);
  } else {
    return load_halves(at);
  }
}

template <Format F>
TANDEM_INLINE __m512 load_minima(const PackedMatrix& m, std::int64_t block, std::int64_t index) {
  const std::uint8_t* at = scales_at<F>(m, block, index);
  if constexpr (has_supers(F)) {
    const __m512 factors = load_halves(m.scales + super_begin(F, index) + 32);
    if constexpr (encoding(F).scale == ScaleKind::kNibblesOfSuper)
      return _mm512_mul_ps(load_nibbles<true>(at), factors);
    else
      return _mm512_mul_ps(load_int8(at + 16), factors);
  }
  return load_halves(at + 32);
}

// Scales the sums of integers that started at kSumStart, rounding each product once.
template <Format F>
class SumScale {
 public:
  explicit SumScale(__m512 scale)
      : scale_(scale), base_(_mm512_mul_ps(scale, _mm512_set1_ps(-kSumBase))) {}

  TANDEM_INLINE __m512 times(__m512i sum) const {
    const __m512 moved = _mm512_castsi512_ps(sum);
    if constexpr (has_short_scales(F)) return _mm512_fmadd_ps(moved, scale_, base_);
    return _mm512_mul_ps(_mm512_sub_ps(moved, _mm512_set1_ps(kSumBase)), scale_);
  }

 private:
  __m512 scale_, base_;
};

// Where the results of a row block go.
struct Output {
  float* at;
  std::int64_t stride;
  __mmask16 rows;
  __m512 bias;

  static Output of(const PackedMatrix& m, std::int64_t block, std::int64_t num_rows, float* out,
                   std::int64_t stride) {
    const std::int64_t valid = num_rows - block * kBlockRows;
    return {out + block * kBlockRows, stride,
            static_cast<__mmask16>(valid >= kBlockRows ? 0xFFFF : (1u << valid) - 1),
            m.bias ? _mm512_loadu_ps(m.bias + block * kBlockRows) : _mm512_setzero_ps()};
  }

  void store(std::int64_t token, __m512 total) const {
    _mm512_mask_storeu_ps(at + token * stride, rows, _mm512_add_ps(total, bias));
  }
};

}  // namespace
}  // namespace tandem
