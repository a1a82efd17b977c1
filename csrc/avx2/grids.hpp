// Looks lines of a grid up on 256-bit registers: of eight rows at once, line by line in memory that
// stays in the nearest cache. Included like output.hpp.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "../grid_product.hpp"
#include "scales.hpp"

namespace tandem {
namespace {

// The codes of a grid's lines without signs, a byte each.
template <Format F>
struct GridLines {
  static constexpr const Grid& kGrid = *encoding(F).grid;
  static constexpr int kBytes = kGrid.line_cols;

  alignas(64) std::uint8_t codes[kBytes << kGrid.index_bits];

  GridLines() {
    for (int i = 0; i < kBytes << kGrid.index_bits; ++i) {
      const int bits = kGrid.lines[i / kBytes] >> i % kBytes * kGrid.line_bits();
      codes[i] = encoding(F).table[bits & (kBytes == 8 ? 3 : 7)];
    }
  }
};

template <Format F>
const GridLines<F>& grid_lines() {
  static const GridLines<F> lines;
  return lines;
}

// Of eight rows, the first or the second half of a block's.
template <Format F>
class GridRows {
 public:
  TANDEM_INLINE GridRows(const std::uint8_t* words, std::int64_t half)
      : words_(words + 32 * half), lines_(grid_lines<F>().codes) {}

  // Strip S of the super-block, into bytes of which 64 have four columns of 16 rows.
  template <int S>
  TANDEM_INLINE void strip(std::uint8_t* out) const {
    constexpr int kLines = kStripCols / kGrid.line_cols;
    const __m256i signs = signs_of<S>();
    each<kLines>([&](auto l) TANDEM_INLINED {
      constexpr int L = decltype(l)::value, kCount = kGrid.line_cols / 4;
      alignas(32) std::int32_t number[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(number), line_number<S * kLines + L>());
      __m256i codes[kCount];
      look_up(number, codes);
      each<kCount>([&](auto i) TANDEM_INLINED {
        constexpr int J = L * kCount + decltype(i)::value;
        _mm256_store_si256(reinterpret_cast<__m256i*>(out + 64 * J), with_signs<J>(codes[i], signs));
      });
    });
  }

  template <int G>
  TANDEM_INLINE __m256 scale() const {
    const __m256i steps = number<kGrid.scales.at(G), kGrid.scales.width>();
    return _mm256_cvtepi32_ps(
        _mm256_add_epi32(_mm256_add_epi32(steps, steps), _mm256_set1_epi32(1)));
  }

  TANDEM_INLINE __m256 factors(const std::uint8_t* factors) const {
    if constexpr (kGrid.factor.width == 0) return load_halves(factors);
    __m256i halves = _mm256_setzero_si256();
    each<4>([&](auto part) TANDEM_INLINED {
      constexpr int kPart = decltype(part)::value;
      const __m256i own = number<kGrid.factor.at(kPart), 4>();
      halves = _mm256_or_si256(halves, _mm256_slli_epi32(own, 4 * kPart));
    });
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
  }

 private:
  static constexpr const Grid& kGrid = *encoding(F).grid;

  // Numbers of `Width` bits from bit `At` of each row's words on.
  template <int At, int Width>
  TANDEM_INLINE __m256i number() const {
    const auto* word = reinterpret_cast<const __m256i*>(words_ + 64 * (At / 32));
    return _mm256_and_si256(_mm256_srli_epi32(_mm256_loadu_si256(word), At % 32),
                            _mm256_set1_epi32((1 << Width) - 1));
  }

  template <int L>
  TANDEM_INLINE __m256i line_number() const {
    const __m256i low = number<kGrid.low.at(L), 8>();
    if constexpr (kGrid.high.width == 0) return low;
    const __m256i high = number<kGrid.high.at(L), kGrid.high.width>();
    return _mm256_or_si256(low, _mm256_slli_epi32(high, 8));
  }

