// Integer formats on 256-bit registers. `Dot` says how four bytes are multiplied and added:
//
//   kIs16Bit  whether `add` sums pairs into 16 bits, which hold no more than 8 products of codes up
//             to 15, or 4 of codes up to 24, with activations of -127..127
//   add(part, codes, x)       part plus products of unsigned codes with signed activations
//   flush(sum, part, factor)  sum (32 bits) plus part times factor; 32-bit parts ignore the factor
//
// Columns come in strips of 32. With 16-bit parts an int8 code is two nibbles, the upper one times
// 16 when it is flushed: a whole product of int8 would leave no room for a second one.
#pragma once

#include "output.hpp"

namespace tandem {
namespace {

constexpr std::int64_t kStripCols = 32;

template <Format F>
constexpr std::int64_t kStripBytes = F == Format::kInt8 ? 512 : 256;

template <class Dot, Format F>
constexpr bool kIsSplit = F == Format::kInt8 && Dot::kIs16Bit;

// As bytes in a panel: 64 hold four columns of the 16 rows; split codes have two planes.
template <class Dot, Format F>
constexpr std::int64_t kPanelStripBytes = kIsSplit<Dot, F> ? 1024 : 512;

template <int T>
using Sums = __m256i[T][kHalves];

inline __m256i load_bytes(const std::uint8_t* data) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

inline __m256i broadcast4(const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof four);
  return _mm256_set1_epi32(four);
}

// Four bits to the unsigned code that the multiplier takes.
template <Format F>
__m256i decode(__m256i nibbles) {
  if constexpr (F != Format::kMxfp4) return nibbles;
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
}

template <Format F>
__m256i low_codes(__m256i bytes) {
  return decode<F>(_mm256_and_si256(bytes, _mm256_set1_epi8(15)));
}

template <Format F>
__m256i high_codes(__m256i bytes) {
  return decode<F>(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15)));
}

// The hardware follows a stream to the end of its page only.
constexpr std::int64_t kAheadBytes = 4096;

// Adds one strip of a block, straight from memory, times T tokens.
template <class Dot, Format F, int T>
void add_streamed(const std::uint8_t* strip, const std::int8_t* q, std::int64_t stride,
                  Sums<T>& sums) {
  constexpr bool kIsInt8 = F == Format::kInt8;
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) {
    __m256i low[T];
    __m256i high[T];
    for (int t = 0; t < T; ++t) low[t] = high[t] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int c = 0; c < kStripBytes<F> / 64; ++c) {
      const std::uint8_t* data = strip + 64 * c + 32 * h;
      if (h == 0) _mm_prefetch(reinterpret_cast<const char*>(data + kAheadBytes), _MM_HINT_T0);
      const __m256i w = load_bytes(data);
      const std::int8_t* at = q + (kIsInt8 ? 4 : 8) * c;
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t, at += stride) {
        if constexpr (kIsInt8 && !Dot::kIs16Bit) {
          __m256i& part = c % 2 ? high[t] : low[t];
          part = Dot::add(part, w, broadcast4(at));
        } else {
          low[t] = Dot::add(low[t], low_codes<F>(w), broadcast4(at));
          high[t] = Dot::add(high[t], high_codes<F>(w), broadcast4(kIsInt8 ? at : at + 4));
        }
      }
    }
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i factor = kIsSplit<Dot, F> ? _mm256_set1_epi16(16) : one;
    for (int t = 0; t < T; ++t)
      sums[t][h] = Dot::flush(Dot::flush(sums[t][h], low[t], one), high[t], factor);
  }
}

// Turns one strip into a panel's bytes.
template <class Dot, Format F>
void fill_panel(const std::uint8_t* strip, std::uint8_t* panel) {
  const auto store = [&](std::int64_t offset, __m256i codes) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(panel + offset), codes);
  };
