// Random products: a matrix and activations, in buffers of exactly the necessary size.
#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "kernels.hpp"
#include "packed_random.hpp"

namespace tandem::checks {

struct Case {
  Format format;
  std::int64_t blocks, cols, group, num_rows, num_tokens;
  std::vector<std::uint8_t> data, scales;
  std::vector<float> bias, rows;
};

inline Case make_case(Random& random, Format format) {
  const std::int64_t group = random_group(random, format);
  const std::int64_t multiple = column_multiple(format, group);
  // Wide matrices have more columns than many tokens are multiplied with at a time.
  const bool is_wide = random.between(0, 9) == 0;
  const std::int64_t cols = multiple * random.between(1, (is_wide ? 5000 : 900) / multiple);
  Case c{format, random.between(1, 5), cols, group, 0, 0, {}, {}, {}, {}};
  c.num_rows = 16 * c.blocks - random.between(0, 15);
  c.num_tokens = is_wide                ? random.between(9, 15)
                 : random.between(0, 3) ? random.between(1, 9)
                                        : random.between(10, 150);
  c.data.resize(c.blocks * code_bytes(format, c.cols));
  c.scales.resize(c.blocks * scale_bytes(format, c.cols, group));
  fill_codes(random, format, c.data.data(), std::ssize(c.data));
  fill_scales(random, format, group, c.cols, c.scales.data(), std::ssize(c.scales));
  if (random.between(0, 1))
    for (std::int64_t i = 0; i < 16 * c.blocks; ++i) c.bias.push_back(random.normal());
  for (std::int64_t i = 0; i < c.num_tokens * c.cols; ++i) c.rows.push_back(random.normal());
  return c;
}

// The activations as the format needs them, quantised by some kernels: AVX-512's have an order of
// columns of their own for grids.
struct Rounded {
  std::vector<std::int8_t> quantized;
  std::vector<float> scales;
  std::vector<std::int32_t> sums;
  std::vector<std::uint16_t> bf16;
  Activations view{};

  explicit Rounded(const Case& c, const Kernels& kernels = portable_kernels()) {
    const bool is_int8 = is_integer(c.format);
    const std::int64_t groups = is_int8 ? c.cols / c.group : 0;
    quantized.resize(is_int8 ? c.rows.size() : 0);
    scales.resize(c.num_tokens * groups);
    sums.resize(c.num_tokens * groups);
    bf16.resize(is_int8 ? 0 : c.rows.size());
    for (std::int64_t t = 0; t < c.num_tokens; ++t) {
      const float* row = c.rows.data() + t * c.cols;
      if (is_int8)
        kernels.quantize(row, c.cols, c.group, c.format, quantized.data() + t * c.cols,
                         scales.data() + t * groups, sums.data() + t * groups);
      else
        kernels.to_bf16(row, c.cols, bf16.data() + t * c.cols);
    }
    view = {quantized.data(), scales.data(), sums.data(), bf16.data(),
            c.rows.data(),    c.cols,        groups};
  }
};

inline std::vector<float> multiply(const Kernels& kernels, const Case& c, const Rounded& x) {
  std::vector<float> out(c.num_tokens * c.num_rows);
  const PackedMatrix m{c.format,
                       c.blocks,
                       c.cols,
                       c.group,
                       c.data.data(),
                       c.scales.data(),
                       c.bias.empty() ? nullptr : c.bias.data()};
  kernels.matmul(m, 0, c.blocks, x.view, c.num_tokens, c.num_rows, out.data(), c.num_rows);
  return out;
}

// So many tokens of a case.
inline Case first_tokens(const Case& c, std::int64_t num_tokens) {
  Case few = c;
  few.num_tokens = num_tokens;
  few.rows.resize(num_tokens * c.cols);
  return few;
}

inline double relative_error(const std::vector<float>& actual, const std::vector<float>& expected) {
  double error = 0;
  double size = 1e-30;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    error += std::pow(static_cast<double>(actual[i]) - expected[i], 2);
    size += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(error / size);
}

}  // namespace tandem::checks
