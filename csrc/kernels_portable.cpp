// Plain C++: the fallback for any processor, and the readable definition of what the other kernels
// compute.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "half.hpp"
#include "kernels.hpp"
#include "values.hpp"

namespace tandem {
namespace {

using Codes = std::int16_t[kBlockRows][kStripCols];
using Column = float __attribute__((vector_size(kBlockRows * 4)));  // of a block

constexpr std::int64_t kTokens = 8;  // tokens that share an unpacked strip

// Adds a plane of kWidth bits to codes whose lower `done` bits are set: 64 bytes hold a code of 4
// columns, or of 8, 16 or 32 interleaved.
template <int kWidth>
void add_plane(const std::uint8_t* plane, std::int64_t fours, int done, std::uint8_t (*codes)[64]) {
  constexpr int kPerByte = 8 / kWidth;
  for (std::int64_t four = 0; four < fours; ++four)
    for (int i = 0; i < 64; ++i) {
      const int bits = plane[four / kPerByte * 64 + i] >> (four % kPerByte * kWidth);
      codes[four][i] = static_cast<std::uint8_t>(codes[four][i] |
                                                 (bits & ((1 << kWidth) - 1)) << done);
    }
}

// The codes of a strip's first `cols` columns minus the code for zero. Their bits are in planes,
// lowest first. Of four consecutive bytes in a plane, each belongs to one column of the same row.
void unpack(Format format, const std::uint8_t* plane, std::int64_t cols, Codes& out) {
  const Encoding& e = encoding(format);
  const std::int64_t fours = cols / 4;
  std::uint8_t codes[kStripCols / 4][64] = {};
  for (int done = 0; done < e.bits;) {
    const auto width = static_cast<int>(std::bit_floor(static_cast<unsigned>(e.bits - done)));
    switch (width) {
      case 8: add_plane<8>(plane, fours, done, codes); break;
      case 4: add_plane<4>(plane, fours, done, codes); break;
      case 2: add_plane<2>(plane, fours, done, codes); break;
      default: add_plane<1>(plane, fours, done, codes);
    }
    plane += kStripCols * kBlockRows * width / 8;
    done += width;
  }
  if (e.table != nullptr) {
    std::uint8_t table[16];
    std::memcpy(table, e.table, sizeof table);
    for (std::int64_t four = 0; four < fours; ++four)
      for (std::uint8_t& code : codes[four]) code = table[code & 15];
  }
  const int offset = e.offset;
  for (std::int64_t four = 0; four < fours; ++four)
    for (int row = 0; row < kBlockRows; ++row)
      for (int i = 0; i < 4; ++i)
        out[row][4 * four + i] = static_cast<std::int16_t>(codes[four][4 * row + i] - offset);
}

// A number in a row's words; the words of 16 rows are interleaved.
int number_at(const std::uint8_t* super, const BitField& field, int i, std::int64_t row) {
  std::uint32_t word;
  std::memcpy(&word, super + field.at(i) / 32 * 4 * kBlockRows + 4 * row, sizeof word);
  return static_cast<int>(word >> field.at(i) % 32 & ((1u << field.width) - 1));
}

// The signs of eight columns, one bit each.
int signs_at(const std::uint8_t* super, const Grid& grid, int eight, std::int64_t row) {
  const int bits = number_at(super, grid.signs, eight, row);
  switch (grid.sign_kind()) {
    case Signs::kOne:
      return bits ? 255 : 0;
    case Signs::kEven:
      return bits | (std::popcount(static_cast<unsigned>(bits)) & 1) << 7;
    case Signs::kEight:
      return bits;
  }
  return 0;
}

// Like unpack(), for a format with a grid; `block` has all columns.
void unpack_lines(Format format, const std::uint8_t* block, std::int64_t column, Codes& out) {
  const Encoding& e = encoding(format);
  const Grid& grid = *e.grid;
  const std::uint8_t* super = block + code_bytes(format, column);
  const int bits = grid.line_bits(), sign_bit = grid.line_cols == 8 ? 2 : 3;
  for (std::int64_t row = 0; row < kBlockRows; ++row)
    for (int k = 0; k < kStripCols; ++k) {
      const int own = static_cast<int>(column % kSuperCols) + k, line = own / grid.line_cols;
      const int high = number_at(super, grid.high, line, row);
      const int number = number_at(super, grid.low, line, row) | high << 8;
      const int code = grid.lines[number] >> own % grid.line_cols * bits & ((1 << sign_bit) - 1);
      const int sign = signs_at(super, grid, own / 8, row) >> own % 8 & 1;
      out[row][k] = static_cast<std::int16_t>(e.table[code | sign << sign_bit] - e.offset);
    }
}

// Unpacks `cols` codes of a strip, from `column` on.
void unpack(const PackedMatrix& m, const std::uint8_t* block, std::int64_t column,
            std::int64_t cols, Codes& out) {
  if (is_grid(m.format)) return unpack_lines(m.format, block, column, out);
  unpack(m.format, block + code_bytes(m.format, column), cols, out);
}

struct Scale {
  float scale;
  float minimum;
};

float half_at(const std::uint8_t* bytes) {
  std::uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return half_to_float(bits);
}

float grid_scale_at(const PackedMatrix& m, std::int64_t block, std::int64_t g, std::int64_t row) {
  const Encoding& e = encoding(m.format);
  const std::int64_t groups = kSuperCols / m.group,
                     super = (block * m.cols + g * m.group) / kSuperCols;
  const std::uint8_t* words = m.data + code_bytes(m.format, super * kSuperCols);
  float factor;
  if (e.grid->factor.width == 0) {
    factor = half_at(m.scales + super * 32 + 2 * row);
  } else {
    int bits = 0;
    for (int part = 0; part < 4; ++part)
      bits |= number_at(words, e.grid->factor, part, row) << 4 * part;
    factor = half_to_float(static_cast<std::uint16_t>(bits));
  }
  const int steps = number_at(words, e.grid->scales, static_cast<int>(g % groups), row);
  return static_cast<float>(2 * steps + 1) * e.unit * factor;
}

Scale scale_at(const PackedMatrix& m, std::int64_t block, std::int64_t g, std::int64_t row) {
  if (is_grid(m.format)) return {grid_scale_at(m, block, g, row), 0};
  const std::int64_t index = block * (m.cols / m.group) + g;
  const Encoding& e = encoding(m.format);
  if (e.scale == ScaleKind::kE8m0)  // half of 2^(e - 127), because codes are doubled
    return {std::ldexp(1.0f, m.scales[index * 16 + row] - 128), 0};
  if (e.scale == ScaleKind::kE4m3OfRow) {
    float factor;
    std::memcpy(&factor, m.scales + row_factors(m.format, block, m.cols) + 4 * row, sizeof factor);
    return {e.unit * e4m3_to_float(m.scales[e4m3_begin(block, index) + row]) * factor, 0};
  }
  if (has_supers(m.format)) {
    const std::uint8_t* super = m.scales + super_begin(m.format, index);
    const std::uint8_t* own = super + in_super(m.format, index) + row;
    const bool is_nibble = e.scale == ScaleKind::kNibblesOfSuper;
    const int scale = is_nibble ? *own & 15 : static_cast<std::int8_t>(*own);
    const float factor = e.unit * half_at(super + 2 * row);
    if (!e.has_minima) return {static_cast<float>(scale) * factor, 0};
    const int minimum = is_nibble ? *own >> 4 : static_cast<std::int8_t>(own[16]);
    return {static_cast<float>(scale) * factor,
            static_cast<float>(minimum) * half_at(super + 32 + 2 * row)};
  }
  const std::uint8_t* line = m.scales + index * scale_bytes(m.format, m.group, m.group);
  return {half_at(line + 2 * row), e.has_minima ? half_at(line + 32 + 2 * row) : 0};
}

// Adds the products of kCols columns to each row's sum.
template <int kCols>
void add_products(const Codes& codes, std::int64_t begin, const std::int8_t* q,
                  std::int32_t* sums) {
  std::int16_t wide[kCols];
  for (int k = 0; k < kCols; ++k) wide[k] = q[k];
  for (int row = 0; row < kBlockRows; ++row) {
    const std::int16_t* code = codes[row] + begin;
    std::int32_t sum = 0;
    for (int k = 0; k < kCols; ++k) sum += code[k] * wide[k];
    sums[row] += sum;
  }
}

// Multiplies a block of rows by up to kTokens activations, from the first of `x` on.
void multiply_codes(const PackedMatrix& m, std::int64_t b, const Activations& x,
                    std::int64_t num_tokens, float (*totals)[kBlockRows]) {
  const std::uint8_t* block = m.data + b * code_bytes(m.format, m.cols);
  const std::int64_t step = std::min(m.group, kStripCols);
  Codes codes;
  for (std::int64_t g = 0; g < m.cols / m.group; ++g) {
    std::int32_t sums[kTokens][kBlockRows] = {};
    for (std::int64_t k = g * m.group; k < (g + 1) * m.group; k += step) {
      const std::int64_t begin = k % kStripCols;
      if (begin == 0) unpack(m, block, k, std::min(kStripCols, m.cols - k), codes);
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        const std::int8_t* q = x.quantized + t * x.stride + k;
        step == 16 ? add_products<16>(codes, begin, q, sums[t])
                   : add_products<32>(codes, begin, q, sums[t]);
      }
    }
    Scale scales[kBlockRows];
    for (int row = 0; row < kBlockRows; ++row) scales[row] = scale_at(m, b, g, row);
    for (std::int64_t t = 0; t < num_tokens; ++t) {
      const float x_scale = x.scales[t * x.group_stride + g];
      const float x_sum = x.scaled_sum(t * x.group_stride + g);
      for (int row = 0; row < kBlockRows; ++row) {
        const Scale& s = scales[row];
        totals[t][row] += static_cast<float>(sums[t][row]) * s.scale * x_scale;
        if (encoding(m.format).has_minima) totals[t][row] += s.minimum * x_sum;
      }
    }
  }
}

// Converts weights to floats, column by column. A word of 32 bits holds neighbours of one row.
template <int kBits, typename ToFloat>
void to_floats(const std::uint8_t* codes, std::int64_t cols, float (*out)[kBlockRows],
               ToFloat to_float) {
  constexpr int kPerWord = 32 / kBits;
  for (std::int64_t k = 0; k < cols; ++k) {
    const std::uint8_t* words = codes + k / kPerWord * 4 * kBlockRows;
    const auto shift = static_cast<int>(k % kPerWord) * kBits;
    for (int row = 0; row < kBlockRows; ++row) {
      std::uint32_t word;
      std::memcpy(&word, words + 4 * row, sizeof word);
      out[k][row] = to_float(word >> shift);
    }
  }
}

void to_floats(Format format, const std::uint8_t* codes, std::int64_t cols,
               float (*out)[kBlockRows]) {
  const auto bf16 = [](std::uint32_t bits) { return std::bit_cast<float>(bits << 16); };
  const auto fp16 = [](std::uint32_t bits) { return half_to_float(bits & 0xFFFF); };
  const auto fp8 = [](std::uint32_t bits) { return e4m3_to_float(bits & 0xFF); };
  switch (format) {
    case Format::kBf16: return to_floats<16>(codes, cols, out, bf16);
    case Format::kFp16: return to_floats<16>(codes, cols, out, fp16);
    default: return to_floats<8>(codes, cols, out, fp8);
  }
}

float activation_at(Format format, const Activations& x, std::int64_t index) {
  return format == Format::kFp16 ? x.fp32[index] : bf16_to_float(x.bf16[index]);
}

// Like multiply_codes(), for floating-point weights; the 16 rows of an fp8 block share scales.
void multiply_floats(const PackedMatrix& m, std::int64_t b, const Activations& x,
                     std::int64_t num_tokens, float (*totals)[kBlockRows]) {
  const std::uint8_t* block = m.data + b * code_bytes(m.format, m.cols);
  const bool has_scales = m.format == Format::kFp8;
  const std::int64_t group = has_scales ? m.group : m.cols;
  float weights[kStripCols][kBlockRows];
  for (std::int64_t g = 0; g < m.cols / group; ++g) {
    Column sums[kTokens] = {};
    const std::int64_t end = (g + 1) * group;
    for (std::int64_t k = g * group; k < end; k += kStripCols) {
      const std::int64_t cols = std::min(kStripCols, end - k);
      to_floats(m.format, block + code_bytes(m.format, k), cols, weights);
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        Column sum = sums[t];
        for (std::int64_t i = 0; i < cols; ++i) {
          Column column;
          std::memcpy(&column, weights[i], sizeof column);
          sum += column * activation_at(m.format, x, t * x.stride + k + i);
        }
        sums[t] = sum;
      }
    }
    const float scale =
        has_scales ? reinterpret_cast<const float*>(m.scales)[b * (m.cols / group) + g] : 1.0f;
    for (std::int64_t t = 0; t < num_tokens; ++t)
      for (int row = 0; row < kBlockRows; ++row) totals[t][row] += sums[t][row] * scale;
  }
}

