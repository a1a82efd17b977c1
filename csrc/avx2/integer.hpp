// Integer formats on 256-bit registers. `Dot` says how four bytes are multiplied and added:
//
//   kIs16Bit  whether `add` sums pairs into 16 bits, which hold no more than 8 products of codes up
//             to 15, 4 of codes up to 31 or 2 of codes up to 63, with activations of -127..127
//   add(part, codes, x)  part plus products of unsigned codes with signed activations
//   flush(sum, part)     sum (32 bits) plus part
//
// Columns come in strips of 32. Larger codes than 16-bit parts have room for are multiplied as words
// of 16 bits, of which pairs are summed into 32: the even columns of four, then the odd ones.
#pragma once

#include <type_traits>

#include "../codes.hpp"
#include "output.hpp"
#include "scales.hpp"

namespace tandem {
namespace {

// How codes are taken apart, see codes.hpp.
struct Bytes32 {
  using Register = __m256i;

  static __m256i load(const std::uint8_t* data) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
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

// Products of four columns that a 16-bit part holds, as a power of two.
constexpr int most_products(int largest) { return largest <= 15 ? 8 : largest <= 31 ? 4 : 2; }

// Whether codes and activations are multiplied as words of 16 bits.
template <class Dot, Format F>
constexpr bool kIsWide =
    Dot::kIs16Bit && (encoding(F).largest > 63 || most_products(encoding(F).largest) <
                                                      kFoursOfStrip / kGroupsOfStrip<F> / 2);

template <class Dot, Format F>
constexpr int kMostProducts = Dot::kIs16Bit ? most_products(encoding(F).largest) : 8;

// As bytes in a panel: 64 hold four columns of the 16 rows; words have a plane of the even columns
// and one of the odd ones.
template <class Dot, Format F>
constexpr std::int64_t kPanelStripBytes = kIsWide<Dot, F> ? 1024 : 512;

template <class Dot, Format F>
using Value = std::conditional_t<kIsWide<Dot, F>, std::int16_t, std::int8_t>;

// Quantised activations of a tile's first token, those that belong to the strips at hand; of words,
// each four are in the order 0 2 1 3.
template <class Dot, Format F>
struct Inputs {
  const Value<Dot, F>* at;
  std::int64_t stride;  // from token to token

  Inputs from(std::int64_t column) const { return {at + column, stride}; }
  Inputs token(std::int64_t t) const { return {at + t * stride, stride}; }

