// Looks up lines of a grid with 512-bit registers, 64 lines at a time. Tables in registers give the
// two bytes of each line. Included like weights.hpp.
#pragma once

#include <algorithm>
#include <bit>

#include "../grid_product.hpp"
#include "few_tokens.hpp"

namespace tandem {
namespace {

// The low and the high bytes of a grid's lines; the eight signs for each value of seven; and what a
// register looks up in 64 bytes by six bits, of which it may use fewer.
template <Format F>
struct GridTables {
  static constexpr const Grid& kGrid = *encoding(F).grid;
  static constexpr int kLines = 1 << kGrid.index_bits;

  alignas(64) std::uint8_t low[kLines], high[kLines];
  alignas(64) std::uint8_t even_signs[128];
  // Lines of four columns: the number with this sign in bit 3; and two of four signs in bits 3, 7.
  alignas(64) std::uint8_t signed_numbers[64], spread_signs[2][64];
  // Lines of eight columns: the numbers of two columns with signs in bits 4 and 5.
  alignas(64) std::uint8_t of_pair[2][64];

  GridTables() {
    for (int i = 0; i < kLines; ++i) {
      low[i] = static_cast<std::uint8_t>(kGrid.lines[i] & 255);
      high[i] = static_cast<std::uint8_t>(kGrid.lines[i] >> 8);
    }
    for (unsigned i = 0; i < 128; ++i)
      even_signs[i] = static_cast<std::uint8_t>(i | (std::popcount(i) & 1u) << 7);
    for (unsigned i = 0; i < 64; ++i)
      kGrid.line_cols == 4 ? fill_lines_of_four(i) : fill_lines_of_eight(i);
  }

 private:
  static constexpr const std::uint8_t* kNumbers = encoding(F).table;

  void fill_lines_of_four(unsigned i) {
    signed_numbers[i] = kNumbers[i % 16];
    for (unsigned pair = 0; pair < 2; ++pair) {
      const unsigned signs = i >> 2 * pair;
      spread_signs[pair][i] = static_cast<std::uint8_t>((signs & 1) << 3 | (signs >> 1 & 1) << 7);
    }
  }

  void fill_lines_of_eight(unsigned i) {
    for (unsigned pair = 0; pair < 2; ++pair)
      of_pair[pair][i] = kNumbers[(i >> 2 * pair & 3) | (i >> (4 + pair) & 1) << 2];
  }
};

// Built at first use, because only then it is certain that the processor has these registers.
template <Format F>
const GridTables<F>& grid_tables() {
  static const GridTables<F> tables;
  return tables;
}

// Bit offsets for multishift() in a pair of rows, from those of a row's four bytes in its dword.
template <int A, int B, int C, int D>
TANDEM_INLINE __m512i offsets() {
  constexpr auto kAt = [](int bit) constexpr { return static_cast<char>((bit + 64) % 64); };
  return _mm512_broadcast_i32x4(_mm_setr_epi8(
      kAt(A), kAt(B), kAt(C), kAt(D), kAt(A + 32), kAt(B + 32), kAt(C + 32), kAt(D + 32), kAt(A),
      kAt(B), kAt(C), kAt(D), kAt(A + 32), kAt(B + 32), kAt(C + 32), kAt(D + 32)));
}

constexpr __mmask64 kUpperBytes = 0xCCCCCCCCCCCCCCCCull;  // the third and fourth byte of each dword
constexpr __mmask64 kOddBytes = 0xAAAAAAAAAAAAAAAAull;

// Numbers 4 K .. 4 K + 3 of a field, one byte each in a row's dword; the second and the third change
// places if `IsSwapped`. Bits above them are undefined.
template <int Base, int Fours, int Step, int Width, int K, bool IsSwapped>
TANDEM_INLINE __m512i four_numbers(const std::uint8_t* words) {
  constexpr int kAt = Base + K * Fours, kWord = kAt / 32, kBit = kAt % 32;
  constexpr bool kIsOneWord = kBit + 3 * Step + Width <= 32;  // else two are in the next word
  constexpr int kSecond = kBit + Step, kThird = kBit + 2 * Step - (kIsOneWord ? 0 : 32);
  constexpr int kFourth = kThird + Step;
  const __m512i word = _mm512_loadu_si512(words + 64 * kWord);
  if constexpr (kBit == 0 && Step == 8 && !IsSwapped) return word;
  const __m512i at = IsSwapped ? offsets<kBit, kThird, kSecond, kFourth>()
                               : offsets<kBit, kSecond, kThird, kFourth>();
  const __m512i numbers = _mm512_multishift_epi64_epi8(at, word);
  if constexpr (kIsOneWord) return numbers;
  const __m512i next = _mm512_loadu_si512(words + 64 * (kWord + 1));
  return _mm512_mask_multishift_epi64_epi8(numbers, IsSwapped ? kOddBytes : kUpperBytes, at, next);
}

// Bytes whose index has all bits of a number, for each number of `Bits` bits but 0.
template <int Bits>
struct IndexMasks {
  __mmask64 of[1 << Bits];