// Rounds to the nearest even for |x| up to 2^22. Without a call, so that loops of it are
// vectorized.
float rounded(float x) { return (x + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23

void quantize(const float* row, std::int64_t cols, std::int64_t group, Format format,
              std::int8_t* quantized, float* scales, std::int32_t* sums) {
  for (std::int64_t g = 0; g < cols / group; ++g) {
    const float* x = row + g * group;
    std::int32_t bits = 0;  // ordered for positive numbers, then infinity, then NaN
    for (std::int64_t k = 0; k < group; ++k)
      bits = std::max(bits, std::bit_cast<std::int32_t>(x[k]) & 0x7FFFFFFF);
    const auto largest = std::bit_cast<float>(bits);
    // Otherwise the scale is NaN, and so is every result.
    const bool is_finite = std::isfinite(largest);
    const float inverse = largest >= kSmallestPeak && is_finite ? 127.0f / largest : 0;
    std::int32_t sum = 0;
    for (std::int64_t k = 0; k < group; ++k) {
      const auto q = static_cast<std::int8_t>(is_finite ? rounded(x[k] * inverse) : 0.0f);
      quantized[g * group + k] = q;
      sum += q;
    }
    scales[g] = is_finite ? largest / 127.0f : NAN;
    sums[g] = stored_sum(format, sum, scales[g]);
  }
}

void to_bf16(const float* row, std::int64_t cols, std::uint16_t* out) {
  for (std::int64_t k = 0; k < cols; ++k) out[k] = float_to_bf16(row[k]);
}

void from_fp16(const std::uint16_t* bits, std::int64_t count, float* out) {
  load_values(bits, ValueType::kFp16, count, out);
}

void to_fp16(const float* values, std::int64_t count, std::uint16_t* out) {
  store_values(values, count, ValueType::kFp16, out);
}

Activations from_token(Activations x, std::int64_t t) {
  if (x.quantized != nullptr) x.quantized += t * x.stride;
  if (x.scales != nullptr) x.scales += t * x.group_stride;
  if (x.sums != nullptr) x.sums += t * x.group_stride;
  if (x.bf16 != nullptr) x.bf16 += t * x.stride;
  if (x.fp32 != nullptr) x.fp32 += t * x.stride;
  return x;
}

void matmul(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
            std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t out_stride) {
  const auto multiply_block = is_integer(m.format) ? multiply_codes : multiply_floats;
  for (std::int64_t b = begin; b < end; ++b)
    for (std::int64_t first = 0; first < num_tokens; first += kTokens) {
      const std::int64_t tokens = std::min(kTokens, num_tokens - first);
      float totals[kTokens][kBlockRows] = {};
      multiply_block(m, b, from_token(x, first), tokens, totals);
      const std::int64_t rows = std::min(kBlockRows, num_rows - b * kBlockRows);
      for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t r = 0; r < rows; ++r) {
          const std::int64_t row = b * kBlockRows + r;
          out[(first + t) * out_stride + row] = totals[t][r] + (m.bias ? m.bias[row] : 0);
        }
    }
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float gelu_tanh(float x) {
  constexpr float kRoot = 0.7978845608f;  // sqrt(2 / pi)
  return x * sigmoid(2 * kRoot * (x + 0.044715f * x * x * x));
}

float softcapped(float x, float cap) { return cap * std::tanh(x / cap); }

float activated(const ActivationSpec& spec, float gate, float up) {
  switch (spec.kind) {
    case Activation::kGeluTanhGate: return gelu_tanh(gate) * up;
    case Activation::kRelu2: return gate <= 0 ? 0 : gate * gate;
    case Activation::kSoftcapped:
      return softcapped(gate, spec.alpha) * sigmoid(gate) * softcapped(up, spec.limit);
    case Activation::kSwiglu: {
      const float g = std::min(gate, spec.limit);
      const float u = std::clamp(up, -spec.limit, spec.limit);
      return g * sigmoid(spec.alpha * g) * (u + spec.offset);
    }
    case Activation::kLimitedSilu:
      return std::min(gate * sigmoid(gate), spec.limit) * std::clamp(up, -spec.limit, spec.limit);
  }
  return 0;
}

void activate(const ActivationSpec& spec, const float* row, std::int64_t cols, float* inner) {
  const bool is_gated = spec.kind != Activation::kRelu2;
  for (std::int64_t k = 0; k < cols; ++k) {
    const std::int64_t at = is_gated ? (k / 16) * 32 + k % 16 : k;
    inner[k] = activated(spec, row[at], is_gated ? row[at + 16] : 0);
  }
}

std::uint64_t read(const std::uint8_t* data, std::int64_t bytes) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i + 8 <= bytes; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, data + i, sizeof word);
    sum += word;
  }
  return sum;
}

