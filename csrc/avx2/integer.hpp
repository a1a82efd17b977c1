// Integer formats on 256-bit registers. `Dot` says how four bytes are multiplied and added:
//
//   kIs16Bit  whether `add` sums pairs into 16 bits, which hold no more than 8 products of codes up
//             to 15, 4 of codes up to 31 or 2 of codes up to 63, with activations of -127..127
//   add(part, codes, x)       part plus products of unsigned codes with signed activations
//   flush(sum, part, factor)  sum (32 bits) plus part times factor; 32-bit parts ignore the factor
//
// Columns come in strips of 32. With 16-bit parts a larger code is two nibbles, the upper one times
// 16 when it is flushed: a whole product would leave no room for a second one.
#pragma once

#include "../codes.hpp"
#include "output.hpp"

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

// Whether even and odd columns of a group would overflow a part each.
template <class Dot, Format F>
constexpr bool kIsSplit =
    Dot::kIs16Bit && (encoding(F).largest > 63 || most_products(encoding(F).largest) <
                                                      kFoursOfStrip / kGroupsOfStrip<F> / 2);

template <class Dot, Format F>
constexpr int kMostProducts =
    !Dot::kIs16Bit || kIsSplit<Dot, F> ? 8 : most_products(encoding(F).largest);

// As bytes in a panel: 64 hold four columns of the 16 rows; split codes have two planes.
template <class Dot, Format F>
constexpr std::int64_t kPanelStripBytes = kIsSplit<Dot, F> ? 1024 : 512;

template <int T>
using Sums = __m256i[T][kHalves];

inline __m256i broadcast4(const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof four);
  return _mm256_set1_epi32(four);
}

inline __m256i low_nibbles(__m256i codes) { return Bytes32::keep(codes, 15); }

inline __m256i high_nibbles(__m256i codes) {
  return Bytes32::keep(Bytes32::shift_right<4>(codes), 15);
}

// The hardware follows a stream to the end of its page only.
constexpr std::int64_t kAheadBytes = 4096;

// Adds group `Part` of a strip (all of it, if it holds one), straight from memory, times T tokens.
template <class Dot, Format F, int Part, int T>
void add_streamed(const std::uint8_t* strip, const std::int8_t* q, std::int64_t stride,
                  Sums<T>& sums) {
  constexpr int kCount = kFoursOfStrip / kGroupsOfStrip<F>;
  static_assert(kMostProducts<Dot, F> >= (kIsSplit<Dot, F> ? kCount : kCount / 2));
  if constexpr (Part == 0)
    for (int i = 0; i < kStripBytes<F> / 64; ++i)
      _mm_prefetch(reinterpret_cast<const char*>(strip + 64 * i + kAheadBytes), _MM_HINT_T0);
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) {
    __m256i even[T];
    __m256i odd[T];
    for (int t = 0; t < T; ++t) even[t] = odd[t] = _mm256_setzero_si256();
    each<kCount>([&](auto i) TANDEM_INLINED {
      constexpr int J = Part * kCount + decltype(i)::value;
      const __m256i w = codes_of<Bytes32, F, J>(strip + 32 * h);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i x = broadcast4(q + t * stride + 4 * J);
        if constexpr (kIsSplit<Dot, F>) {
          even[t] = Dot::add(even[t], low_nibbles(w), x);
          odd[t] = Dot::add(odd[t], high_nibbles(w), x);
        } else {
          __m256i& part = J % 2 ? odd[t] : even[t];
          part = Dot::add(part, w, x);
        }
      }
    });
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i factor = kIsSplit<Dot, F> ? _mm256_set1_epi16(16) : one;
    for (int t = 0; t < T; ++t)
      sums[t][h] = Dot::flush(Dot::flush(sums[t][h], even[t], one), odd[t], factor);
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
      store(64 * j + 32 * h, kIsSplit<Dot, F> ? low_nibbles(w) : w);
      if constexpr (kIsSplit<Dot, F>) store(512 + 64 * j + 32 * h, high_nibbles(w));
    }
  });
}

