// AMX: AVX-512's kernels, with products of bf16 and fp8 on tiles, those of a few tokens as tiles add them up,
// and those of int8 with many tokens on tiles where scales are of many columns.
#include <immintrin.h>

#include <algorithm>

#include "avx512/bf16_tiles.hpp"
#include "avx512/fp8_tiles.hpp"
#include "avx512/integer_tiles.hpp"
#include "avx512/many_tokens.hpp"
#include "avx512/tile_order.hpp"
#include "kernels.hpp"

namespace tandem {
namespace {

bool is_on_integer_tiles(const PackedMatrix& m, std::int64_t num_tokens) {
  return is_integer(m.format) && has_vector_kernels(m.format) && m.group == kColumnsOnTiles &&
         num_tokens >= kFewestOnTiles;
}

void matmul(const PackedMatrix& m, std::int64_t begin, std::int64_t end, const Activations& x,
            std::int64_t num_tokens, std::int64_t num_rows, float* out, std::int64_t stride) {
  end = std::min(end, (num_rows + kBlockRows - 1) / kBlockRows);
  const auto multiply = [&](auto few, auto many, std::int64_t most_few) {
    (num_tokens <= most_few ? few : many)(m, begin, end, x, num_tokens, num_rows, out, stride);
  };
  if (m.format == Format::kBf16)
    return multiply(multiply_in_tile_order<Format::kBf16>, multiply_bf16,
                    kMostInTileOrder<Format::kBf16>);
  if (m.format == Format::kFp8)
    return multiply(multiply_in_tile_order<Format::kFp8>, multiply_fp8,
                    kMostInTileOrder<Format::kFp8>);
  if (!is_on_integer_tiles(m, num_tokens))
    return avx512_kernels().matmul(m, begin, end, x, num_tokens, num_rows, out, stride);
  each<kNumFormats>([&](auto number) {
    constexpr Format F = static_cast<Format>(decltype(number)::value);
    if constexpr (is_integer(F) && encoding(F).group == 0)
      if (m.format == F)
        multiply_panels<F, OnTiles<F, kColumnsOnTiles>>(m, begin, end, x, num_tokens, num_rows, out,
                                                        stride);
  });
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels kernels = [] {
    Kernels found = avx512_kernels();
    found.name = "amx";
    found.matmul = matmul;
    found.multiply_int4 = found.multiply_int8 = multiply_int8_tiles;
    found.multiply_bf16 = multiply_bf16_tiles;
    return found;
  }();
  return kernels;
}

}  // namespace tandem
