// Looks up lines of a grid with 256-bit registers, eight rows at a time; the table stays in the
// first-level cache. Included like output.hpp.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "../grid_product.hpp"
#include "ahead.hpp"
#include "scales.hpp"

namespace tandem {
namespace {

// Whether signs negate numbers; otherwise they move them by two.
template <Format F>
constexpr bool kHasSigns = encoding(F).grid->sign_kind() != Signs::kOne;

// The numbers of a grid's lines, one byte each: magnitudes, or codes in grids without signs.
template <Format F>
struct GridLines {
  static constexpr const Grid& kGrid = *encoding(F).grid;
  static constexpr int kBytes = kGrid.line_cols;

  alignas(64) std::uint8_t numbers[kBytes << kGrid.index_bits];

  GridLines() {
    for (int i = 0; i < kBytes << kGrid.index_bits; ++i) {
      const int bits = kGrid.lines[i / kBytes] >> i % kBytes * kGrid.line_bits();
      const int code = encoding(F).table[bits & (kBytes == 8 ? 3 : 7)];
      numbers[i] = static_cast<std::uint8_t>(kHasSigns<F> ? code - encoding(F).offset : code);
    }
  }
};

template <Format F>
const GridLines<F>& grid_lines() {
  static const GridLines<F> lines;
  return lines;
}

// The first or the second eight rows of a block.
template <Format F>
class GridRows {
 public:
  TANDEM_INLINE GridRows(const std::uint8_t* words, std::int64_t half)
      : words_(words + 32 * half), lines_(grid_lines<F>().numbers) {}