// Adds columns 4 * First .. 4 * Last - 1 of one plane of a panel's strip times T tokens.
template <class Dot, int First, int Last, int Steps, int T>
void add_plane(const std::uint8_t* plane, const std::int8_t* q, std::int64_t stride, __m256i factor,
               Sums<T>& sums) {
#pragma GCC unroll 4
  for (int start = First; start < Last; start += Steps) {
    Sums<T> parts;
    for (auto& part : parts) part[0] = part[1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int c = start; c < start + Steps; ++c) {
      const __m256i w0 = Bytes32::load(plane + 64 * c);
      const __m256i w1 = Bytes32::load(plane + 64 * c + 32);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const __m256i x = broadcast4(q + t * stride + 4 * c);
        parts[t][0] = Dot::add(parts[t][0], w0, x);
        parts[t][1] = Dot::add(parts[t][1], w1, x);
      }
    }
    for (int t = 0; t < T; ++t)
      for (int h = 0; h < kHalves; ++h) sums[t][h] = Dot::flush(sums[t][h], parts[t][h], factor);
  }
}

template <class Dot, Format F, int Part, int T>
void add_cached(const std::uint8_t* panel, const std::int8_t* q, std::int64_t stride,
                Sums<T>& sums) {
  constexpr int kCount = kFoursOfStrip / kGroupsOfStrip<F>;
  constexpr int kSteps = kMostProducts<Dot, F> < kCount ? kMostProducts<Dot, F> : kCount;
  constexpr int kFirst = Part * kCount;
  constexpr int kLast = kFirst + kCount;
  add_plane<Dot, kFirst, kLast, kSteps, T>(panel, q, stride, _mm256_set1_epi16(1), sums);
  if constexpr (kIsSplit<Dot, F>)
    add_plane<Dot, kFirst, kLast, kSteps, T>(panel + 512, q, stride, _mm256_set1_epi16(16), sums);
}

inline __m256 load_halves(const std::uint8_t* data) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
}

// A scale of e4m3 has the bits of a half with a smaller exponent.
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

inline __m256 load_int8(const std::uint8_t* data) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(data));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

// Scales of 8 rows of a block; `index` counts groups over all blocks.
template <Format F>
__m256 load_scales(const PackedMatrix& m, std::int64_t block, std::int64_t index, int half) {
  constexpr ScaleKind kKind = encoding(F).scale;
  if constexpr (kKind == ScaleKind::kE8m0) {
    // 2^(e - 127) is the float with exponent e; one less, since the codes are doubled. e = 0 would
    // need a subnormal: 2^-128 of nothing is as good as nothing.
    const auto* at = reinterpret_cast<const __m128i*>(m.scales + index * 16 + 8 * half);
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at));
    const __m256i halved = _mm256_max_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)),
                                            _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_slli_epi32(halved, 23));
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

// Columns that are multiplied before anything is scaled, or a strip that holds several such groups.
template <Format F>
std::int64_t span_of(const PackedMatrix& m) {
  return kGroupsOfStrip<F> > 1 ? kStripCols : m.group;
}

// Adds the products of one group, whose columns lie in `strips`, to `total`; `g` is its number in a
// row, and `Part` that in its strip.
template <class Dot, Format F, bool IsCached, int Part, int T>
void add_group(const Product& p, std::int64_t block, std::int64_t token, std::int64_t g,
               const std::uint8_t* strips, Totals<T>& total) {
  const Activations& x = p.x;
  const std::int64_t span = span_of<F>(p.m);
  const std::int64_t index = block * (p.m.cols / p.m.group) + g;
  const std::int8_t* q = x.quantized + token * x.stride + g / kGroupsOfStrip<F> * span;
  const float* x_scales = x.scales + token * x.group_stride + g;
  const std::int32_t* x_sums = x.sums + token * x.group_stride + g;
  Sums<T> sums;
  for (int t = 0; t < T; ++t)
    for (__m256i& sum : sums[t])
      sum = _mm256_set1_epi32(kHasMinima<F> ? 0 : x_sums[t * x.group_stride]);
  for (std::int64_t k = 0; k < span; k += kStripCols) {
    if constexpr (IsCached) {
      add_cached<Dot, F, Part, T>(strips, q + k, x.stride, sums);
      strips += kPanelStripBytes<Dot, F>;
    } else {
      add_streamed<Dot, F, Part, T>(strips, q + k, x.stride, sums);
      strips += kStripBytes<F>;
    }
  }
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) {
    const __m256 scales = load_scales<F>(p.m, block, index, h);
    [[maybe_unused]] __m256 minima;
    if constexpr (kHasMinima<F>) minima = load_minima<F>(p.m, index, h);
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) {
      const float x_scale = x_scales[t * x.group_stride];
      total[t][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[t][h]),
                                    _mm256_mul_ps(scales, _mm256_set1_ps(x_scale)), total[t][h]);
      if constexpr (kHasMinima<F>) {
        const float weight = x_scale * static_cast<float>(x_sums[t * x.group_stride]);
        total[t][h] = _mm256_fmadd_ps(minima, _mm256_set1_ps(weight), total[t][h]);
      }
    }
  }
}