  // Four bytes, four columns or two, in all lanes.
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

// Bytes to words, each four in the order 0 2 1 3; `count` is a multiple of 16.
inline void widen(const std::int8_t* from, std::int64_t count, std::int16_t* to) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                         0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  for (std::int64_t i = 0; i < count; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + i),
                       _mm256_shuffle_epi8(_mm256_cvtepi8_epi16(bytes), order));
  }
}

// The hardware follows a stream to the end of its page only. One token asks for it into the second
// cache, as lines on their way to the first have few places; several tokens lose by that, and so
// does what takes longer to decode.
constexpr std::int64_t kAheadBytes = 4096;
template <Format F, int T>
constexpr _mm_hint kHint = T == 1 && !has_supers(F) ? _MM_HINT_T1 : _MM_HINT_T0;

// What a product reads: strips of codes, which lie in memory or decoded in a panel, and there the
// scales of their groups as floats, each group's 16 followed by its minima.
struct Strips {
  const std::uint8_t* codes;
  const float* scales;
};

template <Format F>
constexpr std::int64_t kFloatsOfGroup = kHasMinima<F> ? 32 : 16;

// Turns the scales of one group into a panel's floats.
template <Format F>
void fill_scales(const PackedMatrix& m, std::int64_t block, std::int64_t g, float* panel) {
  const std::int64_t index = block * (m.cols / m.group) + g;
  for (int h = 0; h < kHalves; ++h) {
    _mm256_store_ps(panel + 8 * h, load_scales<F>(m, block, index, h));
    if constexpr (kHasMinima<F>)
      _mm256_store_ps(panel + 16 + 8 * h, load_minima<F>(m, index, h));
  }
}

// Turns one strip into a panel's bytes.
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

// Adds codes of both halves times four bytes of T tokens' activations, `column` being their first.
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

// Adds the J-th four columns of a strip, which lies in memory or decoded in a panel.
template <class Dot, Format F, bool IsCached, int J, int T>
TANDEM_INLINE void add_four(const std::uint8_t* strip, const Inputs<Dot, F>& x, Sums<T>& sums) {
  __m256i codes[kHalves];
  __m256i odd[kHalves];
  for (int h = 0; h < kHalves; ++h) {
    const std::uint8_t* at = strip + 32 * h;
    codes[h] = IsCached ? Bytes32::load(at + 64 * J) : codes_of<Bytes32, F, J>(at);
    if constexpr (!kIsWide<Dot, F>) continue;
    odd[h] = IsCached ? Bytes32::load(at + 512 + 64 * J) : odd_words(codes[h]);
    if constexpr (!IsCached) codes[h] = even_words(codes[h]);
  }
  add_columns(codes, x, 4 * J, sums);
  if constexpr (kIsWide<Dot, F>) add_columns(odd, x, 4 * J + 2, sums);
}

// Adds group `Part` of a strip (all of it, if it holds one) times T tokens.
template <class Dot, Format F, bool IsCached, int Part, int T>
TANDEM_INLINE void add_strip(const std::uint8_t* strip, const Inputs<Dot, F>& x, Sums<T>& sums) {
  constexpr int kCount = kFoursOfStrip / kGroupsOfStrip<F>;
  constexpr int kSteps =
      kIsWide<Dot, F> || kMostProducts<Dot, F> > kCount ? kCount : kMostProducts<Dot, F>;
  if constexpr (!IsCached && Part == 0)
    for (int i = 0; i < kStripBytes<F> / 64; ++i)
      _mm_prefetch(reinterpret_cast<const char*>(strip + 64 * i + kAheadBytes), kHint<F, T>);
  each<kCount / kSteps>([&](auto start) TANDEM_INLINED {
    constexpr int kFirst = Part * kCount + decltype(start)::value * kSteps;
    Sums<T> parts;
    for (int t = 0; t < T; ++t)
      for (int h = 0; h < kHalves; ++h)
        parts[t][h] = kIsWide<Dot, F> ? sums[t][h] : _mm256_setzero_si256();
    each<kSteps>([&](auto i) TANDEM_INLINED {
      add_four<Dot, F, IsCached, kFirst + decltype(i)::value>(strip, x, parts);
    });
    for (int t = 0; t < T; ++t)
      for (int h = 0; h < kHalves; ++h)
        sums[t][h] = kIsWide<Dot, F> ? parts[t][h] : Dot::flush(sums[t][h], parts[t][h]);
  });
}

// Columns that are multiplied before anything is scaled, or a strip that holds several such groups.
template <Format F>
std::int64_t span_of(const PackedMatrix& m) {
  return kGroupsOfStrip<F> > 1 ? kStripCols : m.group;
}

// Adds the products of one group, whose columns lie in `strips`, with `inputs` to `total`; `g` is its
// number in a row, and `Part` that in its strip.
template <class Dot, Format F, bool IsCached, int Part, int T>
void add_group(const Product& p, std::int64_t block, std::int64_t token, std::int64_t g,
               Strips strips, const Inputs<Dot, F>& inputs, Totals<T>& total) {
  const Activations& x = p.x;
  const std::int64_t span = span_of<F>(p.m);
  const std::int64_t index = block * (p.m.cols / p.m.group) + g;
  const float* x_scales = x.scales + token * x.group_stride + g;
  const std::int32_t* x_sums = x.sums + token * x.group_stride + g;
  Sums<T> sums;
  for (int t = 0; t < T; ++t)
    for (__m256i& sum : sums[t])
      sum = _mm256_set1_epi32(kHasMinima<F> ? kSumStart : x_sums[t * x.group_stride]);
  for (std::int64_t k = 0; k < span; k += kStripCols) {
    add_strip<Dot, F, IsCached, Part>(strips.codes, inputs.from(k), sums);
    strips.codes += IsCached ? kPanelStripBytes<Dot, F> : kStripBytes<F>;
  }
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) {
    const SumScale<F> scales(IsCached ? _mm256_load_ps(strips.scales + 8 * h)
                                      : load_scales<F>(p.m, block, index, h));
    [[maybe_unused]] __m256 minima;
    if constexpr (kHasMinima<F>)
      minima = IsCached ? _mm256_load_ps(strips.scales + 16 + 8 * h)
                        : load_minima<F>(p.m, index, h);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const __m256 x_scale = _mm256_set1_ps(x_scales[t * x.group_stride]);
      total[t][h] = _mm256_fmadd_ps(scales.times(sums[t][h]), x_scale, total[t][h]);
      if constexpr (kHasMinima<F>) {
        const __m256 x_sum = _mm256_set1_ps(x.scaled_sum((token + t) * x.group_stride + g));
        total[t][h] = _mm256_fmadd_ps(minima, x_sum, total[t][h]);
      }
    }
  }
}

