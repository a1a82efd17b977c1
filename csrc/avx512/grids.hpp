// Looks up lines of a grid with 512-bit registers, 64 lines at a time. Tables in registers give the
// two bytes of each line. Included like weights.hpp.
#pragma once

#include <algorithm>
#include <bit>

#include "../grid_product.hpp"
#include "few_tokens.hpp"

namespace tandem {
namespace {

// The low and the high bytes of a grid's lines; the numbers with their signs, repeated to fill a
// register; and the eight signs for each value of seven.
template <Format F>
struct GridTables {
  static constexpr const Grid& kGrid = *encoding(F).grid;
  static constexpr int kLines = 1 << kGrid.index_bits;

  alignas(64) std::uint8_t low[kLines], high[kLines];
  alignas(64) std::uint8_t numbers[64];
  alignas(64) std::uint8_t even_signs[128];

  GridTables() {
    for (int i = 0; i < kLines; ++i) {
      low[i] = static_cast<std::uint8_t>(kGrid.lines[i] & 255);
      high[i] = static_cast<std::uint8_t>(kGrid.lines[i] >> 8);
    }
    for (int i = 0; i < 64; ++i)
      numbers[i] = encoding(F).table[i % (kGrid.line_cols == 8 ? 8 : 16)];
    for (unsigned i = 0; i < 128; ++i)
      even_signs[i] = static_cast<std::uint8_t>(i | (std::popcount(i) & 1u) << 7);
  }
};

// Built at first use, because only then it is certain that the processor has these registers.
template <Format F>
const GridTables<F>& grid_tables() {
  static const GridTables<F> tables;
  return tables;
}

// Bit offsets for multishift() in a pair of rows: byte `i` of a row's dword begins at First + i *
// Step, and from the third byte on at Second + (i - 2) * Step.
template <int First, int Step, int Second = First + 2 * Step>
TANDEM_INLINE __m512i places() {
  constexpr auto kAt = [](int row, int i) constexpr {
    const int own = i < 2 ? First + i * Step : Second + (i - 2) * Step;
    return static_cast<char>((own + 32 * row + 64) % 64);
  };
  return _mm512_broadcast_i32x4(_mm_setr_epi8(
      kAt(0, 0), kAt(0, 1), kAt(0, 2), kAt(0, 3), kAt(1, 0), kAt(1, 1), kAt(1, 2), kAt(1, 3),
      kAt(0, 0), kAt(0, 1), kAt(0, 2), kAt(0, 3), kAt(1, 0), kAt(1, 1), kAt(1, 2), kAt(1, 3)));
}

constexpr __mmask64 kUpperBytes = 0xCCCCCCCCCCCCCCCCull;  // the third and fourth byte of each dword

// Numbers 4 K .. 4 K + 3 of a field, one byte each in a row's dword; bits above them are undefined.
template <int Base, int Fours, int Step, int Width, int K>
TANDEM_INLINE __m512i four_numbers(const std::uint8_t* words) {
  constexpr int kAt = Base + K * Fours, kWord = kAt / 32, kBit = kAt % 32;
  const __m512i word = _mm512_loadu_si512(words + 64 * kWord);
  if constexpr (kBit == 0 && Step == 8) {
    return word;
  } else if constexpr (kBit + 3 * Step + Width <= 32) {
    return _mm512_multishift_epi64_epi8(places<kBit, Step>(), word);
  } else {  // two numbers are in the next word
    const __m512i offsets = places<kBit, Step, kBit + 2 * Step - 32>();
    const __m512i next = _mm512_loadu_si512(words + 64 * (kWord + 1));
    return _mm512_mask_multishift_epi64_epi8(_mm512_multishift_epi64_epi8(offsets, word),
                                             kUpperBytes, offsets, next);
  }
}

// Looks up 64 bytes in a table of 2^Bits. The index's eighth bit is in `place`, its higher bits are
// in `bits`.
template <int Bits>
TANDEM_INLINE __m512i look_up(const std::uint8_t* table, __m512i place, const __mmask64* bits) {
  if constexpr (Bits == 7) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), place, _mm512_load_si512(table + 64));
  } else {
    constexpr int kHalf = 1 << (Bits - 1);
    return _mm512_mask_blend_epi8(bits[Bits - 8], look_up<Bits - 1>(table, place, bits),
                                  look_up<Bits - 1>(table + kHalf, place, bits));
  }
}

template <Format F>
class GridLookup {
 public:
  TANDEM_INLINE explicit GridLookup(const std::uint8_t* words)
      : words_(words), tables_(grid_tables<F>()) {}