#pragma GCC unroll 16
  for (int i = 0; i < kStripBytes<F> / 32; ++i) {
    const __m256i w = load_bytes(strip + 32 * i);
    const int c = i / kHalves;
    const int h = i % kHalves;
    if constexpr (F != Format::kInt8) {  // the upper nibbles are the next four columns
      store(128 * c + 32 * h, low_codes<F>(w));
      store(128 * c + 64 + 32 * h, high_codes<F>(w));
    } else if constexpr (kIsSplit<Dot, F>) {
      store(32 * i, low_codes<F>(w));
      store(512 + 32 * i, high_codes<F>(w));
    } else {
      store(32 * i, w);
    }
  }
}

// Adds one plane of a panel's strip times T tokens.
template <class Dot, int Steps, int T>
void add_plane(const std::uint8_t* plane, const std::int8_t* q, std::int64_t stride, __m256i factor,
               Sums<T>& sums) {
#pragma GCC unroll 2
  for (int first = 0; first < 8; first += Steps) {
    Sums<T> parts;
    for (auto& part : parts) part[0] = part[1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int c = first; c < first + Steps; ++c) {
      const __m256i w0 = load_bytes(plane + 64 * c);
      const __m256i w1 = load_bytes(plane + 64 * c + 32);
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

template <class Dot, Format F, int T>
void add_cached(const std::uint8_t* panel, const std::int8_t* q, std::int64_t stride,
                Sums<T>& sums) {
  constexpr int kSteps = F == Format::kMxfp4 && Dot::kIs16Bit ? 4 : 8;
  add_plane<Dot, kSteps, T>(panel, q, stride, _mm256_set1_epi16(1), sums);
  if constexpr (kIsSplit<Dot, F>)
    add_plane<Dot, kSteps, T>(panel + 512, q, stride, _mm256_set1_epi16(16), sums);
}

// Scales of 8 rows; `index` counts groups over all blocks.
template <Format F>
__m256 load_scales(const std::uint8_t* scales, std::int64_t index, int half) {
  if constexpr (F == Format::kMxfp4) {
    // 2^(e - 127) is the float with exponent e; one less, since the codes are doubled. e = 0 would
    // need a subnormal: 2^-128 of nothing is as good as nothing.
    const auto* at = reinterpret_cast<const __m128i*>(scales + index * 16 + 8 * half);
    const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at));
    const __m256i halved = _mm256_max_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)),
                                            _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_slli_epi32(halved, 23));
  } else {
    constexpr std::int64_t kBytes = F == Format::kInt4Zero ? 64 : 32;
    const auto* at = reinterpret_cast<const __m128i*>(scales + index * kBytes + 16 * half);
    return _mm256_cvtph_ps(_mm_loadu_si128(at));
  }
}

inline __m256 load_minima(const std::uint8_t* scales, std::int64_t index, int half) {
  const auto* at = reinterpret_cast<const __m128i*>(scales + index * 64 + 32 + 16 * half);
  return _mm256_cvtph_ps(_mm_loadu_si128(at));
}

// One block times T tokens, for groups first_group..first_group+num_groups-1, whose strips follow
// each other from `strips` on: in memory, or decoded in a panel.
template <class Dot, Format F, bool IsCached, int T>
void integer_tile(const Product& p, std::int64_t block, std::int64_t token,
                  std::int64_t first_group, std::int64_t num_groups, const std::uint8_t* strips,
                  const Output& out) {
  const Activations& x = p.x;
  const std::int64_t group = p.m.group;
  const std::int64_t index = block * (p.m.cols / group);
  Totals<T> total;
  out.load<T>(total);
  for (std::int64_t g = first_group; g < first_group + num_groups; ++g) {
    const std::int8_t* q = x.quantized + token * x.stride + g * group;
    const float* x_scales = x.scales + token * x.group_stride + g;
    const std::int32_t* x_sums = x.sums + token * x.group_stride + g;
    Sums<T> sums;
    for (int t = 0; t < T; ++t)
      for (__m256i& sum : sums[t])
        sum = _mm256_set1_epi32(F == Format::kInt4Zero ? 0 : x_sums[t * x.group_stride]);
    for (std::int64_t k = 0; k < group; k += kStripCols) {
      if constexpr (IsCached) {
        add_cached<Dot, F, T>(strips, q + k, x.stride, sums);
        strips += kPanelStripBytes<Dot, F>;
      } else {
        add_streamed<Dot, F, T>(strips, q + k, x.stride, sums);
        strips += kStripBytes<F>;
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
      const __m256 scales = load_scales<F>(p.m.scales, index + g, h);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        const float x_scale = x_scales[t * x.group_stride];
        total[t][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[t][h]),
                                      _mm256_mul_ps(scales, _mm256_set1_ps(x_scale)), total[t][h]);
        if constexpr (F == Format::kInt4Zero) {
          const float weight = x_scale * static_cast<float>(x_sums[t * x.group_stride]);
          total[t][h] = _mm256_fmadd_ps(load_minima(p.m.scales, index + g, h),
                                        _mm256_set1_ps(weight), total[t][h]);
        }
      }
    }
  }
  out.store<T>(total);
}