  // Bytes with the signs of eight columns, four for each row.
  template <int S>
  TANDEM_INLINE __m256i signs_of() const {
    __m256i signs = _mm256_setzero_si256();
    each<4>([&](auto i) TANDEM_INLINED {
      constexpr int I = decltype(i)::value;
      const __m256i own = number<kGrid.signs.at(4 * S + I), kGrid.signs.width>();
      signs = _mm256_or_si256(signs, _mm256_slli_epi32(own, 8 * I));
    });
    if constexpr (kGrid.sign_kind() == Signs::kOne)
      return _mm256_cmpgt_epi8(signs, _mm256_setzero_si256());
    if constexpr (kGrid.sign_kind() == Signs::kEight) return signs;
    const __m256i halves = _mm256_xor_si256(signs, _mm256_srli_epi16(signs, 4));
    const __m256i are_odd = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i eighth =
        _mm256_shuffle_epi8(are_odd, _mm256_and_si256(halves, _mm256_set1_epi8(15)));
    return _mm256_or_si256(signs, eighth);
  }

  // Codes of a line of each row: one register has four columns of the eight rows.
  TANDEM_INLINE void look_up(const std::int32_t* number, __m256i (&codes)[1]) const {
    const auto line = [&](int row) TANDEM_INLINED {
      std::int32_t four;
      std::memcpy(&four, lines_ + 4 * number[row], sizeof four);
      return four;
    };
    codes[0] = _mm256_setr_epi32(line(0), line(1), line(2), line(3), line(4), line(5), line(6), line(7));
  }

  TANDEM_INLINE void look_up(const std::int32_t* number, __m256i (&codes)[2]) const {
    const auto two = [&](int row) TANDEM_INLINED {
      const auto* line = reinterpret_cast<const double*>(lines_ + 8 * number[row]);
      const auto* next = reinterpret_cast<const double*>(lines_ + 8 * number[row + 1]);
      return _mm_loadh_pd(_mm_load_sd(line), next);
    };
    const __m256 some = _mm256_castpd_ps(_mm256_set_m128d(two(4), two(0)));
    const __m256 others = _mm256_castpd_ps(_mm256_set_m128d(two(6), two(2)));
    codes[0] = _mm256_castps_si256(_mm256_shuffle_ps(some, others, 0x88));
    codes[1] = _mm256_castps_si256(_mm256_shuffle_ps(some, others, 0xDD));
  }

  // The J-th four columns of a strip.
  template <int J>
  static TANDEM_INLINE __m256i with_signs(__m256i codes, __m256i signs) {
    constexpr int kByte = J / 2;
    const __m256i of_row = _mm256_broadcastsi128_si256(_mm_add_epi8(
        _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12), _mm_set1_epi8(kByte)));
    const __m256i bits = _mm256_set1_epi32(static_cast<int>(J % 2 == 0 ? 0x08040201u : 0x80402010u));
    const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(signs, of_row), bits);
    const __m256i are_negative = _mm256_cmpeq_epi8(own, bits);
    if constexpr (kGrid.sign_kind() == Signs::kOne)  // two less
      return _mm256_add_epi8(codes, _mm256_add_epi8(are_negative, are_negative));
    const __m256i twice_zero = _mm256_set1_epi8(static_cast<char>(2 * encoding(F).offset + 1));
    return _mm256_add_epi8(_mm256_xor_si256(codes, are_negative),
                           _mm256_and_si256(are_negative, twice_zero));
  }

  const std::uint8_t* words_;
  const std::uint8_t* lines_;
};

// For look_up_block().
struct Lookup256 {
  template <Format F>
  static void super(const std::uint8_t* words, const std::uint8_t* factors, std::uint8_t* codes,
                    float* scales) {
    for (std::int64_t half = 0; half < 2; ++half) {
      const GridRows<F> rows(words, half);
      each<kStripsOfSuper>([&](auto s) TANDEM_INLINED {
        rows.template strip<decltype(s)::value>(codes + s * kStripCols * kBlockRows + 32 * half);
      });
      const __m256 factor = in_units<F>(rows.factors(factors + 16 * half));
      each<kSuperCols / encoding(F).group>([&](auto g) TANDEM_INLINED {
        _mm256_store_ps(scales + g * kBlockRows + 8 * half,
                        _mm256_mul_ps(rows.template scale<decltype(g)::value>(), factor));
      });
    }
  }
};

}  // namespace
}  // namespace tandem