  // Calls function(J, codes) for every four columns of strip S.
  template <int S, typename Function>
  TANDEM_INLINE void strip(const Function& function) const {
    const __m512i signs = signs_of<S>();
    const __m512i numbers = _mm512_load_si512(tables_.numbers);
    constexpr int kFoursOfLines = 8 / kGrid.line_cols;
    each<kFoursOfLines>([&](auto part) TANDEM_INLINED {
      __m512i line[2];
      lines<S * kFoursOfLines + decltype(part)::value>(line);
      each<kFoursOfStrip / kFoursOfLines>([&](auto i) TANDEM_INLINED {
        constexpr int J =
            decltype(part)::value * (kFoursOfStrip / kFoursOfLines) + decltype(i)::value;
        const __m512i magnitudes = magnitudes_of<decltype(i)::value>(line);
        const __m512i sign = _mm512_multishift_epi64_epi8(places<4 * J - kSignBit, 1>(), signs);
        constexpr int kChoose = 0xCA;  // a ? b : c
        const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi8((1 << kSignBit) - 1),
                                                       magnitudes, sign, kChoose);
        function(std::integral_constant<int, J>{}, _mm512_permutexvar_epi8(code, numbers));
      });
    });
  }

  template <int G>
  TANDEM_INLINE __m512 scale() const {
    constexpr int kAt = kGrid.scales.at(G);
    const __m512i word = _mm512_loadu_si512(words_ + 64 * (kAt / 32));
    const __m512i steps = _mm512_and_si512(_mm512_srli_epi32(word, kAt % 32),
                                           _mm512_set1_epi32((1 << kGrid.scales.width) - 1));
    return _mm512_cvtepi32_ps(
        _mm512_add_epi32(_mm512_add_epi32(steps, steps), _mm512_set1_epi32(1)));
  }

  TANDEM_INLINE __m512 factors(const std::uint8_t* factors) const {
    if constexpr (kGrid.factor.width == 0) return load_halves(factors);
    __m512i halves = _mm512_setzero_si512();
    each<4>([&](auto part) TANDEM_INLINED {
      constexpr int kAt = kGrid.factor.at(decltype(part)::value);
      const __m512i word =
          _mm512_srli_epi32(_mm512_loadu_si512(words_ + 64 * (kAt / 32)), kAt % 32);
      const __m512i own = _mm512_and_si512(word, _mm512_set1_epi32(15));
      halves = _mm512_or_si512(halves, _mm512_slli_epi32(own, 4 * decltype(part)::value));
    });
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves));
  }

 private:
  static constexpr const Grid& kGrid = *encoding(F).grid;
  static constexpr int kSignBit = kGrid.line_cols == 8 ? 2 : 3;

  // The signs of eight columns as a byte, four copies per row.
  template <int S>
  TANDEM_INLINE __m512i signs_of() const {
    constexpr BitField f = kGrid.signs;
    const __m512i found = four_numbers<f.base, f.fours, f.step, f.width, S>(words_);
    if constexpr (kGrid.sign_kind() == Signs::kEight) return found;
    if constexpr (kGrid.sign_kind() == Signs::kOne)
      return _mm512_movm_epi8(_mm512_test_epi8_mask(found, _mm512_set1_epi8(1)));
    return look_up<7>(tables_.even_signs, found, nullptr);
  }

  // The low and the high bytes of four lines per row.
  template <int K>
  TANDEM_INLINE void lines(__m512i (&line)[2]) const {
    constexpr BitField low = kGrid.low, high = kGrid.high;
    const __m512i place = four_numbers<low.base, low.fours, low.step, low.width, K>(words_);
    __mmask64 bits[1 + high.width];
    bits[0] = _mm512_movepi8_mask(place);
    if constexpr (high.width > 0) {
      const __m512i above = four_numbers<high.base, high.fours, high.step, high.width, K>(words_);
      each<high.width>([&](auto bit) TANDEM_INLINED {
        bits[1 + bit] = _mm512_test_epi8_mask(above, _mm512_set1_epi8(1 << bit));
      });
    }
    line[0] = look_up<kGrid.index_bits>(tables_.low, place, bits);
    line[1] = look_up<kGrid.index_bits>(tables_.high, place, bits);
  }

  // Numbers of four columns, from the I-th four of these lines; bits above them are undefined.
  template <int I>
  static TANDEM_INLINE __m512i magnitudes_of(const __m512i (&line)[2]) {
    if constexpr (kGrid.line_cols == 8)
      return _mm512_multishift_epi64_epi8(places<8 * (I / 2), 2>(), line[I % 2]);
    const __m512i offsets = places<8 * I, 4, 8 * I>();
    return _mm512_mask_multishift_epi64_epi8(_mm512_multishift_epi64_epi8(offsets, line[0]),
                                             kUpperBytes, offsets, line[1]);
  }

  const std::uint8_t* words_;
  const GridTables<F>& tables_;
};