  // Calls function(J, numbers, signs) for every four columns of strip S; the bytes of `signs` are 0
  // or -1.
  template <int S, typename Function>
  TANDEM_INLINE void strip(const Function& function) const {
    constexpr int kLines = kStripCols / kGrid.line_cols;
    const __m256i signs = signs_of<S>();
    each<kLines>([&](auto l) TANDEM_INLINED {
      constexpr int L = decltype(l)::value, kCount = kGrid.line_cols / 4;
      __m256i numbers[kCount];
      if constexpr (kGrid.high.width == 0 || kGrid.high.base == kGrid.low.base + 8) {
        // The bit where the lines' low bytes begin.
        constexpr int kAt = kGrid.low.at(S * kLines + L);
        const std::uint8_t* place = words_ + 64 * (kAt / 32) + kAt % 32 / 8;
        look_up([&](int row)
                    TANDEM_INLINED { return whole_number<kGrid.high.width>(place + 4 * row); },
                numbers);
      } else {
        alignas(32) std::int32_t place[8];
        _mm256_store_si256(reinterpret_cast<__m256i*>(place), line_number<S * kLines + L>());
        look_up([&](int row) TANDEM_INLINED { return place[row]; }, numbers);
      }
      each<kCount>([&](auto i) TANDEM_INLINED {
        constexpr int J = L * kCount + decltype(i)::value;
        function(std::integral_constant<int, J>{}, numbers[i], sign_bytes<J>(signs));
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

  // The field of `Width` bits at bit `At` of each row's words.
  template <int At, int Width>
  TANDEM_INLINE __m256i number() const {
    const auto* word = reinterpret_cast<const __m256i*>(words_ + 64 * (At / 32));
    return _mm256_and_si256(_mm256_srli_epi32(_mm256_loadu_si256(word), At % 32),
                            _mm256_set1_epi32((1 << Width) - 1));
  }

  // The number of a line whose bits (eight and `More`) are adjacent.
  template <int More>
  static TANDEM_INLINE int whole_number(const std::uint8_t* at) {
    if constexpr (More == 0) return *at;
    std::uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return bits & ((256 << More) - 1);
  }

  template <int L>
  TANDEM_INLINE __m256i line_number() const {
    const __m256i low = number<kGrid.low.at(L), 8>();
    const __m256i high = number<kGrid.high.at(L), kGrid.high.width>();
    return _mm256_or_si256(low, _mm256_slli_epi32(high, 8));
  }

  // The signs of eight columns as a byte, four copies per row.
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
    const __m256i are_odd = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i eighth =
        _mm256_shuffle_epi8(are_odd, _mm256_and_si256(halves, _mm256_set1_epi8(15)));
    return _mm256_or_si256(signs, eighth);
  }

  // Loads one line per row, from `place(row)`. A register holds four columns of the eight rows.
  template <typename Place>
  TANDEM_INLINE void look_up(const Place& place, __m256i (&codes)[1]) const {
    const auto line = [&](int row) TANDEM_INLINED {
      std::int32_t four;
      std::memcpy(&four, lines_ + 4 * place(row), sizeof four);
      return four;
    };
    codes[0] =
        _mm256_setr_epi32(line(0), line(1), line(2), line(3), line(4), line(5), line(6), line(7));
  }

  template <typename Place>
  TANDEM_INLINE void look_up(const Place& place, __m256i (&codes)[2]) const {
    const auto two = [&](int row) TANDEM_INLINED {
      const auto* line = reinterpret_cast<const double*>(lines_ + 8 * place(row));
      const auto* next = reinterpret_cast<const double*>(lines_ + 8 * place(row + 1));
      return _mm_loadh_pd(_mm_load_sd(line), next);
    };
    const __m256 some = _mm256_castpd_ps(_mm256_set_m128d(two(4), two(0)));
    const __m256 others = _mm256_castpd_ps(_mm256_set_m128d(two(6), two(2)));
    codes[0] = _mm256_castps_si256(_mm256_shuffle_ps(some, others, 0x88));
    codes[1] = _mm256_castps_si256(_mm256_shuffle_ps(some, others, 0xDD));
  }

  // The signs of the J-th four columns of a strip, as bytes.
  template <int J>
  static TANDEM_INLINE __m256i sign_bytes(__m256i signs) {
    constexpr int kByte = J / 2;
    const __m256i of_row = _mm256_broadcastsi128_si256(_mm_add_epi8(
        _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12), _mm_set1_epi8(kByte)));
    const __m256i bits =
        _mm256_set1_epi32(static_cast<int>(J % 2 == 0 ? 0x08040201u : 0x80402010u));
    const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(signs, of_row), bits);
    return _mm256_cmpeq_epi8(own, bits);
  }

  const std::uint8_t* words_;
  const std::uint8_t* lines_;
};

// Codes from numbers and signs.
template <Format F>
TANDEM_INLINE __m256i codes_of_numbers(__m256i numbers, __m256i signs) {
  if constexpr (!kHasSigns<F>) return _mm256_add_epi8(numbers, _mm256_add_epi8(signs, signs));
  const __m256i signed_numbers = _mm256_sub_epi8(_mm256_xor_si256(numbers, signs), signs);
  return _mm256_add_epi8(signed_numbers, _mm256_set1_epi8(static_cast<char>(encoding(F).offset)));
}

// The argument of look_up_block().
struct Lookup256 {
  template <Format F>
  static void super(const std::uint8_t* words, const std::uint8_t* factors, std::uint8_t* codes,
                    float* scales) {
    for (std::int64_t half = 0; half < 2; ++half) {
      const GridRows<F> rows(words, half);
      each<kStripsOfSuper>([&](auto s) TANDEM_INLINED {
        std::uint8_t* out = codes + s * kStripCols * kBlockRows + 32 * half;
        rows.template strip<decltype(s)::value>(
            [&](auto j, __m256i numbers, __m256i signs) TANDEM_INLINED {
              _mm256_store_si256(reinterpret_cast<__m256i*>(out + 64 * j),
                                 codes_of_numbers<F>(numbers, signs));
            });
      });
      const __m256 factor = in_units<F>(rows.factors(factors + 16 * half));
      each<kSuperCols / encoding(F).group>([&](auto g) TANDEM_INLINED {
        _mm256_store_ps(scales + g * kBlockRows + 8 * half,
                        _mm256_mul_ps(rows.template scale<decltype(g)::value>(), factor));
      });
    }
  }
};

// One token: multiplies lines while they are looked up, magnitudes by activations with the signs
// applied, in the same order as for more tokens. `half` selects the super-block's rows.
template <Format F>
TANDEM_INLINE void multiply_super(const GridRows<F>& rows, __m256 factor, const std::int8_t* q,
                                  const std::int32_t* x_sums, const float* x_scales,
                                  __m256& total) {
  constexpr int kParts = kGroupsOfStrip<F>, kFours = kFoursOfStrip / kParts;
  constexpr int kLargest = encoding(F).largest - (kHasSigns<F> ? encoding(F).offset : 0);
  constexpr int kHeld = kLargest <= 15 ? 8 : kLargest <= 31 ? 4 : 2;  // products that fit 16 bits
  each<kStripsOfSuper>([&](auto strip) TANDEM_INLINED {
    constexpr int S = decltype(strip)::value;
    __m256i sum = _mm256_setzero_si256(), held = _mm256_setzero_si256();
    rows.template strip<S>([&](auto j, __m256i numbers, __m256i signs) TANDEM_INLINED {
      constexpr int J = decltype(j)::value, G = S * kParts + J / kFours;
      if constexpr (J % kFours == 0) sum = _mm256_set1_epi32(kHasSigns<F> ? kSumStart : x_sums[G]);
      std::int32_t four;
      std::memcpy(&four, q + S * kStripCols + 4 * J, sizeof four);
      const __m256i x = _mm256_set1_epi32(four);
      __m256i products;
      if constexpr (kHasSigns<F>)
        products = _mm256_maddubs_epi16(
            numbers, _mm256_sign_epi8(x, _mm256_or_si256(signs, _mm256_set1_epi8(1))));
      else
        products = _mm256_maddubs_epi16(codes_of_numbers<F>(numbers, signs), x);
      held = J % kHeld == 0 ? products : _mm256_add_epi16(held, products);
      if constexpr ((J + 1) % kHeld == 0 || (J + 1) % kFours == 0)
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(held, _mm256_set1_epi16(1)));
      if constexpr ((J + 1) % kFours == 0) {
        const SumScale<F> scale(_mm256_mul_ps(rows.template scale<G>(), factor));
        total = _mm256_fmadd_ps(scale.times(sum), _mm256_set1_ps(x_scales[G]), total);
      }
    });
  });
}

template <Format F>
void multiply_lines(const PackedMatrix& m, std::int64_t block, const Activations& x,
                    const Output& out) {
  constexpr std::int64_t kWords = code_bytes(F, kSuperCols),
                         kGroups = kSuperCols / encoding(F).group;
  constexpr std::int64_t kFactors = scale_bytes(F, kSuperCols, encoding(F).group);
  const std::int64_t supers = m.cols / kSuperCols;
  const std::uint8_t* words = m.data + block * supers * kWords;
  const std::uint8_t* factors = m.scales + block * supers * kFactors;
  Totals<1> total;
  out.load<1>(total);
  for (std::int64_t s = 0; s < supers; ++s, words += kWords, factors += kFactors) {
    for (std::int64_t at = 0; at < kWords; at += 64) {
      fetch<Cache::kSecond>(words + kLinesAhead + at);
      fetch<Cache::kFirst>(words + kLinesNear + at);
    }
    fetch<Cache::kFirst>(factors + kFactorsAhead);
    for (int half = 0; half < kHalves; ++half) {
      const GridRows<F> rows(words, half);
      const __m256 factor = in_units<F>(rows.factors(factors + 16 * half));
      multiply_super<F>(rows, factor, x.quantized + s * kSuperCols, x.sums + s * kGroups,
                        x.scales + s * kGroups, total[0][half]);
    }
  }
  out.store<1>(total);
}

inline void multiply_one_token(const Product& p, std::int64_t begin, std::int64_t end) {
  end = last_block(end, p.num_rows);
  each<kNumFormats>([&](auto number) {
    constexpr Format F = static_cast<Format>(decltype(number)::value);
    if constexpr (is_grid(F))
      if (p.m.format == F)
        for (std::int64_t b = begin; b < end; ++b)
          multiply_lines<F>(p.m, b, p.x, p.block(b, true, true));
  });
}

}  // namespace
}  // namespace tandem
