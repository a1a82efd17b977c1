// Packed weights as tiles of bf16 want them: scales and minima multiplied in and rounded once, so that
// products of a prompt have no groups. A line holds two columns of a block's 16 rows, and 16 lines, a
// strip of 32 columns, fill a tile. Only kernels_amx.cpp may include this: it needs that file's flags.
#pragma once

#include "grids.hpp"
#include "panel.hpp"

namespace tandem {
namespace {

constexpr std::int64_t kLineBytes = 64, kLineColumns = 2;
constexpr std::int64_t kTileBytes = kStripCols / kLineColumns * kLineBytes;

// What a prompt multiplies on tiles of bf16: all but fp16, whose digits bf16 would lose, and fp8, whose
// values are exact in bf16 without their scales.
constexpr bool has_lines(Format format) {
  return format == Format::kBf16 ||
         (is_integer(format) && (is_grid(format) || has_vector_kernels(format)));
}

// Four columns of unsigned codes as floats. Those below 128 become digits of a float that stands for
// 128 more, in two instructions; others, less 128, the upper byte of an integer.
template <Format F>
class CodeFloats {
 public:
  static constexpr bool kAreDigits = encoding(F).largest < 128;
  static constexpr float kUnit =
      kAreDigits ? 1 : 0x1p-24f;  // what a code of one has become, inverted
  static constexpr float kZero = encoding(F).offset + (kAreDigits ? 128 : -128);

  TANDEM_INLINE explicit CodeFloats(__m512i codes)
      : codes_(kAreDigits ? codes
                          : _mm512_xor_si512(codes, _mm512_set1_epi32(INT32_MIN | 0x808080))) {}

  template <int J>
  TANDEM_INLINE __m512 column() const {
    constexpr int kUp = kAreDigits ? 16 - 8 * J : 24 - 8 * J;
    const __m512i moved =
        kUp < 0 ? _mm512_srli_epi32(codes_, -kUp) : _mm512_slli_epi32(codes_, kUp);
    if constexpr (kAreDigits) {
      constexpr int kAndOr = 0xEA;  // (a & b) | c
      return _mm512_castsi512_ps(
          _mm512_ternarylogic_epi32(moved, _mm512_set1_epi32(0x7F0000),
                                    _mm512_set1_epi32(std::bit_cast<int>(128.0f)), kAndOr));
    }
    return _mm512_cvtepi32_ps(_mm512_and_si512(moved, _mm512_set1_epi32(INT32_MIN >> 7)));
  }

 private:
  __m512i codes_;
};

// What such floats of a group are multiplied with, and what is added, by row.
template <Format F>
class LineScales {
 public:
  TANDEM_INLINE LineScales(__m512 scales, __m512 minima)
      : scales_(_mm512_mul_ps(scales, _mm512_set1_ps(CodeFloats<F>::kUnit))),
        zeros_(_mm512_fnmadd_ps(scales, _mm512_set1_ps(CodeFloats<F>::kZero), minima)) {}

  // Two lines of four columns.
  TANDEM_INLINE void put(__m512i codes, std::uint8_t* to) const {
    const CodeFloats<F> floats(codes);
    _mm512_store_si512(to, line(floats.template column<0>(), floats.template column<1>()));
    _mm512_store_si512(to + kLineBytes,
                       line(floats.template column<2>(), floats.template column<3>()));
  }

 private:
  // To the nearest bf16. The instruction for that takes longer, and does not put columns side by side.
  TANDEM_INLINE __m512i line(__m512 even, __m512 odd) const {
    constexpr __mmask32 kOddHalves = 0xAAAAAAAA;
    const __m512i low = _mm512_srli_epi32(rounded(even), 16);
    return _mm512_mask_blend_epi16(kOddHalves, low, rounded(odd));
  }

  TANDEM_INLINE __m512i rounded(__m512 floats) const {
    const __m512 values = _mm512_fmadd_ps(floats, scales_, zeros_);
    return _mm512_add_epi32(_mm512_castps_si512(values), _mm512_set1_epi32(0x8000));
  }

