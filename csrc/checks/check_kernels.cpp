// Random shapes, formats, token counts and thread counts: every instruction set against the portable
// kernels. Built with sanitizers; each buffer is exactly as large as the layout says, so that a read
// or write outside is found. Prints a line and returns 0, or stops at the first difference.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "experts.hpp"
#include "half.hpp"
#include "random.hpp"

namespace {

using tandem::ExpertLayout;
using tandem::Format;
using tandem::checks::Random;

constexpr int kRounds = 400;

std::int64_t padded(std::int64_t size, std::int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

struct Model {
  ExpertLayout layout;
  std::vector<std::vector<std::uint8_t>> experts;
};

std::int64_t data_bytes(Format format, std::int64_t rows, std::int64_t cols) {
  return rows * cols * tandem::bits_per_code(format) / 8;
}

std::int64_t scale_bytes(Format format, std::int64_t rows, std::int64_t cols, std::int64_t group) {
  if (format == Format::kBf16 || format == Format::kFp16) return 0;
  if (format == Format::kFp8) return rows / 16 * (cols / group) * 4;
  const int per_group = format == Format::kInt4Zero ? 4 : format == Format::kMxfp4 ? 1 : 2;
  return rows * (cols / group) * per_group;
}

void fill_matrix(Random& random, Format format, std::uint8_t* data, std::int64_t data_size,
                 std::uint8_t* scales, std::int64_t scale_size) {
  if (format == Format::kBf16) {
    for (std::int64_t i = 0; i < data_size; i += 2) {
      const std::uint16_t bits = tandem::float_to_bf16(random.normal() * 0.1f);
      std::memcpy(data + i, &bits, 2);
    }
    return;
  }
  if (format == Format::kFp16) {
    for (std::int64_t i = 0; i < data_size; i += 2) {
      const auto bits = static_cast<std::uint16_t>(0x2800 + random.between(0, 0xFFF));  // 1/32..1/2
      data[i] = static_cast<std::uint8_t>(bits);
      data[i + 1] = static_cast<std::uint8_t>((bits >> 8) | (random.between(0, 1) << 7));
    }
    return;
  }
  for (std::int64_t i = 0; i < data_size; ++i) data[i] = random.between(0, 255);
  if (format == Format::kFp8) {
    for (std::int64_t i = 0; i < data_size; ++i)
      if ((data[i] & 0x7F) == 0x7F) data[i] = 0;  // NaN
    const float scale = 1.0f / 4096;
    for (std::int64_t i = 0; i < scale_size; i += 4) std::memcpy(scales + i, &scale, 4);
    return;
  }
  if (format == Format::kMxfp4) {
    for (std::int64_t i = 0; i < scale_size; ++i) scales[i] = random.between(118, 124);
    return;
  }
  for (std::int64_t i = 0; i < scale_size; i += 2) {
    const auto bits = static_cast<std::uint16_t>(0x1C00 + random.between(0, 0x3FF));  // 1/256..1/128
    std::memcpy(scales + i, &bits, 2);
  }
}

Model make_model(Random& random) {
  constexpr Format kFormats[] = {Format::kBf16, Format::kInt8, Format::kInt4, Format::kInt4Zero,
                                 Format::kMxfp4, Format::kFp16, Format::kFp8};
  const Format format = kFormats[random.between(0, 6)];
  const bool has_groups = format != Format::kBf16 && format != Format::kFp16;
  const std::int64_t group = format == Format::kMxfp4 ? 32
                             : format == Format::kFp8 ? 128
                                                      : 32 << random.between(0, 2);
  const std::int64_t multiple = has_groups ? group : 8;
  const bool has_bias = random.between(0, 1);
  ExpertLayout l{};
  l.format = static_cast<int>(format);
  l.group = group;
  l.hidden_size = random.between(1, 300);
  l.hidden_cols = padded(l.hidden_size, multiple);
  const std::int64_t inner = random.between(1, 300);
  l.inner_rows = padded(inner, 16);
  l.inner_cols = padded(inner, multiple);
  l.is_gated = random.between(0, 3) > 0;
  const std::int64_t up_rows = l.inner_rows * (l.is_gated ? 2 : 1);
  const std::int64_t down_rows = padded(l.hidden_size, 16);
  const std::int64_t sizes[] = {
      data_bytes(format, up_rows, l.hidden_cols), scale_bytes(format, up_rows, l.hidden_cols, group),
      data_bytes(format, down_rows, l.inner_cols),
      scale_bytes(format, down_rows, l.inner_cols, group), has_bias ? 4 * up_rows : 0,
      has_bias ? 4 * down_rows : 0};
  std::int64_t* const offsets[] = {&l.up_data, &l.up_scales, &l.down_data, &l.down_scales,
                                   &l.up_bias, &l.down_bias};
  std::int64_t end = 0;
  for (int i = 0; i < 6; ++i) {
    *offsets[i] = end;
    end += padded(sizes[i], i == 5 ? 1 : 64);
  }
  Model model{l, {}};
  for (std::int64_t e = random.between(1, 4); e > 0; --e) {
    std::vector<std::uint8_t> bytes(end);
    fill_matrix(random, format, bytes.data(), sizes[0], bytes.data() + l.up_scales, sizes[1]);
    fill_matrix(random, format, bytes.data() + l.down_data, sizes[2], bytes.data() + l.down_scales,
                sizes[3]);
    model.experts.push_back(std::move(bytes));
  }
  if (!has_bias) model.layout.up_bias = model.layout.down_bias = -1;
  return model;
}

std::vector<float> run(const Model& model, const char* isa, int threads,
                       const std::vector<std::int32_t>& begin,
                       const std::vector<std::int32_t>& token, const std::vector<float>& hidden,
                       std::int64_t num_tokens, tandem::ActivationSpec spec) {
  std::vector<const std::uint8_t*> experts;
  for (const auto& bytes : model.experts) experts.push_back(bytes.data());
  std::vector<float> out(token.size() * model.layout.hidden_size);
  tandem::ExpertEngine engine(threads, isa);
  engine.run(model.layout, spec,
             {static_cast<std::int64_t>(experts.size()), num_tokens, experts.data(), begin.data(),
              token.data(), hidden.data(), out.data()});
  return out;
}

bool is_near(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0;
  double size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  // The second projection rounds activations again: a last bit of the first may flip a step there.
  return std::sqrt(error) <= 5e-3 * std::sqrt(size) + 1e-6;
}

}  // namespace

int main() {
  Random random(12345);
  for (int round = 0; round < kRounds; ++round) {
    const Model model = make_model(random);
    const std::int64_t num_tokens = random.between(1, 20);
    std::vector<std::int32_t> begin{0};
    std::vector<std::int32_t> token;
    for (std::size_t e = 0; e < model.experts.size(); ++e) {
      for (std::int64_t n = random.between(0, num_tokens); n > 0; --n)
        token.push_back(static_cast<std::int32_t>(random.between(0, num_tokens - 1)));
      begin.push_back(static_cast<std::int32_t>(token.size()));
    }
    std::vector<float> hidden(num_tokens * model.layout.hidden_size);
    for (float& value : hidden) value = random.normal();
    const auto kind = model.layout.is_gated ? static_cast<tandem::Activation>(random.between(0, 1))
                                            : tandem::Activation::kRelu2;
    const tandem::ActivationSpec spec{kind, 1.702f, 7.0f, 1.0f};
    const auto expected = run(model, "portable", 1, begin, token, hidden, num_tokens, spec);
    for (const std::string& isa : tandem::available_isas()) {
      const int threads = static_cast<int>(random.between(1, 4));
      const auto actual = run(model, isa.c_str(), threads, begin, token, hidden, num_tokens, spec);
      if (!is_near(actual, expected)) {
        std::printf("round %d: %s differs, format %d\n", round, isa.c_str(), model.layout.format);
        return 1;
      }
    }
  }
  std::printf("%d random layers agree on every instruction set\n", kRounds);
  return 0;
}