  template <int Bit>
  TANDEM_INLINE void set(__mmask64 mask) {
    of[1 << Bit] = mask;
    each<(1 << Bit) - 1>([&](auto i) TANDEM_INLINED {
      constexpr int kLower = 1 + decltype(i)::value;
      of[(1 << Bit) + kLower] = _kand_mask64(mask, of[kLower]);
    });
  }
};

// Looks up 64 bytes in a table of 64 << Bits, by six bits of `place` and those of the masks. Each
// part of the table overwrites what parts before it gave for the same bytes: that is one operation
// on Intel's, where a table of 128 bytes takes three.
template <int Bits>
TANDEM_INLINE __m512i look_up(const std::uint8_t* table, __m512i place,
                              const IndexMasks<Bits>& masks) {
  __m512i found = _mm512_permutexvar_epi8(place, _mm512_load_si512(table));
  each<(1 << Bits) - 1>([&](auto i) TANDEM_INLINED {
    constexpr int kPart = 1 + decltype(i)::value;
    found = _mm512_mask_permutexvar_epi8(found, masks.of[kPart], place,
                                         _mm512_load_si512(table + 64 * kPart));
  });
  return found;
}

template <Format F>
class GridLookup {
 public:
  TANDEM_INLINE explicit GridLookup(const std::uint8_t* words)
      : words_(words), tables_(grid_tables<F>()) {}