// The argument of look_up_block().
struct Lookup512 {
  template <Format F>
  static void super(const std::uint8_t* words, const std::uint8_t* factors, std::uint8_t* codes,
                    float* scales) {
    const GridLookup<F> grid(words);
    each<kStripsOfSuper>([&](auto s) TANDEM_INLINED {
      grid.template strip<decltype(s)::value>([&](auto j, __m512i four) TANDEM_INLINED {
        _mm512_store_si512(codes + s * kStripCols * kBlockRows + 64 * j, four);
      });
    });
    const __m512 factor = in_units<F>(grid.factors(factors));
    each<kSuperCols / encoding(F).group>([&](auto g) TANDEM_INLINED {
      _mm512_store_ps(scales + g * kBlockRows,
                      _mm512_mul_ps(grid.template scale<decltype(g)::value>(), factor));
    });
  }
};

// One token: multiplies lines while they are looked up, in the same order as for more tokens.
template <Format F>
void multiply_lines(const PackedMatrix& m, std::int64_t block, const Activations& x,
                    const Output& out) {
  constexpr std::int64_t kWords = code_bytes(F, kSuperCols),
                         kGroups = kSuperCols / encoding(F).group;
  constexpr std::int64_t kFactors = scale_bytes(F, kSuperCols, encoding(F).group);
  constexpr int kParts = kGroupsOfStrip<F>;
  const std::int64_t supers = m.cols / kSuperCols;
  const std::uint8_t* words = m.data + block * supers * kWords;
  const std::uint8_t* factors = m.scales + block * supers * kFactors;
  const std::int8_t* q = x.quantized;
  const std::int32_t* x_sums = x.sums;
  const float* x_scales = x.scales;
  __m512 total = _mm512_setzero_ps();
  for (std::int64_t s = 0; s < supers;
       ++s, q += kSuperCols, x_sums += kGroups, x_scales += kGroups) {
    const GridLookup<F> grid(words);
    const __m512 factor = in_units<F>(grid.factors(factors));
    _mm_prefetch(reinterpret_cast<const char*>(factors + kFactorsAhead), _MM_HINT_T0);
    each<kStripsOfSuper>([&](auto strip) TANDEM_INLINED {
      constexpr int S = decltype(strip)::value;
      constexpr int kLines = kWords / 64, kFirst = S * kLines / kStripsOfSuper;
      each<(S + 1) * kLines / kStripsOfSuper - kFirst>([&](auto line) TANDEM_INLINED {
        const std::uint8_t* at = words + 64 * (kFirst + line);
        prefetch(at, kLinesAhead);
        _mm_prefetch(reinterpret_cast<const char*>(at + kLinesNear), _MM_HINT_T0);
      });
      __m512i sums[kParts];
      each<kParts>([&](auto part) TANDEM_INLINED {
        sums[part] = _mm512_set1_epi32(x_sums[S * kParts + part]);
      });
      grid.template strip<S>([&](auto j, __m512i four) TANDEM_INLINED {
        constexpr int kPart = decltype(j)::value * kParts / kFoursOfStrip;
        sums[kPart] = multiply_add_int8(sums[kPart], four, broadcast4(q + S * kStripCols + 4 * j));
      });
      each<kParts>([&](auto part) TANDEM_INLINED {
        constexpr int G = S * kParts + decltype(part)::value;
        const SumScale<F> scale(_mm512_mul_ps(grid.template scale<G>(), factor));
        total = _mm512_fmadd_ps(scale.times(sums[part]), _mm512_set1_ps(x_scales[G]), total);
      });
    });
    words += kWords;
    factors += kFactors;
  }
  out.store(0, total);
}

inline void multiply_one_token(const PackedMatrix& m, std::int64_t begin, std::int64_t end,
                               const Activations& x, std::int64_t num_rows, float* out) {
  end = std::min(end, (num_rows + kBlockRows - 1) / kBlockRows);
  each<kNumFormats>([&](auto number) {
    constexpr Format F = static_cast<Format>(decltype(number)::value);
    if constexpr (is_grid(F))
      if (m.format == F)
        for (std::int64_t b = begin; b < end; ++b)
          multiply_lines<F>(m, b, x, Output::of(m, b, num_rows, out, 0));
  });
}

}  // namespace
}  // namespace tandem
