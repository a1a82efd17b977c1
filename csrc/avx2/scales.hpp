// Scales and minima of integer formats, as fp32 for 8 rows at a time.
#pragma once

#include <immintrin.h>

#include "../codes.hpp"

namespace tandem {
namespace {

inline __m256 load_halves(const std::uint8_t* data) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
}

// The bits of an e4m3 number, shifted, are those of a half whose exponent has another bias.
inline __m256 load_e4m3(const std::uint8_t* data) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data));
  const __m256 halves = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7));
  return _mm256_mul_ps(halves, _mm256_set1_ps(kE4m3OfHalf));
}

// The low four bits of 8 bytes, or the high ones.
template <bool IsHigh>
__m256 load_nibbles(const std::uint8_t* data) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data));
  const __m128i moved = IsHigh ? _mm_srli_epi16(bytes, 4) : bytes;
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_and_si128(moved, _mm_set1_epi8(15))));
}

template <Format F>
__m256 in_units(__m256 scales) {
  if constexpr (encoding(F).unit == 1) return scales;
  return _mm256_mul_ps(scales, _mm256_set1_ps(encoding(F).unit));
}

// Returns a group's scales; `index` counts groups over all blocks.
template <Format F>
const std::uint8_t* scales_at(const PackedMatrix& m, std::int64_t block, std::int64_t index) {
  switch (encoding(F).scale) {
    case ScaleKind::kE4m3OfRow: return m.scales + e4m3_begin(block, index);
    case ScaleKind::kInt8OfSuper:
    case ScaleKind::kNibblesOfSuper: return m.scales + super_begin(F, index) + in_super(F, index);
    case ScaleKind::kE8m0: return m.scales + index * 16;
    case ScaleKind::kFp32:
      return m.scales + index * 64;
    default: return m.scales + index * (kHasMinima<F> ? 64 : 32);
  }
}

inline __m256 load_int8(const std::uint8_t* data) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

// Loads the scales of 8 rows of a block; `index` counts groups over all blocks.
template <Format F>
__m256 load_scales(const PackedMatrix& m, std::int64_t block, std::int64_t index, int half) {
  constexpr ScaleKind kKind = encoding(F).scale;
  if constexpr (kKind == ScaleKind::kE8m0) {
    // 2^(e - 127) is the float with exponent e. Here the exponent is one less, because codes are
    // doubled. e = 0 would need a subnormal, but 2^-128 is as good as zero.
    const auto* at = reinterpret_cast<const __m128i*>(m.scales + index * 16 + 8 * half);
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at));
    const __m256i halved = _mm256_max_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)),
                                            _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_slli_epi32(halved, 23));
  } else if constexpr (kKind == ScaleKind::kFp32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(m.scales + index * 64 + 32 * half));
  } else if constexpr (kKind == ScaleKind::kE4m3OfRow) {
    const std::uint8_t* factors = m.scales + row_factors(F, block, m.cols) + 32 * half;
    return _mm256_mul_ps(in_units<F>(load_e4m3(m.scales + e4m3_begin(block, index) + 8 * half)),
                         _mm256_loadu_ps(reinterpret_cast<const float*>(factors)));
  } else if constexpr (has_supers(F)) {
    const std::uint8_t* super = m.scales + super_begin(F, index);
    const std::uint8_t* own = super + in_super(F, index) + 8 * half;
    const __m256 factors = in_units<F>(load_halves(super + 16 * half));
    if constexpr (kKind == ScaleKind::kNibblesOfSuper)
      return _mm256_mul_ps(load_nibbles<false>(own), factors);
    else
      return _mm256_mul_ps(load_int8(own), factors);
  } else {
    return load_halves(m.scales + index * (kHasMinima<F> ? 64 : 32) + 16 * half);
  }
}

template <Format F>
__m256 load_minima(const PackedMatrix& m, std::int64_t index, int half) {
  if constexpr (has_supers(F)) {
    const std::uint8_t* super = m.scales + super_begin(F, index);
    const std::uint8_t* own = super + in_super(F, index) + 8 * half;
    const __m256 factors = load_halves(super + 32 + 16 * half);
    if constexpr (encoding(F).scale == ScaleKind::kNibblesOfSuper)
      return _mm256_mul_ps(load_nibbles<true>(own), factors);
    else
      return _mm256_mul_ps(load_int8(own + 16), factors);
  } else {
    return load_halves(m.scales + index * 64 + 32 + 16 * half);
  }
}

// Scales the sums of integers that started at kSumStart, rounding each product once.
template <Format F>
class SumScale {
 public:
  explicit SumScale(__m256 scale)
      : scale_(scale), base_(_mm256_mul_ps(scale, _mm256_set1_ps(-kSumBase))) {}

  TANDEM_INLINE __m256 times(__m256i sum) const {
    const __m256 moved = _mm256_castsi256_ps(sum);
    if constexpr (has_short_scales(F)) return _mm256_fmadd_ps(moved, scale_, base_);
    return _mm256_mul_ps(_mm256_sub_ps(moved, _mm256_set1_ps(kSumBase)), scale_);
  }

 private:
  __m256 scale_, base_;
};

}  // namespace
}  // namespace tandem
