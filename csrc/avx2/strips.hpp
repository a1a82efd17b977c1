// Multiplies strips (32 columns of a block's 16 rows) by int8 activations, in integers. `Dot`
// defines how four bytes are multiplied and added:
//
//   kIs16Bit  whether `add` sums pairs into 16 bits. These hold at most 8 products of codes up to
//             15, 4 of codes up to 31 or 2 of codes up to 63, with activations of -127..127
//   add(part, codes, x)  part plus products of unsigned codes and signed activations
//   flush(sum, part)     sum (32 bits) plus part
//
// Larger codes do not fit 16-bit sums. They are multiplied as 16-bit words, whose pairs are summed
// into 32 bits: first the even columns of four, then the odd ones.
#pragma once

#include <type_traits>

#include "../codes.hpp"
#include "ahead.hpp"
#include "output.hpp"

namespace tandem {
namespace {

// Unpacks codes, see codes.hpp.
struct Bytes32 {
  using Register = __m256i;

  // The barrier keeps the load here. GCC would otherwise load again for each use, in another order
  // of cache lines.
  static __m256i load(const std::uint8_t* data) {
    __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
    __asm__ volatile("" : "+x"(bytes));
    return bytes;
  }
  template <int Bits>
  static __m256i shift_left(__m256i bytes) {
    return _mm256_slli_epi16(bytes, Bits);
  }
  template <int Bits>
  static __m256i shift_right(__m256i bytes) {
    return _mm256_srli_epi16(bytes, Bits);
  }
  static __m256i keep(__m256i bytes, std::uint8_t bits) {
    return _mm256_and_si256(bytes, _mm256_set1_epi8(static_cast<char>(bits)));
  }
  static __m256i either(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
  static __m256i look_up(const std::uint8_t* table, __m256i bytes) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), bytes);
  }
};

// How many products of four columns a 16-bit sum holds, as a power of two.
constexpr int most_products(int largest) { return largest <= 15 ? 8 : largest <= 31 ? 4 : 2; }

// Whether codes and activations are multiplied as 16-bit words.
template <class Dot, Format F>
constexpr bool kIsWide =
    Dot::kIs16Bit && (encoding(F).largest > 63 || most_products(encoding(F).largest) <
                                                      kFoursOfStrip / kGroupsOfStrip<F> / 2);

template <class Dot, Format F>
constexpr int kMostProducts = Dot::kIs16Bit ? most_products(encoding(F).largest) : 8;

// Bytes of a decoded strip. 64 bytes hold four columns of the 16 rows. Words have one plane for the
// even columns and one for the odd ones.
template <class Dot, Format F>
constexpr std::int64_t kPanelStripBytes = kIsWide<Dot, F> ? 1024 : 512;

template <class Dot, Format F>
using Value = std::conditional_t<kIsWide<Dot, F>, std::int16_t, std::int8_t>;

// Quantised activations at the current strips, of a tile's first token on. Of each four
// words, the order is 0 2 1 3.
template <class Dot, Format F>
struct Inputs {
  const Value<Dot, F>* at;
  std::int64_t stride;  // from token to token

  Inputs from(std::int64_t column) const { return {at + column, stride}; }
  Inputs token(std::int64_t t) const { return {at + t * stride, stride}; }

  // Broadcasts four bytes: four columns, or two if they are words.
  __m256i broadcast(int t, int column) const {
    std::int32_t four;
    std::memcpy(&four, at + t * stride + column, sizeof four);
    return _mm256_set1_epi32(four);
  }
};

template <int T>
using Sums = __m256i[T][kHalves];

inline __m256i even_words(__m256i codes) { return _mm256_and_si256(codes, _mm256_set1_epi16(255)); }

inline __m256i odd_words(__m256i codes) { return _mm256_srli_epi16(codes, 8); }

inline __m256i add_words(__m256i sum, __m256i codes, __m256i x) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes, x));
  __asm__("" : "+x"(sum));  // see Maddubs::add
  return sum;
}

// Decodes one strip into a panel.
template <class Dot, Format F>
void fill_panel(const std::uint8_t* strip, std::uint8_t* panel) {
  const auto store = [&](std::int64_t offset, __m256i codes) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(panel + offset), codes);
  };
  each<kFoursOfStrip>([&](auto j) TANDEM_INLINED {
    for (int h = 0; h < kHalves; ++h) {
      const __m256i w = codes_of<Bytes32, F, decltype(j)::value>(strip + 32 * h);
      store(64 * j + 32 * h, kIsWide<Dot, F> ? even_words(w) : w);
      if constexpr (kIsWide<Dot, F>) store(512 + 64 * j + 32 * h, odd_words(w));
    }
  });
}

