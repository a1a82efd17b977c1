// Integer formats on 256-bit registers: groups of columns, tiles of tokens, panels for many tokens.
#pragma once

#include "scales.hpp"
#include "strips.hpp"

namespace tandem {
namespace {

// The input of a product: strips of codes, in memory or decoded in a panel. A panel also has the
// groups' scales as floats, each group's 16 followed by its minima.
struct Strips {
  const std::uint8_t* codes;
  const float* scales;
};

template <Format F>
constexpr std::int64_t kFloatsOfGroup = kHasMinima<F> ? 32 : 16;

// Converts the scales of one group to a panel's floats.
template <Format F>
void fill_scales(const PackedMatrix& m, std::int64_t block, std::int64_t g, float* panel) {
  const std::int64_t index = block * (m.cols / m.group) + g;
  for (int h = 0; h < kHalves; ++h) {
    _mm256_store_ps(panel + 8 * h, load_scales<F>(m, block, index, h));
    if constexpr (kHasMinima<F>)
      _mm256_store_ps(panel + 16 + 8 * h, load_minima<F>(m, index, h));
  }
}

// Widens bytes to words; each four words are in the order 0 2 1 3. `count` is a multiple of 16.
inline void widen(const std::int8_t* from, std::int64_t count, std::int16_t* to) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                         0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  for (std::int64_t i = 0; i < count; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + i),
                       _mm256_shuffle_epi8(_mm256_cvtepi8_epi16(bytes), order));
  }
}

// Columns that are multiplied before anything is scaled: a group, or a strip with several groups.
// `Group` is 32, or 0 if the matrix decides: a single strip needs no loop and fewer registers.
template <Format F, int Group>
std::int64_t span_of(const PackedMatrix& m) {
  return kGroupsOfStrip<F> > 1 || Group == kStripCols ? kStripCols : m.group;
}

