// Quantises random matrices to every format with every instruction set. The bytes must be equal,
// and each int8 value as near as its scale allows. Buffers are exactly as large as the calls say,
// so that the sanitizers find accesses outside.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "experts.hpp"
#include "half.hpp"
#include "quantize.hpp"
#include "random.hpp"

namespace {

using tandem::Format;
using tandem::checks::Random;
using Index = std::int64_t;

struct Case {
  Format format;
  Index group;
};

constexpr Case kCases[] = {
    {Format::kBf16, 0},  {Format::kFp16, 0},      {Format::kInt8, 32},  {Format::kInt8, 128},
    {Format::kFp8, 128}, {Format::kInt4, 64},     {Format::kMxfp4, 32}, {Format::kInt4Zero, 32},
    {Format::kInt5, 32}, {Format::kInt5Zero, 32}, {Format::kIq4Nl, 32}, {Format::kIq4Xs, 32},
    {Format::kQ2K, 16},  {Format::kQ3K, 16},      {Format::kQ4K, 32},   {Format::kQ5K, 32},
    {Format::kQ6K, 16},  {Format::kIq2Xxs, 32},   {Format::kIq3S, 32},
};

struct Packed {
  std::vector<std::uint8_t> data, scales;
};

bool int8_is_near(const Packed& packed, Index group, Index rows, Index cols, Index width,
                  const std::vector<float>& weights) {
  for (Index row = 0; row < rows; ++row)
    for (Index col = 0; col < cols; ++col) {
      const Index block = row / 16, offset = row % 16;
      const Index code = packed.data[(block * width / 4 + col / 4) * 64 + 4 * offset + col % 4];
      std::uint16_t bits;
      std::memcpy(&bits, &packed.scales[((block * width / group + col / group) * 16 + offset) * 2],
                  2);
      const float scale = tandem::half_to_float(bits);
      const float value = static_cast<float>(code - 128) * scale;
      if (std::abs(value - weights[row * cols + col]) > 2.0f * std::abs(scale)) return false;
    }
  return true;
}

bool round_agrees(Random& random, const Case& which) {
  const Index rows = random.between(1, 50), cols = random.between(1, 300);
  const bool is_super = tandem::has_supers(which.format);
  const Index multiple = is_super ? tandem::kSuperCols : which.group ? which.group : 8;
  const Index width = (cols + multiple - 1) / multiple * multiple, blocks = (rows + 15) / 16;
  const std::vector<float> weights = random.normals(rows * cols);
  std::vector<float> importance = random.normals(width);
  for (float& value : importance) value *= value;
  const bool is_weighed = random.between(0, 1), has_search = random.between(0, 1);
  const Index data = tandem::code_bytes(which.format, width);
  const Index scales = tandem::scale_bytes(which.format, width, which.group);
  std::vector<Packed> results;
  for (const std::string& isa : tandem::available_isas()) {
    Packed packed{std::vector<std::uint8_t>(blocks * data), std::vector<std::uint8_t>(blocks * scales)};
    const tandem::QuantizeCall call{
        which.format, which.group, has_search, rows, cols, width, tandem::SourceType::kFp32,
        weights.data(), cols, 1, is_weighed ? importance.data() : nullptr, packed.data.data(), data,
        packed.scales.data(), scales};
    if (!tandem::quantize({&call, 1}, isa, 2)) return false;
    results.push_back(std::move(packed));
  }
  for (const Packed& result : results)
    if (result.data != results[0].data || result.scales != results[0].scales) return false;
  return which.format != Format::kInt8 || is_weighed ||
         int8_is_near(results[0], which.group, rows, cols, width, weights);
}

}  // namespace

int main() {
  Random random(7);
  for (int round = 0; round < 40; ++round)
    for (const Case& which : kCases)
      if (!round_agrees(random, which)) {
        std::printf("format %d: wrong in round %d\n", static_cast<int>(which.format), round);
        return 1;
      }
  std::puts("quantising: every instruction set gives the same bytes");
  return 0;
}
