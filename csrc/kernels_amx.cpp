// AMX: products of a prompt on tiles of bf16, whatever its format; those of steps with many tokens on
// tiles of int8, with AVX-512's bits, where scales are of many columns. All else is AVX-512's.
#include <immintrin.h>

#include <algorithm>

#include "avx512/bf16_tiles.hpp"
#include "avx512/integer_tiles.hpp"
#include "avx512/many_tokens.hpp"
#include "kernels.hpp"

namespace tandem {
namespace {

// Calls with<F>() for the matrix' format.
template <typename With>
void with_format(Format format, const With& with) {
  each<kNumFormats>([&](auto number) {
    constexpr Format F = static_cast<Format>(decltype(number)::value);
    if (format == F) with.template operator()<F>();
  });
}

void multiply_step(const PackedMatrix& m, std::int64_t begin, std::int64_t end,
                   const Activations& x, std::int64_t num_tokens, std::int64_t num_rows, float* out,
                   std::int64_t stride) {
  const bool is_on_tiles = is_integer(m.format) && has_vector_kernels(m.format) &&
                           m.group == kColumnsOnTiles && num_tokens >= kFewestOnTiles;
  if (!is_on_tiles)
    return avx512_kernels().matmul(m, begin, end, x, num_tokens, num_rows, out, stride);
  end = std::min(end, (num_rows + kBlockRows - 1) / kBlockRows);
  with_format(m.format, [&]<Format F>() {
    if constexpr (is_integer(F) && encoding(F).group == 0)
      multiply_panels<F, OnTiles<F, kColumnsOnTiles>>(m, begin, end, x, num_tokens, num_rows, out,
                                                      stride);
  });
}

void multiply_prompt(const PackedMatrix& m, std::int64_t begin, std::int64_t end,
                     const Activations& x, std::int64_t num_tokens, std::int64_t num_rows,
                     float* out, std::int64_t stride) {
  if (!has_lines(m.format))
    return avx512_kernels().matmul(m, begin, end, x, num_tokens, num_rows, out, stride);
  with_format(m.format, [&]<Format F>() {
    if constexpr (has_lines(F))
      multiply_lines<F>(m, begin, end, x, num_tokens, num_rows, out, stride);
  });
}

ActivationForm form_of_prompt(Format format) {
  return has_lines(format) ? ActivationForm::kBf16 : activation_form(format);
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels kernels = [] {
    Kernels found = avx512_kernels();
    found.name = "amx";
    found.matmul = multiply_step;
    found.multiply_int4 = found.multiply_int8 = multiply_whole_tiles;
    found.of_prompts = &amx_prompt_kernels();
    return found;
  }();
  return kernels;
}

const Kernels& amx_prompt_kernels() {
  static const Kernels kernels = [] {
    Kernels found = avx512_kernels();
    found.name = "amx";
    found.matmul = multiply_prompt;
    found.multiply_int4 = found.multiply_int8 = found.multiply_bf16 = multiply_bf16_tiles;
    found.form = form_of_prompt;
    return found;
  }();
  return kernels;
}

}  // namespace tandem
