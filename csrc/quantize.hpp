// Quantises weights to codes and scales in the packed layout (docs/formats.md), as
// tandem.kernels.formats.quantize defines it in torch, 16 rows at a time. Every sum runs along a
// row's columns in order, without fused products, so all instruction sets give the same bytes.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "packed.hpp"

namespace tandem {

enum class SourceType : int { kFp32 = 0, kBf16 = 1, kFp16 = 2 };

struct QuantizeCall {
  Format format;
  std::int64_t group;  // columns that share a scale; 0: no scales
  bool has_search;  // whether scales are searched, if the format has a search

  std::int64_t rows, cols;
  std::int64_t padded_cols;
  SourceType type;
  const void* source;  // (rows, cols), strides in values
  std::int64_t row_stride, col_stride;
  // (padded_cols,): weights of the columns' squared errors; null: all equal.
  const float* importance;

  std::uint8_t* data;  // of the first block of 16 rows; strides in bytes
  std::int64_t data_stride;
  std::uint8_t* scales;
  std::int64_t scale_stride;
};

// Writes every block of the matrices, which threads take in pieces, in order. Sources may be in
// mapped files, which are prefetched. Returns false if a weight is not finite or too large for its
// format; then some blocks are not written.
bool quantize(std::span<const QuantizeCall> calls, const std::string& isa, int num_threads);

struct QuantizeKernels {
  bool (*round_block)(const QuantizeCall& call, std::int64_t block);
};

const QuantizeKernels& portable_quantize();
#if defined(__x86_64__)
const QuantizeKernels& avx2_quantize();
const QuantizeKernels& avx512_quantize();
#endif

}  // namespace tandem