  __m512 scales_, zeros_;
};

// Decodes strips of a row block, from the left to the right.
template <Format F>
class BlockStrips {
 public:
  BlockStrips(const PackedMatrix& m, std::int64_t block)
      : m_(m), block_(block), codes_(codes_at(m, block, 0)), group_(block * groups(m, m.cols)) {}

  // Columns `column` to `column` + 31; asks for what comes `kAhead` bytes later, after the last ones of
  // the row in that of the next but one block.
  TANDEM_INLINE void decode(std::int64_t column, std::uint8_t* to) const {
    const std::uint8_t* strip = codes_ + code_bytes(F, column);
    const std::int64_t row_bytes = code_bytes(F, m_.cols);
    const std::uint8_t* ahead = strip + kAhead;
    if (ahead - codes_ >= row_bytes) ahead += row_bytes;
    each<kStripBytes<F> / 64>([&](auto line) TANDEM_INLINED { prefetch(ahead, 64 * line); });
    const std::int64_t index = group_ + column * kParts / std::max(m_.group, kStripCols);
    prefetch_scales<F>(m_, block_, index, kScalesAhead);
    each<kParts>([&](auto part) TANDEM_INLINED {
      __m512 minima = _mm512_setzero_ps();
      if constexpr (kHasMinima<F>) minima = load_minima<F>(m_, block_, index + part);
      const LineScales<F> scales(load_scales<F>(m_, block_, index + part), minima);
      each<kFours>([&](auto i) TANDEM_INLINED {
        constexpr int J = decltype(part)::value * kFours + decltype(i)::value;
        scales.put(codes_of<Bytes64, F, J>(strip), to + 2 * kLineBytes * J);
      });
    });
  }

 private:
  static constexpr int kParts = kGroupsOfStrip<F>, kFours = kFoursOfStrip / kParts;
  static constexpr std::int64_t kAhead = 4096, kScalesAhead = 8 * kParts;

  const PackedMatrix& m_;
  std::int64_t block_;
  const std::uint8_t* codes_;
  std::int64_t group_;  // the first one's number
};

// Of grids lines are looked up 256 columns at a time.
template <Format F>
  requires(is_grid(F))
class BlockStrips<F> {
 public:
  BlockStrips(const PackedMatrix& m, std::int64_t block)
      : words_(codes_at(m, block, 0)),
        factors_(m.scales + block * m.cols / kSuperCols * kFactorBytes) {}

  void decode(std::int64_t column, std::uint8_t* to) {
    const std::int64_t super = column / kSuperCols, at = column % kSuperCols;
    if (at == 0)
      Lookup512::template super<F>(words_ + super * code_bytes(F, kSuperCols),
                                   factors_ + super * kFactorBytes, codes_, scales_);
    each<kParts>([&](auto part) TANDEM_INLINED {
      const float* own = scales_ + (at / kStripCols * kParts + part) * kBlockRows;
      const LineScales<F> scales(_mm512_load_ps(own), _mm512_setzero_ps());
      each<kFours>([&](auto i) TANDEM_INLINED {
        const std::int64_t j = part * kFours + i;
        scales.put(_mm512_load_si512(codes_ + at * kBlockRows + 64 * j), to + 2 * kLineBytes * j);
      });
    });
  }

 private:
  static constexpr int kParts = kGroupsOfStrip<F>, kFours = kFoursOfStrip / kParts;
  static constexpr std::int64_t kFactorBytes = scale_bytes(F, kSuperCols, encoding(F).group);

  const std::uint8_t* words_;
  const std::uint8_t* factors_;
  alignas(64) std::uint8_t codes_[kSuperCols * kBlockRows];
  alignas(64) float scales_[kSuperCols / encoding(F).group * kBlockRows];
};

}  // namespace
}  // namespace tandem
