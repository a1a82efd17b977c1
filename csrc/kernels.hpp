// The arithmetic of one instruction set. One file per set implements it; experts.cpp chooses.
#pragma once

#include <cstdint>

#include "packed.hpp"

namespace tandem {

// Between rows of activations: those whose length is a power of two would share the same lines of the cache.
inline constexpr std::int64_t kRowPadding = 64;

// The numbers are those that tandem.kernels.native passes.
enum class Activation : int {
  kSwiglu = 0, kGeluTanhGate = 1, kRelu2 = 2, kLimitedSilu = 3, kSoftcapped = 4
};

struct ActivationSpec {
  Activation kind;
  // kSwiglu: g * sigmoid(alpha * g) * (u + offset) with g = min(gate, limit) and u = up clamped to
  // -limit..limit. Plain SiLU gating has alpha 1, offset 0 and an infinite limit.
  // kLimitedSilu: min(g * sigmoid(g), limit) * u with that u.
  // kSoftcapped: c(g, alpha) * sigmoid(g) * c(u, limit) with c(x, cap) = cap * tanh(x / cap).
  float alpha, limit, offset;
};

// A group of activations below this is rounded to zeros: 127 / peak would be infinite.
constexpr float kSmallestPeak = 1e-36f;

struct Kernels {
  const char* name;

  // Rounds one row to int8 with a scale per group: quantized, scales and sums as in Activations.
  void (*quantize)(const float* row, std::int64_t cols, std::int64_t group,
                   Format format, std::int8_t* quantized, float* scales,
                   std::int32_t* sums);

  void (*to_bf16)(const float* row, std::int64_t cols, std::uint16_t* out);

  // Any number of values that lie side by side.
  void (*from_fp16)(const std::uint16_t* bits, std::int64_t count, float* out);
  void (*to_fp16)(const float* values, std::int64_t count, std::uint16_t* out);

  // out[t * out_stride + 16 * b + r] = row (16 b + r) of the matrix times activations t, plus bias,
  // for blocks begin..end-1 and tokens 0..num_tokens-1. Rows from `num_rows` on are not written.
  void (*matmul)(const PackedMatrix& matrix, std::int64_t begin, std::int64_t end,
                 const Activations& x, std::int64_t num_tokens, std::int64_t num_rows, float* out,
                 std::int64_t out_stride);

  // Applies an activation to one row of the first projection. Gated rows come in blocks of 16 gate
  // and 16 up values in turn; `inner` receives `cols` values.
  void (*activate)(const ActivationSpec& spec, const float* row, std::int64_t cols, float* inner);

  // What the machine can do, for comparison: reads memory and returns a checksum; multiplies
  // `count` times eight independent registers and returns the operations. Activations of int8 are
  // multiplied with codes of 4 bits or of 8, for which instructions may differ.
  std::uint64_t (*read)(const std::uint8_t* data, std::int64_t bytes);
  std::int64_t (*multiply_int4)(std::int64_t count);
  std::int64_t (*multiply_int8)(std::int64_t count);
  std::int64_t (*multiply_bf16)(std::int64_t count);
};

// The first `cols` values of a row, as the codes stand for them.
void read_row(const PackedMatrix& matrix, std::int64_t row, std::int64_t cols, float* out);

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& amx_kernels();      // AVX-512's, with bf16, fp8, and much int8, on tiles
const Kernels& avx512_kernels();   // AVX-512 with VNNI and BF16
const Kernels& avxvnni_kernels();  // AVX-VNNI, AVX2, FMA and F16C
const Kernels& avx2_kernels();     // AVX2, FMA and F16C
#endif

}  // namespace tandem
