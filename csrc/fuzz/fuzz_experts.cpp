// Layouts of experts with arbitrary sizes. Those that csrc/sizes.hpp accepts are computed, in
// memory of exactly the stated size.
#include <stdexcept>
#include <vector>

#include "experts.hpp"
#include "input.hpp"
#include "sizes.hpp"

namespace {

using namespace tandem;
using fuzz::bounded;
using fuzz::Input;
using Index = std::int64_t;

constexpr Index kTokens = 3;

// A matrix whose parts are consecutive from `next` on.
ProjectionLayout projection_of(Input& input, Index rows, Index inputs, Index& next) {
  ProjectionLayout found{};
  found.format = static_cast<int>(input.about(input.below(kNumFormats)));
  const bool is_known = found.format >= 0 && found.format < kNumFormats;
  const auto format = is_known ? static_cast<Format>(found.format) : Format::kInt8;
  const Encoding& e = encoding(format);
  const Index group = e.scale == ScaleKind::kNone ? 0 : e.group ? e.group : 32 << input.below(3);
  const Index unit = has_supers(format) ? kSuperCols : group == 0 ? 8 : std::max<Index>(group, 32);
  const Index cols = (inputs + unit - 1) / unit * unit, blocks = blocks_of(rows);
  found.group = input.about(group);
  found.cols = input.about(cols);
  found.data = input.about(next);
  next += blocks * code_bytes(format, cols);
  found.scales = input.about(next);
  next = (next + blocks * scale_bytes(format, cols, group ? group : 32) + 3) / 4 * 4;
  found.bias = input.below(2) ? -1 : input.about(next);
  next += blocks * 64;
  return found;
}

void compute(Input& input) {
  ExpertLayout layout{};
  layout.is_gated = input.below(2);
  const Index hidden = 1 + input.below(100), inner = 16 * (1 + input.below(6));
  layout.hidden_size = input.about(hidden);
  layout.inner_rows = input.about(inner);
  Index next = 0;
  layout.up = projection_of(input, inner * (layout.is_gated ? 2 : 1), hidden, next);
  layout.down = projection_of(input, hidden, inner, next);
  const Index bytes = bounded(input.about((next + 3) / 4 * 4));
  const ActivationSpec spec{layout.is_gated ? Activation::kSwiglu : Activation::kRelu2, 1, 7, 0};
  const auto which = static_cast<std::size_t>(input.byte());
  require_layout(layout, bytes);
  const std::vector<std::string> isas = available_isas();
  ExpertEngine engine(1, isas[which % isas.size()]);
  const auto expert = input.memory(bytes);
  const std::uint8_t* experts[] = {expert.get()};
  const std::int32_t begin[] = {0, kTokens}, token[] = {0, 1, 2};
  const auto size = static_cast<std::size_t>(kTokens * layout.hidden_size);
  const std::vector<float> values(size, 0.5f);
  std::vector<float> out(size);
  engine.run(layout, spec, {1, kTokens, experts, begin, token, values.data(), out.data()});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  try {
    compute(input);
  } catch (const std::invalid_argument&) {  // refused
  }
  return 0;
}
