// Checks the sizes of calls that come from outside against the memory that they come with: nothing
// is read or written beyond it. All of these throw std::invalid_argument with one sentence.
#pragma once

#include <cstdint>

#include "blocks.hpp"
#include "experts.hpp"
#include "packed.hpp"
#include "quantize.hpp"

namespace tandem {

// Beyond it a product of sizes could leave 64 bits.
constexpr std::int64_t kMostSide = std::int64_t{1} << 28;

Format require_format(std::int64_t number);
// Columns that a matrix of a format has after padding, and how many share a scale (0: none).
void require_columns(Format format, std::int64_t group, std::int64_t cols);
constexpr std::int64_t blocks_of(std::int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// Every part of an expert lies in its bytes, and rows are as long as the next matrix reads them.
void require_layout(const ExpertLayout& layout, std::int64_t expert_bytes);

// Bytes from each address of a rearrangement on.
struct RearrangementBytes {
  std::int64_t source, order, data, scales, table, factor;
  std::int64_t field_scales, field_minima;
};
// Also looks at the numbers of rows in `order`.
void require_room(const Rearrangement& work, const RearrangementBytes& bytes);

// Bytes from each address of a rounding on.
struct QuantizeBytes {
  std::int64_t source, importance, data, scales;
};
void require_room(const QuantizeCall& call, const QuantizeBytes& bytes);

}  // namespace tandem