// One multiplication and one addition each; `volatile` keeps the loop.
template <typename T>
std::int64_t multiply(std::int64_t count) {
  volatile T factor = 1;
  T sums[8] = {};
  const T f = factor;
  for (std::int64_t i = 0; i < count; ++i)
    for (T& sum : sums) sum = static_cast<T>(sum * f + f);
  volatile T sink = sums[0] + sums[7];
  static_cast<void>(sink);
  return count * 8 * 2;
}

}  // namespace

void read_row(const PackedMatrix& m, std::int64_t row, std::int64_t cols, float* out) {
  const std::int64_t block = row / kBlockRows, own = row % kBlockRows;
  const std::uint8_t* codes = m.data + block * code_bytes(m.format, m.cols);
  Codes strip;
  float weights[kStripCols][kBlockRows];
  for (std::int64_t begin = 0; begin < cols; begin += kStripCols) {
    const std::uint8_t* at = codes + code_bytes(m.format, begin);
    const std::int64_t width = std::min(kStripCols, m.cols - begin);
    if (is_integer(m.format))
      unpack(m, codes, begin, width, strip);
    else to_floats(m.format, at, width, weights);
    Scale s{1, 0};
    for (std::int64_t k = begin; k < std::min(begin + width, cols); ++k) {
      if (is_integer(m.format)) {
        if (k == begin || k % m.group == 0) s = scale_at(m, block, k / m.group, own);
        const float value = static_cast<float>(strip[own][k - begin]) * s.scale;
        out[k] = encoding(m.format).has_minima ? value + s.minimum : value;
      } else {
        out[k] = weights[k - begin][own];
        if (m.format == Format::kFp8)
          out[k] *= reinterpret_cast<const float*>(m.scales)[(block * m.cols + k) / m.group];
      }
    }
  }
}

const Kernels& portable_kernels() {
  static const Kernels kernels{"portable", quantize, to_bf16, from_fp16,     to_fp16,
                               matmul,     activate, read,    multiply<int>, multiply<int>,
                               multiply<float>};
  return kernels;
}

}  // namespace tandem