// One block times T tokens, for spans first_span..first_span+num_spans-1, whose strips follow each
// other from `strips` on: in memory, or decoded in a panel. `inputs` are those of the first column.
template <class Dot, Format F, bool IsCached, int T>
void integer_tile(const Product& p, std::int64_t block, std::int64_t token,
                  std::int64_t first_span, std::int64_t num_spans, Strips strips,
                  Inputs<Dot, F> inputs, const Output& out) {
  constexpr int kParts = kGroupsOfStrip<F>;
  constexpr std::int64_t kBytes = IsCached ? kPanelStripBytes<Dot, F> : kStripBytes<F>;
  const std::int64_t span_bytes = span_of<F>(p.m) / kStripCols * kBytes;
  Totals<T> total;
  out.load<T>(total);
  for (std::int64_t s = first_span; s < first_span + num_spans; ++s) {
    each<kParts>([&](auto part) TANDEM_INLINED {
      constexpr int kPart = decltype(part)::value;
      add_group<Dot, F, IsCached, kPart, T>(p, block, token, s * kParts + kPart, strips, inputs,
                                            total);
      if constexpr (IsCached) strips.scales += kFloatsOfGroup<F>;
    });
    strips.codes += span_bytes;
    inputs = inputs.from(span_of<F>(p.m));
  }
  out.store<T>(total);
}

// Up to here filling a panel costs more than it saves (Zen 4: with 8 tokens both take as long).
constexpr std::int64_t kMostStreamed = 4;

// The activations of up to `Tokens` tokens in up to `Cols` columns: as they are, or as words.
template <class Dot, Format F, std::int64_t Tokens, std::int64_t Cols>
class InputPanel {
 public:
  Inputs<Dot, F> fill(const Activations& x, std::int64_t token, std::int64_t num_tokens,
                      std::int64_t column, std::int64_t cols) {
    const std::int8_t* from = x.quantized + token * x.stride + column;
    if constexpr (kIsWide<Dot, F>) {
      for (std::int64_t t = 0; t < num_tokens; ++t) widen(from + t * x.stride, cols, words_[t]);
      return {words_[0], Cols};
    } else {
      return {from, x.stride};
    }
  }

 private:
  alignas(32) std::int16_t words_[kIsWide<Dot, F> ? Tokens : 1][Cols];
};