// Multiplies codes of both halves by four bytes of T tokens' activations, which begin at `column`,
// and adds the products.
template <class Dot, Format F, int T>
TANDEM_INLINE void add_columns(const __m256i (&codes)[kHalves], const Inputs<Dot, F>& x, int column,
                               Sums<T>& sums) {
#pragma GCC unroll 4
  for (int t = 0; t < T; ++t) {
    const __m256i value = x.broadcast(t, column);
    for (int h = 0; h < kHalves; ++h)
      sums[t][h] = kIsWide<Dot, F> ? add_words(sums[t][h], codes[h], value)
                                   : Dot::add(sums[t][h], codes[h], value);
  }
}

// Turns stored codes into those that are multiplied.
template <Format F>
TANDEM_INLINE __m256i decoded(__m256i stored) {
  if constexpr (encoding(F).table != nullptr) return Bytes32::look_up(encoding(F).table, stored);
  return stored;
}

// How many fours of columns share a register of codes.
template <Format F>
constexpr int kFoursTogether = kBits<F> == 4 ? 2 : 1;

// Adds the J-th four columns of a strip that is decoded in a panel.
template <class Dot, Format F, int J, int T>
TANDEM_INLINE void add_cached(const std::uint8_t* strip, const Inputs<Dot, F>& x, Sums<T>& sums) {
  for (int part = 0; part <= kIsWide<Dot, F>; ++part) {
    const auto* at = reinterpret_cast<const __m256i*>(strip + 512 * part + 64 * J);
    const __m256i codes[kHalves] = {_mm256_load_si256(at), _mm256_load_si256(at + 1)};
    add_columns(codes, x, 4 * J + 2 * part, sums);
  }
}

// Adds the J-th four columns of a strip, and the next ones that share their register.
template <class Dot, Format F, int J, int T>
TANDEM_INLINE void add_streamed(const std::uint8_t* strip, const Inputs<Dot, F>& x, Sums<T>& sums) {
  constexpr int kCount = kFoursTogether<F>;
  constexpr std::int64_t kLines = kStripBytes<F> / 64;
  for (std::int64_t i = J * kLines / kFoursOfStrip; i < (J + kCount) * kLines / kFoursOfStrip; ++i)
    fetch_stream(strip + 64 * i);
  __m256i codes[kCount][kHalves];
  for (int h = 0; h < kHalves; ++h)
    if constexpr (kCount == 1) {
      codes[0][h] = codes_of<Bytes32, F, J>(strip + 32 * h);
    } else {
      const __m256i bytes = Bytes32::load(strip + 64 * (J / 2) + 32 * h);
      codes[0][h] = decoded<F>(Bytes32::keep(bytes, 15));
      codes[1][h] = decoded<F>(Bytes32::keep(Bytes32::shift_right<4>(bytes), 15));
    }
  each<kCount>([&](auto i) TANDEM_INLINED {
    constexpr int kColumn = 4 * (J + decltype(i)::value);
    const __m256i (&own)[kHalves] = codes[decltype(i)::value];
    if constexpr (kIsWide<Dot, F>) {
      const __m256i even[kHalves] = {even_words(own[0]), even_words(own[1])};
      const __m256i odd[kHalves] = {odd_words(own[0]), odd_words(own[1])};
      add_columns(even, x, kColumn, sums);
      add_columns(odd, x, kColumn + 2, sums);
    } else {
      add_columns(own, x, kColumn, sums);
    }
  });
}

// Multiplies group `Part` of a strip (all of it, if it has one group) by T tokens and adds the
// products.
template <class Dot, Format F, bool IsCached, int Part, int T>
TANDEM_INLINE void add_strip(const std::uint8_t* strip, const Inputs<Dot, F>& x, Sums<T>& sums) {
  constexpr int kCount = kFoursOfStrip / kGroupsOfStrip<F>;
  constexpr int kSteps =
      kIsWide<Dot, F> || kMostProducts<Dot, F> > kCount ? kCount : kMostProducts<Dot, F>;
  each<kCount / kSteps>([&](auto start) TANDEM_INLINED {
    constexpr int kFirst = Part * kCount + decltype(start)::value * kSteps;
    Sums<T> parts;
    for (int t = 0; t < T; ++t)
      for (int h = 0; h < kHalves; ++h)
        parts[t][h] = kIsWide<Dot, F> ? sums[t][h] : _mm256_setzero_si256();
    constexpr int kTogether = IsCached ? 1 : kFoursTogether<F>;
    each<kSteps / kTogether>([&](auto i) TANDEM_INLINED {
      constexpr int kFour = kFirst + kTogether * decltype(i)::value;
      if constexpr (IsCached) add_cached<Dot, F, kFour>(strip, x, parts);
      else add_streamed<Dot, F, kFour>(strip, x, parts);
    });
    for (int t = 0; t < T; ++t)
      for (int h = 0; h < kHalves; ++h)
        sums[t][h] = kIsWide<Dot, F> ? parts[t][h] : Dot::flush(sums[t][h], parts[t][h]);
  });
}

}  // namespace
}  // namespace tandem