// Adds the products of one group to `total`. Its columns are in `strips` and `inputs`; `g` is its
// index in a row, `Part` its index in the strip.
template <class Dot, Format F, int Group, bool IsCached, int Part, int T>
void add_group(const Product& p, std::int64_t block, std::int64_t token, std::int64_t g,
               Strips strips, const Inputs<Dot, F>& inputs, Totals<T>& total) {
  const Activations& x = p.x;
  const std::int64_t span = span_of<F, Group>(p.m);
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

// Multiplies one block by T tokens, for spans first_span..first_span+num_spans-1. Their strips are
// consecutive from `strips` on, in memory or decoded in a panel. `inputs` begin at the first
// column.
template <class Dot, Format F, int Group, bool IsCached, int T>
void integer_tile(const Product& p, std::int64_t block, std::int64_t token,
                  std::int64_t first_span, std::int64_t num_spans, Strips strips,
                  Inputs<Dot, F> inputs, const Output& out) {
  constexpr int kParts = kGroupsOfStrip<F>;
  constexpr std::int64_t kBytes = IsCached ? kPanelStripBytes<Dot, F> : kStripBytes<F>;
  const std::int64_t span_bytes = span_of<F, Group>(p.m) / kStripCols * kBytes;
  Totals<T> total;
  out.load<T>(total);
  for (std::int64_t s = first_span; s < first_span + num_spans; ++s) {
    each<kParts>([&](auto part) TANDEM_INLINED {
      constexpr int kPart = decltype(part)::value;
      add_group<Dot, F, Group, IsCached, kPart, T>(p, block, token, s * kParts + kPart, strips,
                                                   inputs, total);
      if constexpr (IsCached) strips.scales += kFloatsOfGroup<F>;
    });
    strips.codes += span_bytes;
    inputs = inputs.from(span_of<F, Group>(p.m));
  }
  out.store<T>(total);
}

// Up to this number of tokens, filling a panel costs more than it saves (Zen 4: with 8 tokens both
// take as long).
constexpr std::int64_t kMostStreamed = 4;

// The activations of up to `Tokens` tokens in up to `Cols` columns, unchanged or widened to words.
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

// Multiplies weights as they are read. Columns are split into parts, so that activations are
// widened once per part.
template <class Dot, Format F, int Group>
void few_tokens(const Product& p, std::int64_t begin, std::int64_t end, std::int64_t num_tokens) {
  constexpr std::int64_t kCols = 4096;
  InputPanel<Dot, F, kMostStreamed, kCols> panel;
  const std::int64_t span = span_of<F, Group>(p.m), spans = p.m.cols / span;
  const std::int64_t most = kIsWide<Dot, F> && span <= kCols ? kCols / span : spans;
  for (std::int64_t s = 0; s < spans; s += most) {
    const std::int64_t width = smaller(most, spans - s);
    const auto x = panel.fill(p.x, 0, num_tokens, s * span, width * span);
    for (std::int64_t b = begin; b < end; ++b) {
      const std::uint8_t* data = p.m.data + code_bytes(F, b * p.m.cols + s * span);
      const Output out = p.block(b, s == 0, s + width == spans);
      in_tiles<kStreamedTile>(num_tokens, [&]<int T>(std::int64_t t) {
        integer_tile<Dot, F, Group, false, T>(p, b, t, s, width, {data, nullptr}, x.token(t),
                                              out.token(t));
      });
    }
  }
}

struct Ahead {
  Pieces codes, scales;
};

// Prefetches the source of the next panel: `num_spans` spans from `span` on, counted over all
// blocks.
template <Format F, int Group>
Ahead what_follows(const PackedMatrix& m, std::int64_t span, std::int64_t num_spans,
                   std::int64_t num_pieces) {
  const std::int64_t cols = span_of<F, Group>(m), parts = kGroupsOfStrip<F>;
  const std::int64_t block = span / (m.cols / cols);
  const std::uint8_t* scales = scales_at<F>(m, block, span * parts);
  const std::uint8_t* end = scales_at<F>(m, block, (span + num_spans) * parts);
  return {{m.data + code_bytes(F, span * cols), code_bytes(F, num_spans * cols), num_pieces},
          {scales, end - scales, num_pieces}};
}

// Decodes a part of a block once for a batch of tokens. The part and its activations stay in the
// first-level cache.
template <class Dot, Format F, int Group>
void many_tokens(const Product& p, std::int64_t begin, std::int64_t end, std::int64_t num_tokens) {
  constexpr int kTile = 4, kParts = kGroupsOfStrip<F>;
  constexpr std::int64_t kBatch = 64, kBytes = kPanelStripBytes<Dot, F>, kPanelBytes = 8192;
  alignas(64) std::uint8_t panel[kPanelBytes];
  alignas(64) float scales[kPanelBytes / kBytes * kGroupsOfStrip<F> * kFloatsOfGroup<F>];
  InputPanel<Dot, F, kBatch, kPanelBytes / kBytes * kStripCols> inputs;
  const std::int64_t span = span_of<F, Group>(p.m), spans = p.m.cols / span;
  const std::int64_t strips = span / kStripCols;  // strips per span
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
        // The last part is probably followed by the first part of the next task.
        const std::int64_t next_part = s + width < spans ? begin * spans + s + width : end * spans;
        const std::int64_t next = b + 1 < end ? (b + 1) * spans + s : next_part;
        Ahead ahead = what_follows<F, Group>(p.m, next, width, num_tiles(count, kTile));
        const Output out = p.block(b, s == 0, s + width == spans).token(batch);
        in_tiles<kTile>(count, [&]<int T>(std::int64_t t) {
          ahead.codes.fetch_next();
          ahead.scales.fetch_next();
          integer_tile<Dot, F, Group, true, T>(p, b, batch + t, s, width, {panel, scales},
                                               x.token(t), out.token(t));
        });
      }
    }
  }
}

template <class Dot, Format F, int Group>
void multiply_groups(const Product& p, std::int64_t begin, std::int64_t end,
                     std::int64_t num_tokens) {
  if (num_tokens <= kMostStreamed) return few_tokens<Dot, F, Group>(p, begin, end, num_tokens);
  many_tokens<Dot, F, Group>(p, begin, end, num_tokens);
}

template <class Dot, Format F>
void multiply_integer(const Product& p, std::int64_t begin, std::int64_t end,
                      std::int64_t num_tokens) {
  constexpr std::int64_t kGroup = encoding(F).group;  // 0: the matrix decides
  if constexpr (kGroup == 0 || kGroup == kStripCols)
    if (p.m.group == kStripCols)
      return multiply_groups<Dot, F, kStripCols>(p, begin, end, num_tokens);
  if constexpr (kGroup != kStripCols) multiply_groups<Dot, F, 0>(p, begin, end, num_tokens);
}

// Multiplies an integer format; returns false for other formats.
template <class Dot>
bool multiply_integers(const Product& p, std::int64_t begin, std::int64_t end,
                       std::int64_t num_tokens) {
  end = last_block(end, p.num_rows);
  bool is_done = !has_vector_kernels(p.m.format);
  if (is_done)
    portable_kernels().matmul(p.m, begin, end, p.x, num_tokens, p.num_rows, p.out, p.stride);
  each<kNumEncodings>([&](auto number) TANDEM_INLINED {
    constexpr Format F = static_cast<Format>(decltype(number)::value);
    if constexpr (is_integer(F) && has_vector_kernels(F))
      if (p.m.format == F) {
        multiply_integer<Dot, F>(p, begin, end, num_tokens);
        is_done = true;
      }
  });
  return is_done;
}

}  // namespace
}  // namespace tandem