// One block times T tokens, for spans first_span..first_span+num_spans-1, whose strips follow each
// other from `strips` on: in memory, or decoded in a panel.
template <class Dot, Format F, bool IsCached, int T>
void integer_tile(const Product& p, std::int64_t block, std::int64_t token,
                  std::int64_t first_span, std::int64_t num_spans, const std::uint8_t* strips,
                  const Output& out) {
  constexpr int kParts = kGroupsOfStrip<F>;
  constexpr std::int64_t kBytes = IsCached ? kPanelStripBytes<Dot, F> : kStripBytes<F>;
  const std::int64_t span_bytes = span_of<F>(p.m) / kStripCols * kBytes;
  Totals<T> total;
  out.load<T>(total);
  for (std::int64_t s = first_span; s < first_span + num_spans; ++s, strips += span_bytes)
    each<kParts>([&](auto part) TANDEM_INLINED {
      constexpr int kPart = decltype(part)::value;
      add_group<Dot, F, IsCached, kPart, T>(p, block, token, s * kParts + kPart, strips, total);
    });
  out.store<T>(total);
}

// Up to here filling a panel costs more than it saves (Zen 4: with 8 tokens both take as long).
constexpr std::int64_t kMostStreamed = 4;

template <class Dot, Format F>
void few_tokens(const Product& p, std::int64_t begin, std::int64_t end, std::int64_t num_tokens) {
  const std::int64_t spans = p.m.cols / span_of<F>(p.m);
  for (std::int64_t b = begin; b < end; ++b) {
    const std::uint8_t* data = p.m.data + b * code_bytes(F, p.m.cols);
    const Output out = p.block(b, true, true);
    in_tiles<kStreamedTile>(num_tokens, [&]<int T>(std::int64_t t) {
      integer_tile<Dot, F, false, T>(p, b, t, 0, spans, data, out.token(t));
    });
  }
}

// Decodes a part of a block once for a batch of tokens; part and activations stay in the first cache.
template <class Dot, Format F>
void many_tokens(const Product& p, std::int64_t begin, std::int64_t end, std::int64_t num_tokens) {
  constexpr int kTile = 4;
  constexpr std::int64_t kBatch = 64;
  alignas(64) std::uint8_t panel[8192];
  const std::int64_t spans = p.m.cols / span_of<F>(p.m);
  const std::int64_t strips = span_of<F>(p.m) / kStripCols;  // of a span
  const std::int64_t most = static_cast<std::int64_t>(sizeof panel) /
                            (strips * kPanelStripBytes<Dot, F>);
  for (std::int64_t batch = 0; batch < num_tokens; batch += kBatch) {
    const std::int64_t count = smaller(kBatch, num_tokens - batch);
    for (std::int64_t s = 0; s < spans; s += most) {
      const std::int64_t width = smaller(most, spans - s);
      for (std::int64_t b = begin; b < end; ++b) {
        const std::uint8_t* data = p.m.data + (b * spans + s) * strips * kStripBytes<F>;
        for (std::int64_t i = 0; i < width * strips; ++i)
          fill_panel<Dot, F>(data + i * kStripBytes<F>, panel + i * kPanelStripBytes<Dot, F>);
        const Output out = p.block(b, s == 0, s + width == spans).token(batch);
        in_tiles<kTile>(count, [&]<int T>(std::int64_t t) {
          integer_tile<Dot, F, true, T>(p, b, batch + t, s, width, panel, out.token(t));
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