// Up to here filling a panel costs more than it saves (Zen 4: with 8 tokens both take as long).
constexpr std::int64_t kMostStreamed = 4;

template <class Dot, Format F>
void few_tokens(const Product& p, std::int64_t begin, std::int64_t end, std::int64_t num_tokens) {
  const std::int64_t strips = p.m.cols / kStripCols;
  for (std::int64_t b = begin; b < end; ++b) {
    const std::uint8_t* data = p.m.data + b * strips * kStripBytes<F>;
    const Output out = p.block(b, true, true);
    in_tiles<kStreamedTile>(num_tokens, [&]<int T>(std::int64_t t) {
      integer_tile<Dot, F, false, T>(p, b, t, 0, p.m.cols / p.m.group, data, out.token(t));
    });
  }
}

// Decodes a part of a block once for a batch of tokens; part and activations stay in the first cache.
template <class Dot, Format F>
void many_tokens(const Product& p, std::int64_t begin, std::int64_t end, std::int64_t num_tokens) {
  constexpr int kTile = 4;
  constexpr std::int64_t kBatch = 64;
  alignas(64) std::uint8_t panel[8192];
  const std::int64_t groups = p.m.cols / p.m.group;
  const std::int64_t strips = p.m.group / kStripCols;  // of a group
  const std::int64_t most = static_cast<std::int64_t>(sizeof panel) /
                            (strips * kPanelStripBytes<Dot, F>);
  for (std::int64_t batch = 0; batch < num_tokens; batch += kBatch) {
    const std::int64_t count = smaller(kBatch, num_tokens - batch);
    for (std::int64_t g = 0; g < groups; g += most) {
      const std::int64_t width = smaller(most, groups - g);
      for (std::int64_t b = begin; b < end; ++b) {
        const std::uint8_t* data = p.m.data + (b * groups + g) * strips * kStripBytes<F>;
        for (std::int64_t s = 0; s < width * strips; ++s)
          fill_panel<Dot, F>(data + s * kStripBytes<F>, panel + s * kPanelStripBytes<Dot, F>);
        const Output out = p.block(b, g == 0, g + width == groups).token(batch);
        in_tiles<kTile>(count, [&]<int T>(std::int64_t t) {
          integer_tile<Dot, F, true, T>(p, b, batch + t, g, width, panel, out.token(t));
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
  switch (p.m.format) {
    case Format::kInt8: multiply_integer<Dot, Format::kInt8>(p, begin, end, num_tokens); break;
    case Format::kInt4: multiply_integer<Dot, Format::kInt4>(p, begin, end, num_tokens); break;
    case Format::kInt4Zero:
      multiply_integer<Dot, Format::kInt4Zero>(p, begin, end, num_tokens);
      break;
    case Format::kMxfp4: multiply_integer<Dot, Format::kMxfp4>(p, begin, end, num_tokens); break;
    default: return false;
  }
  return true;
}

}  // namespace
}  // namespace tandem
