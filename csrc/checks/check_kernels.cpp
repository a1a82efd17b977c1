// Compares every instruction set with the portable kernels, for random shapes, formats, token
// counts and thread counts. Built with sanitizers; each buffer is exactly as large as the layout
// says, so that they find accesses outside. Prints a line and returns 0, or stops at the first
// difference.
#include <cmath>
#include <cstdio>
#include <vector>

#include "experts.hpp"
#include "packed_random.hpp"

namespace {

using tandem::ExpertLayout;
using tandem::Format;
using tandem::checks::Random;

constexpr int kRounds = 240;

std::int64_t padded(std::int64_t size, std::int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

struct Model {
  ExpertLayout layout;
  std::vector<std::vector<std::uint8_t>> experts;
};

// The layout of one projection, and the sizes of its parts.
struct Projection {
  tandem::ProjectionLayout layout;
  std::int64_t data_bytes, scale_bytes, bias_bytes;
};

Projection make_projection(Random& random, Format format, std::int64_t rows, std::int64_t cols,
                           bool has_bias) {
  const std::int64_t group = tandem::checks::random_group(random, format);
  const std::int64_t width = padded(cols, tandem::checks::column_multiple(format, group));
  const std::int64_t blocks = rows / tandem::kBlockRows;
  return {{static_cast<int>(format), group, width, 0, 0, -1},
          blocks * tandem::code_bytes(format, width),
          blocks * tandem::scale_bytes(format, width, group),
          has_bias ? 4 * rows : 0};
}

// Places a projection's parts at `end` and advances it.
void place(Projection& p, std::int64_t& end) {
  const auto next = [&](std::int64_t bytes) {
    const std::int64_t begin = end;
    end += padded(bytes, 64);
    return begin;
  };
  p.layout.data = next(p.data_bytes);
  p.layout.scales = next(p.scale_bytes);
  p.layout.bias = p.bias_bytes == 0 ? -1 : next(p.bias_bytes);
}

void fill(Random& random, const Projection& p, std::uint8_t* expert) {
  const auto format = static_cast<Format>(p.layout.format);
  tandem::checks::fill_codes(random, format, expert + p.layout.data, p.data_bytes);
  tandem::checks::fill_scales(random, format, p.layout.group, p.layout.cols,
                              expert + p.layout.scales, p.scale_bytes);
}

Model make_model(Random& random) {
  const auto any = [&] { return static_cast<Format>(random.between(0, tandem::kNumFormats - 1)); };
  const bool has_bias = random.between(0, 1);
  ExpertLayout l{};
  l.hidden_size = random.between(1, 300);
  const std::int64_t inner = random.between(1, 300);
  l.inner_rows = padded(inner, 16);
  l.is_gated = random.between(0, 3) > 0;
  Projection up = make_projection(random, any(), l.inner_rows * (l.is_gated ? 2 : 1),
                                  l.hidden_size, has_bias);
  Projection down = make_projection(random, any(), padded(l.hidden_size, 16), inner, has_bias);
  std::int64_t end = 0;
  place(up, end);
  place(down, end);
  l.up = up.layout;
  l.down = down.layout;
  Model model{l, {}};
  for (std::int64_t e = random.between(1, 4); e > 0; --e) {
    std::vector<std::uint8_t> bytes(end);
    fill(random, up, bytes.data());
    fill(random, down, bytes.data());
    model.experts.push_back(std::move(bytes));
  }
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
  // The second projection quantises activations again, where a last bit of the first may change a
  // code.
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
    constexpr tandem::Activation kGated[] = {
        tandem::Activation::kSwiglu, tandem::Activation::kGeluTanhGate,
        tandem::Activation::kLimitedSilu, tandem::Activation::kSoftcapped};
    const auto kind =
        model.layout.is_gated ? kGated[random.between(0, 3)] : tandem::Activation::kRelu2;
    const tandem::ActivationSpec spec{kind, 1.702f, 7.0f, 1.0f};
    const auto expected = run(model, "portable", 1, begin, token, hidden, num_tokens, spec);
    for (const std::string& isa : tandem::available_isas()) {
      const int threads = static_cast<int>(random.between(1, 4));
      const auto actual = run(model, isa.c_str(), threads, begin, token, hidden, num_tokens, spec);
      if (!is_near(actual, expected)) {
        std::printf("round %d: %s differs, formats %d and %d\n", round, isa.c_str(),
                    model.layout.up.format, model.layout.down.format);
        return 1;
      }
    }
  }
  std::printf("%d random layers agree on every instruction set\n", kRounds);
  return 0;
}
