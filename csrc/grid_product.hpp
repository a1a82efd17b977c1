// Products of formats with grids: lines are looked up into strips of bytes that stay in the caches,
// and strips are multiplied like any format. So no product is compiled for a grid.
#pragma once

#include <cstdint>

#include "codes.hpp"
#include "kernels.hpp"

namespace tandem {

// An instruction set's functions: one turns a row block's lines into strips (kStrips32 or
// kStrips16) and their scales, the other multiplies these.
struct GridKernels {
  void (*look_up)(const PackedMatrix& matrix, std::int64_t block, std::uint8_t* codes,
                  float* scales);
  decltype(Kernels::matmul) matmul;
};

// Like Kernels::matmul, for a format with a grid.
void multiply_grid(const GridKernels& kernels, const PackedMatrix& m, std::int64_t begin,
                   std::int64_t end, const Activations& x, std::int64_t num_tokens,
                   std::int64_t num_rows, float* out, std::int64_t stride);

#if defined(__x86_64__)
void look_up_avx2(const PackedMatrix& m, std::int64_t block, std::uint8_t* codes, float* scales);
#endif

namespace {

constexpr std::int64_t kStripsOfSuper = kSuperCols / kStripCols;

// The hardware prefetcher stops at the end of a page, and with so much arithmetic few lines are
// under way at once. Prefetching in two steps is an eighth faster (Sapphire Rapids).
constexpr std::int64_t kLinesAhead = 4096;  // into the second-level cache
constexpr std::int64_t kLinesNear = 512;  // into the first-level cache
// Factors are a stream too slow for the hardware prefetcher.
constexpr std::int64_t kFactorsAhead = 512;

template <class Lookup, Format F>
void look_up_supers(const PackedMatrix& m, std::int64_t block, std::uint8_t* codes, float* scales) {
  constexpr std::int64_t kWords = code_bytes(F, kSuperCols),
                         kGroups = kSuperCols / encoding(F).group;
  constexpr std::int64_t kFactors = scale_bytes(F, kSuperCols, encoding(F).group);
  const std::int64_t supers = m.cols / kSuperCols;
  const std::uint8_t* words = m.data + block * supers * kWords;
  const std::uint8_t* factors = m.scales + block * supers * kFactors;
  for (std::int64_t s = 0; s < supers; ++s) {
    for (std::int64_t at = 0; at < kWords; at += 64)
      __builtin_prefetch(words + kLinesAhead + at, 0, 2);
    __builtin_prefetch(factors + kFactorsAhead, 0, 3);
    Lookup::template super<F>(words, factors, codes, scales);
    words += kWords;
    factors += kFactors;
    codes += kSuperCols * kBlockRows;
    scales += kGroups * kBlockRows;
  }
}

// GridKernels::look_up; `Lookup::super<F>(words, factors, codes, scales)` looks up 256 columns.
template <class Lookup>
void look_up_block(const PackedMatrix& m, std::int64_t block, std::uint8_t* codes, float* scales) {
  each<kNumFormats>([&](auto number) {
    constexpr Format F = static_cast<Format>(decltype(number)::value);
    if constexpr (is_grid(F))
      if (m.format == F) look_up_supers<Lookup, F>(m, block, codes, scales);
  });
}

}  // namespace
}  // namespace tandem