  // Calls function(J, codes) for every four columns of strip S, in the order of in_grid_order():
  // number i of each byte of lines is in the same register, which no shuffle has to sort.
  template <int S, typename Function>
  TANDEM_INLINE void strip(const Function& function) const {
    const __m512i signs = signs_of<S>();
    __m512i line[2];
    if constexpr (kGrid.line_cols == 8) lines<S>(line);
    each<2>([&](auto part) TANDEM_INLINED {
      constexpr int kPart = decltype(part)::value, kFirst = 16 * kPart;
      if constexpr (kGrid.line_cols == 4) lines<2 * S + kPart>(line);
      const __m512i four_signs = _mm512_multishift_epi64_epi8(
          offsets<kFirst, kFirst + 4, kFirst + 8, kFirst + 12>(), signs);
      each<2>([&](auto pair) TANDEM_INLINED {
        constexpr int kPair = decltype(pair)::value, kFour = 4 * kPart + 2 * kPair;
        __m512i codes[2];
        if constexpr (kGrid.line_cols == 4)
          signed_numbers<kPair>(line[kPair], four_signs, codes);
        else
          signed_pairs<kPair>(bytes_of_part<kPart>(line), four_signs, codes);
        function(std::integral_constant<int, kFour>{}, codes[0]);
        function(std::integral_constant<int, kFour + 1>{}, codes[1]);
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
  // By so many bits, with the six of a register's table, masks look up; a blend joins halves above.
  static constexpr int kMaskBits = std::min(kGrid.index_bits, 9) - 6;

  // The signs of eight columns as a byte, four copies per row.
  template <int S>
  TANDEM_INLINE __m512i signs_of() const {
    constexpr BitField f = kGrid.signs;
    const __m512i found = four_numbers<f.base, f.fours, f.step, f.width, S, false>(words_);
    if constexpr (kGrid.sign_kind() == Signs::kEight) return found;
    if constexpr (kGrid.sign_kind() == Signs::kOne)
      return _mm512_movm_epi8(_mm512_test_epi8_mask(found, _mm512_set1_epi8(1)));
    return _mm512_permutex2var_epi8(_mm512_load_si512(tables_.even_signs), found,
                                    _mm512_load_si512(tables_.even_signs + 64));
  }

  // The low and the high bytes of four lines per row; lines of eight columns as the first, third,
  // second and fourth.
  template <int K>
  TANDEM_INLINE void lines(__m512i (&line)[2]) const {
    constexpr BitField low = kGrid.low, high = kGrid.high;
    constexpr bool kIsSwapped = kGrid.line_cols == 8;
    const __m512i place =
        four_numbers<low.base, low.fours, low.step, low.width, K, kIsSwapped>(words_);
    IndexMasks<kMaskBits> masks;
    masks.template set<0>(_mm512_movepi8_mask(_mm512_slli_epi16(place, 1)));
    masks.template set<1>(_mm512_movepi8_mask(place));
    __m512i above = place;
    if constexpr (high.width > 0) {
      above = four_numbers<high.base, high.fours, high.step, high.width, K, kIsSwapped>(words_);
      masks.template set<2>(_mm512_test_epi8_mask(above, _mm512_set1_epi8(1)));
    }
    line[0] = line_bytes<kGrid.index_bits>(tables_.low, place, above, masks);
    line[1] = line_bytes<kGrid.index_bits>(tables_.high, place, above, masks);
  }

  // Looks up in a table of 2^Bits; bits of the index from the ninth on are in `above`.
  template <int Bits>
  static TANDEM_INLINE __m512i line_bytes(const std::uint8_t* table, __m512i place, __m512i above,
                                          const IndexMasks<kMaskBits>& masks) {
    if constexpr (Bits == kMaskBits + 6) {
      return look_up(table, place, masks);
    } else {
      constexpr int kHalf = 1 << (Bits - 1);
      const __m512i low = line_bytes<Bits - 1>(table, place, above, masks);
      const __m512i high = line_bytes<Bits - 1>(table + kHalf, place, above, masks);
      const __mmask64 is_high = _mm512_test_epi8_mask(above, _mm512_set1_epi8(1 << (Bits - 9)));
      return _mm512_mask_blend_epi8(is_high, low, high);
    }
  }

  // The bits of `Mask` in each byte of `a`, the others of `b`.
  template <int Mask>
  static TANDEM_INLINE __m512i either(__m512i a, __m512i b) {
    constexpr int kChoose = 0xCA;  // the first ? the second : the third
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(Mask), a, b, kChoose);
  }

  // Bytes of lines of eight columns: in 16 columns two lines, the low and the high byte in turns.
  template <int Part>
  static TANDEM_INLINE __m512i bytes_of_part(const __m512i (&line)[2]) {
    if constexpr (Part == 0)
      return _mm512_mask_blend_epi8(kOddBytes, line[0], _mm512_slli_epi16(line[1], 8));
    return _mm512_mask_blend_epi8(kOddBytes, _mm512_srli_epi16(line[0], 8), line[1]);
  }

  // Numbers 0 and 1, or 2 and 3, of each byte, with signs 2 Pair and 2 Pair + 1 of its four.
  template <int Pair>
  TANDEM_INLINE void signed_pairs(__m512i bytes, __m512i signs, __m512i (&codes)[2]) const {
    if constexpr (Pair == 1) bytes = _mm512_srli_epi16(bytes, 4);
    const __m512i both = either<0x0F>(bytes, _mm512_slli_epi16(signs, 4 - 2 * Pair));
    codes[0] = _mm512_permutexvar_epi8(both, _mm512_load_si512(tables_.of_pair[0]));
    codes[1] = _mm512_permutexvar_epi8(both, _mm512_load_si512(tables_.of_pair[1]));
  }

  // The two numbers of each byte of lines of four columns, with these signs of its line's four.
  template <int Pair>
  TANDEM_INLINE void signed_numbers(__m512i bytes, __m512i signs, __m512i (&codes)[2]) const {
    const __m512i numbers = _mm512_load_si512(tables_.signed_numbers);
    const __m512i spread =
        _mm512_permutexvar_epi8(signs, _mm512_load_si512(tables_.spread_signs[Pair]));
    const __m512i both = either<0x77>(bytes, spread);
    codes[0] = _mm512_permutexvar_epi8(both, numbers);
    codes[1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(both, 4), numbers);
  }

  const std::uint8_t* words_;
  const GridTables<F>& tables_;
};

// Puts 16 quantised columns in the order in which lookups find them: every fourth from the first on,
// then every fourth from the second on, and so forth.
TANDEM_INLINE __m128i in_grid_order(__m128i columns) {
  return _mm_shuffle_epi8(columns,
                          _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
}

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
      __m512i sums[2];  // two groups, or every second four of one: a chain is slower
      sums[0] = _mm512_set1_epi32(x_sums[S * kParts]);
      sums[1] = kParts == 1 ? _mm512_setzero_si512() : _mm512_set1_epi32(x_sums[S * kParts + 1]);
      grid.template strip<S>([&](auto j, __m512i four) TANDEM_INLINED {
        constexpr int J = decltype(j)::value, kSum = kParts == 1 ? J % 2 : J * 2 / kFoursOfStrip;
        sums[kSum] = multiply_add_int8(sums[kSum], four, broadcast4(q + S * kStripCols + 4 * J));
      });
      if constexpr (kParts == 1) sums[0] = _mm512_add_epi32(sums[0], sums[1]);
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