// Multiplies weights on their way through. Columns come in parts, for each of which the activations
// are widened once.
template <class Dot, Format F>
void few_tokens(const Product& p, std::int64_t begin, std::int64_t end, std::int64_t num_tokens) {
  constexpr std::int64_t kCols = 4096;
  InputPanel<Dot, F, kMostStreamed, kCols> panel;
  const std::int64_t span = span_of<F>(p.m), spans = p.m.cols / span;
  const std::int64_t most = kIsWide<Dot, F> && span <= kCols ? kCols / span : spans;
  for (std::int64_t s = 0; s < spans; s += most) {
    const std::int64_t width = smaller(most, spans - s);
    const auto x = panel.fill(p.x, 0, num_tokens, s * span, width * span);
    for (std::int64_t b = begin; b < end; ++b) {
      const std::uint8_t* data = p.m.data + code_bytes(F, b * p.m.cols + s * span);
      const Output out = p.block(b, s == 0, s + width == spans);
      in_tiles<kStreamedTile>(num_tokens, [&]<int T>(std::int64_t t) {
        integer_tile<Dot, F, false, T>(p, b, t, s, width, {data, nullptr}, x.token(t),
                                       out.token(t));
      });
    }
  }
}

// Decodes a part of a block once for a batch of tokens; part and activations stay in the first cache.
template <class Dot, Format F>
void many_tokens(const Product& p, std::int64_t begin, std::int64_t end, std::int64_t num_tokens) {
  constexpr int kTile = 4, kParts = kGroupsOfStrip<F>;
  constexpr std::int64_t kBatch = 64, kBytes = kPanelStripBytes<Dot, F>, kPanelBytes = 8192;
  alignas(64) std::uint8_t panel[kPanelBytes];
  alignas(64) float scales[kPanelBytes / kBytes * kGroupsOfStrip<F> * kFloatsOfGroup<F>];
  InputPanel<Dot, F, kBatch, kPanelBytes / kBytes * kStripCols> inputs;
  const std::int64_t span = span_of<F>(p.m), spans = p.m.cols / span;
  const std::int64_t strips = span / kStripCols;  // of a span
  const std::int64_t most = kPanelBytes / (strips * kBytes);
  for (std::int64_t batch = 0; batch < num_tokens; batch += kBatch) {
    const std::int64_t count = smaller(kBatch, num_tokens - batch);
    for (std::int64_t s = 0; s < spans; s += most) {
      const std::int64_t width = smaller(most, spans - s);
      const auto x = inputs.fill(p.x, batch, count, s * span, width * span);
      for (std::int64_t b = begin; b < end; ++b) {
        const std::uint8_t* data = p.m.data + (b * spans + s) * strips * kStripBytes<F>;
        for (std::int64_t i = 0; i < width * strips; ++i)
          fill_panel<Dot, F>(data + i * kStripBytes<F>, panel + i * kBytes);
        for (std::int64_t g = 0; g < width * kParts; ++g)
          fill_scales<F>(p.m, b, s * kParts + g, scales + g * kFloatsOfGroup<F>);
        const Output out = p.block(b, s == 0, s + width == spans).token(batch);
        in_tiles<kTile>(count, [&]<int T>(std::int64_t t) {
          integer_tile<Dot, F, true, T>(p, b, batch + t, s, width, {panel, scales}, x.token(t),
                                        out.token(t));
        });
      }
    }
  }
}

template <class Dot, Format F>
void multiply_integer(const Product& p, std::int64_t begin, std::int64_t end,
                      std::int64_t num_tokens) {
  if (num_tokens <= kMostStreamed) return few_tokens<Dot, F>(p, begin, end, num_tokens);
  many_tokens<Dot, F>(p, begin, end, num_tokens);
}

// Multiplies an integer format; false if the format is another.
template <class Dot>
bool multiply_integers(const Product& p, std::int64_t begin, std::int64_t end,
                       std::int64_t num_tokens) {
  end = last_block(end, p.num_rows);
  bool is_done = false;
  each<kNumFormats>([&](auto number) TANDEM_INLINED {
    constexpr Format F = static_cast<Format>(decltype(number)::value);
    if constexpr (is_integer(F))
      if (p.m.format == F) {
        multiply_integer<Dot, F>(p, begin, end, num_tokens);
        is_done = true;
      }
  });
  return is_done;
}

}  // namespace
}  // namespace tandem
