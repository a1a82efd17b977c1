// Plain C++: the fallback for any processor, and the readable statement of what the others compute.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "half.hpp"
#include "kernels.hpp"

namespace tandem {
namespace {

// The bits of a code lie in planes, the lowest ones first: in a strip of 32 columns a plane of b
// bits has 64 bytes for every 32 / b columns, of which four neighbours are bytes of one row.
std::int32_t code_at(Format format, const std::uint8_t* block, std::int64_t row, std::int64_t col) {
  const std::uint8_t* plane = block + code_bytes(format, col / kStripCols * kStripCols);
  const std::int64_t four = col % kStripCols / 4;
  const int bits = encoding(format).bits;
  int code = 0;
  for (int done = 0; done < bits;) {
    const int width = std::bit_floor(static_cast<unsigned>(bits - done));  // 8, 4, 2 or 1
    const int per_byte = 8 / width;
    const int byte = plane[four / per_byte * 64 + 4 * row + col % 4];
    code |= (byte >> width * (four % per_byte) & ((1 << width) - 1)) << done;
    plane += kStripCols * kBlockRows * width / 8;
    done += width;
  }
  if (encoding(format).table != nullptr) code = encoding(format).table[code];
  return code - encoding(format).offset;
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

Scale scale_at(const PackedMatrix& m, std::int64_t block, std::int64_t g, std::int64_t row) {
  const std::int64_t index = block * (m.cols / m.group) + g;
  const Encoding& e = encoding(m.format);
  if (e.scale == ScaleKind::kE8m0)  // half of 2^(e - 127): the codes are doubled
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

float dot_integer(const PackedMatrix& m, std::int64_t b, std::int64_t r, const Activations& x,
                  std::int64_t t) {
  const std::uint8_t* block = m.data + b * code_bytes(m.format, m.cols);
  const std::int8_t* q = x.quantized + t * x.stride;
  float total = 0;
  for (std::int64_t g = 0; g < m.cols / m.group; ++g) {
    std::int32_t sum = 0;
    for (std::int64_t k = g * m.group; k < (g + 1) * m.group; ++k)
      sum += code_at(m.format, block, r, k) * q[k];
    const Scale s = scale_at(m, b, g, r);
    const float x_scale = x.scales[t * x.group_stride + g];
    total += static_cast<float>(sum) * (s.scale * x_scale);
    if (encoding(m.format).has_minima)
      total += s.minimum * (x_scale * static_cast<float>(x.sums[t * x.group_stride + g]));
  }
  return total;
}

float dot_bf16(const PackedMatrix& m, std::int64_t b, std::int64_t r, const Activations& x,
               std::int64_t t) {
  const auto* block = reinterpret_cast<const std::uint16_t*>(m.data) + b * m.cols * kBlockRows;
  const std::uint16_t* row = x.bf16 + t * x.stride;
  float total = 0;
  for (std::int64_t k = 0; k < m.cols; ++k)
    total += bf16_to_float(block[(k / 2) * 32 + 2 * r + k % 2]) * bf16_to_float(row[k]);
  return total;
}

float dot_fp16(const PackedMatrix& m, std::int64_t b, std::int64_t r, const Activations& x,
               std::int64_t t) {
  const auto* block = reinterpret_cast<const std::uint16_t*>(m.data) + b * m.cols * kBlockRows;
  const float* row = x.fp32 + t * x.stride;
  float total = 0;
  for (std::int64_t k = 0; k < m.cols; ++k)
    total += half_to_float(block[(k / 2) * 32 + 2 * r + k % 2]) * row[k];
  return total;
}

// The 16 rows of a block share their scales.
float dot_fp8(const PackedMatrix& m, std::int64_t b, std::int64_t r, const Activations& x,
              std::int64_t t) {
  const std::uint8_t* block = m.data + b * m.cols * kBlockRows;
  const float* scales = reinterpret_cast<const float*>(m.scales) + b * (m.cols / m.group);
  const std::uint16_t* row = x.bf16 + t * x.stride;
  float total = 0;
  for (std::int64_t g = 0; g < m.cols / m.group; ++g) {
    float sum = 0;
    for (std::int64_t k = g * m.group; k < (g + 1) * m.group; ++k)
      sum += e4m3_to_float(block[(k / 4) * 64 + 4 * r + k % 4]) * bf16_to_float(row[k]);
    total += sum * scales[g];
  }
  return total;
}

float dot(const PackedMatrix& m, std::int64_t b, std::int64_t r, const Activations& x,
          std::int64_t t) {
  switch (m.format) {
    case Format::kBf16: return dot_bf16(m, b, r, x, t);
    case Format::kFp16: return dot_fp16(m, b, r, x, t);
    case Format::kFp8: return dot_fp8(m, b, r, x, t);
    default: return dot_integer(m, b, r, x, t);
  }
}

void quantize(const float* row, std::int64_t cols, std::int64_t group, std::int32_t sum_factor,
              std::int8_t* quantized, float* scales, std::int32_t* sums) {
  for (std::int64_t g = 0; g < cols / group; ++g) {
    const float* x = row + g * group;
    float largest = 0;
    bool is_finite = true;  // else the scale is NaN, and with it every result
    for (std::int64_t k = 0; k < group; ++k) {
      is_finite = is_finite && std::isfinite(x[k]);
      largest = std::max(largest, std::fabs(x[k]));
    }
    const float inverse = largest >= kSmallestPeak && is_finite ? 127.0f / largest : 0;
    std::int32_t sum = 0;
    for (std::int64_t k = 0; k < group; ++k) {
      const auto q = static_cast<std::int8_t>(is_finite ? std::nearbyint(x[k] * inverse) : 0.0f);
      quantized[g * group + k] = q;
      sum += q;
    }
    scales[g] = is_finite ? largest / 127.0f : NAN;
    sums[g] = sum_factor * sum;
  }
}

void to_bf16(const float* row, std::int64_t cols, std::uint16_t* out) {
  for (std::int64_t k = 0; k < cols; ++k) out[k] = float_to_bf16(row[k]);
}

void matmul(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
            std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t out_stride) {
  for (std::int64_t b = begin; b < end; ++b)
    for (std::int64_t r = 0; r < std::min(kBlockRows, num_rows - b * kBlockRows); ++r)
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        const std::int64_t row = b * kBlockRows + r;
        out[t * out_stride + row] = dot(m, b, r, x, t) + (m.bias ? m.bias[row] : 0);
      }
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

float gelu_tanh(float x) {
  constexpr float kRoot = 0.7978845608f;  // sqrt(2 / pi)
  return x * sigmoid(2 * kRoot * (x + 0.044715f * x * x * x));
}

float activated(const ActivationSpec& spec, float gate, float up) {
  switch (spec.kind) {
    case Activation::kGeluTanhGate: return gelu_tanh(gate) * up;
    case Activation::kRelu2: return gate <= 0 ? 0 : gate * gate;  // NaN stays
    case Activation::kSwiglu: {
      const float g = std::min(gate, spec.limit);
      const float u = std::clamp(up, -spec.limit, spec.limit);
      return g * sigmoid(spec.alpha * g) * (u + spec.offset);
    }
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

const Kernels& portable_kernels() {
  static const Kernels kernels{"portable", quantize, to_bf16,           matmul,
                               activate,   read,     multiply<int>, multiply<float>};
  return kernels;
}

}  // namespace tandem
