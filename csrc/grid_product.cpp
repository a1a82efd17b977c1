#include "grid_product.hpp"

#include <algorithm>
#include <vector>

namespace tandem {
namespace {

// Row blocks that become strips together. With one token, a strip is still in the first-level
// cache. Several tokens need several blocks, so that their activations are read once for all.
constexpr std::int64_t strip_blocks(std::int64_t num_tokens) { return num_tokens == 1 ? 1 : 4; }

// Memory aligned to 64 bytes, which a thread keeps.
class StripMemory {
 public:
  void resize(std::int64_t code_bytes, std::int64_t scales) {
    const auto lines = static_cast<std::size_t>((code_bytes + scales * 4 + 63) / 64);
    if (lines_.size() < lines) lines_.resize(lines);
    scale_begin_ = code_bytes;
  }

  std::uint8_t* codes() { return lines_.data()->bytes; }
  float* scales() { return reinterpret_cast<float*>(codes() + scale_begin_); }

 private:
  struct alignas(64) Line {
    std::uint8_t bytes[64];
  };
  std::vector<Line> lines_;
  std::int64_t scale_begin_ = 0;
};

}  // namespace

void multiply_grid(const GridKernels& kernels, const PackedMatrix& m, std::int64_t begin,
                   std::int64_t end, const Activations& x, std::int64_t num_tokens,
                   std::int64_t num_rows, float* out, std::int64_t stride) {
  thread_local StripMemory memory;
  const std::int64_t most = strip_blocks(num_tokens), codes = m.cols * kBlockRows;
  const std::int64_t scales = m.cols / m.group * kBlockRows;
  memory.resize(most * codes, most * scales);
  PackedMatrix strips{m.group == kStripCols ? Format::kStrips32 : Format::kStrips16,
                      0,
                      m.cols,
                      m.group,
                      memory.codes(),
                      reinterpret_cast<const std::uint8_t*>(memory.scales()),
                      nullptr};
  end = std::min(end, (num_rows + kBlockRows - 1) / kBlockRows);
  for (std::int64_t first = begin; first < end; first += most) {
    strips.blocks = std::min(most, end - first);
    for (std::int64_t b = 0; b < strips.blocks; ++b)
      kernels.look_up(m, first + b, memory.codes() + b * codes, memory.scales() + b * scales);
    const std::int64_t row = first * kBlockRows;
    strips.bias = m.bias == nullptr ? nullptr : m.bias + row;
    kernels.matmul(strips, 0, strips.blocks, x, num_tokens, num_rows - row, out + row, stride);
  }
}

}  // namespace tandem
