// One matrix product of every instruction set against the portable one, with the same activations:
// what differs is the order of additions, so the tolerance is tight. Also runs AVX-VNNI's kernels on
// a processor that has the same instruction as a part of AVX-512 only.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

#include "cpu_features.hpp"
#include "experts.hpp"
#include "packed_random.hpp"

namespace {

using tandem::ActivationForm;
using tandem::Format;
using tandem::Kernels;
using tandem::checks::Random;

constexpr int kRounds = 600;

// A matrix and activations in buffers that are exactly as large as they must be.
struct Case {
  Format format;
  std::int64_t blocks, cols, group, num_rows, num_tokens;
  std::vector<std::uint8_t> data, scales;
  std::vector<float> bias, rows;
};

Case make_case(Random& random, Format format) {
  const std::int64_t group = tandem::checks::random_group(random, format);
  const std::int64_t multiple = tandem::checks::column_multiple(format, group);
  // Wide ones take more columns than many tokens are multiplied with at once.
  const bool is_wide = random.between(0, 9) == 0;
  const std::int64_t cols = multiple * random.between(1, (is_wide ? 5000 : 900) / multiple);
  Case c{format, random.between(1, 5), cols, group, 0, 0, {}, {}, {}, {}};
  c.num_rows = 16 * c.blocks - random.between(0, 15);
  c.num_tokens = is_wide                ? random.between(9, 15)
                 : random.between(0, 3) ? random.between(1, 9)
                                        : random.between(10, 150);
  c.data.resize(c.blocks * tandem::code_bytes(format, c.cols));
  c.scales.resize(c.blocks * tandem::scale_bytes(format, c.cols, group));
  tandem::checks::fill_codes(random, format, c.data.data(), std::ssize(c.data));
  tandem::checks::fill_scales(random, format, group, c.cols, c.scales.data(),
                              std::ssize(c.scales));
  if (random.between(0, 1))
    for (std::int64_t i = 0; i < 16 * c.blocks; ++i) c.bias.push_back(random.normal());
  for (std::int64_t i = 0; i < c.num_tokens * c.cols; ++i) c.rows.push_back(random.normal());
  return c;
}

// The rows as the format wants them, rounded by the portable kernels.
struct Rounded {
  std::vector<std::int8_t> quantized;
  std::vector<float> scales;
  std::vector<std::int32_t> sums;
  std::vector<std::uint16_t> bf16;
  tandem::Activations view{};

  explicit Rounded(const Case& c) {
    const Kernels& portable = tandem::portable_kernels();
    const bool is_int8 = tandem::is_integer(c.format);
    const std::int64_t groups = is_int8 ? c.cols / c.group : 0;
    quantized.resize(is_int8 ? c.rows.size() : 0);
    scales.resize(c.num_tokens * groups);
    sums.resize(c.num_tokens * groups);
    bf16.resize(is_int8 ? 0 : c.rows.size());
    for (std::int64_t t = 0; t < c.num_tokens; ++t) {
      const float* row = c.rows.data() + t * c.cols;
      if (is_int8)
        portable.quantize(row, c.cols, c.group, c.format,
                          quantized.data() + t * c.cols, scales.data() + t * groups,
                          sums.data() + t * groups);
      else
        portable.to_bf16(row, c.cols, bf16.data() + t * c.cols);
    }
    view = {quantized.data(), scales.data(), sums.data(), bf16.data(), c.rows.data(), c.cols, groups};
  }
};

std::vector<float> multiply(const Kernels& kernels, const Case& c, const Rounded& x) {
  std::vector<float> out(c.num_tokens * c.num_rows);
  const tandem::PackedMatrix m{c.format,        c.blocks,        c.cols, c.group,
                               c.data.data(),   c.scales.data(), c.bias.empty() ? nullptr : c.bias.data()};
  kernels.matmul(m, 0, c.blocks, x.view, c.num_tokens, c.num_rows, out.data(), c.num_rows);
  return out;
}

double relative_error(const std::vector<float>& actual, const std::vector<float>& expected) {
  double error = 0;
  double size = 1e-30;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    error += std::pow(static_cast<double>(actual[i]) - expected[i], 2);
    size += std::pow(static_cast<double>(expected[i]), 2);
  }
  return std::sqrt(error / size);
}

std::vector<const Kernels*> kernels_here() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  const auto names = tandem::detect_cpu_features().instruction_sets;
  const auto has = [&](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
#if !defined(TANDEM_WITHOUT_AVX2)
  if (has("avx512vl") && has("avx512_vnni")) found.push_back(&tandem::avxvnni_kernels());
#endif
  for (const std::string& isa : tandem::available_isas()) {
    if (isa == "amx") found.push_back(&tandem::amx_kernels());
    if (isa == "avx512") found.push_back(&tandem::avx512_kernels());
    if (isa == "avx2") found.push_back(&tandem::avx2_kernels());
  }
#endif
  return found;
}

}  // namespace

int main() {
  Random random(4321);
  const auto all = kernels_here();
  for (int round = 0; round < kRounds; ++round) {
    const auto format = static_cast<Format>(round % tandem::kNumFormats);
    const Case c = make_case(random, format);
    const Rounded x(c);
    const auto expected = multiply(tandem::portable_kernels(), c, x);
    for (const Kernels* kernels : all) {
      const double error = relative_error(multiply(*kernels, c, x), expected);
      // bf16's own instruction rounds products differently, and sums in pairs.
      if (!(error < 2e-5)) {
        std::printf("round %d: %s differs by %.2g, format %d, %d tokens\n", round, kernels->name,
                    error, static_cast<int>(format), static_cast<int>(c.num_tokens));
        return 1;
      }
    }
  }
  std::printf("%d random products agree on", kRounds);
  for (const Kernels* kernels : all) std::printf(" %s", kernels->name);
  std::printf("\n");
  return 0;
}
