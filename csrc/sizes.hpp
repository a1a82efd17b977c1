// Checks the sizes of calls from outside against the memory that comes with them, so that nothing
// is read or written beyond it. All functions throw std::invalid_argument with one sentence.
#pragma once

#include <cstdint>

#include "blocks.hpp"
#include "experts.hpp"
#include "packed.hpp"
#include "quantize.hpp"

namespace tandem {

// Larger sides could overflow 64 bits in a product of sizes.
constexpr std::int64_t kMostSide = std::int64_t{1} << 28;

Format require_format(std::int64_t number);
// Checks the columns of a matrix after padding, and how many share a scale (0: no scales).
void require_columns(Format format, std::int64_t group, std::int64_t cols);
constexpr std::int64_t blocks_of(std::int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// Checks that every part of an expert is within its bytes, and that rows are as long as the next
// matrix reads them.
void require_layout(const ExpertLayout& layout, std::int64_t expert_bytes);

// Bytes available at each address of a rearrangement.
struct RearrangementBytes {
  std::int64_t source, order, data, scales, table, factor;
  std::int64_t field_scales, field_minima;
};
// Also checks the row numbers in `order`.
void require_room(const Rearrangement& work, const RearrangementBytes& bytes);

// Bytes available at each address of a quantisation.
struct QuantizeBytes {
  std::int64_t source, importance, data, scales;
};
void require_room(const QuantizeCall& call, const QuantizeBytes& bytes);

}  // namespace tandem
