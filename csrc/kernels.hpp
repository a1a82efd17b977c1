// The functions of one instruction set. Each set has its own file; experts.cpp chooses.
#pragma once

#include <cstdint>

#include "packed.hpp"

namespace tandem {

// Padding between rows of activations: rows whose length is a power of two would compete for the
// same cache lines.
inline constexpr std::int64_t kRowPadding = 64;

// The values are those that tandem.kernels.native passes.
enum class Activation : int {
  kSwiglu = 0, kGeluTanhGate = 1, kRelu2 = 2, kLimitedSilu = 3, kSoftcapped = 4
};

struct ActivationSpec {
  Activation kind;
  // kSwiglu: g * sigmoid(alpha * g) * (u + offset), where g = min(gate, limit) and u = up clamped
  // to -limit..limit. Plain SiLU gating has alpha 1, offset 0 and an infinite limit. kLimitedSilu:
  // min(g * sigmoid(g), limit) * u with the same u. kSoftcapped: c(g, alpha) * sigmoid(g) * c(u,
  // limit), where c(x, cap) = cap * tanh(x / cap).
  float alpha, limit, offset;
};

// A group of activations with a smaller peak is rounded to zeros, because 127 / peak would be
// infinite.
constexpr float kSmallestPeak = 1e-36f;

struct Kernels {
  const char* name;

  // Quantises one row to int8 with a scale per group: quantized, scales and sums as in Activations.
  void (*quantize)(const float* row, std::int64_t cols, std::int64_t group,
                   Format format, std::int8_t* quantized, float* scales,
                   std::int32_t* sums);

  void (*to_bf16)(const float* row, std::int64_t cols, std::uint16_t* out);

  // Any number of contiguous values.
  void (*from_fp16)(const std::uint16_t* bits, std::int64_t count, float* out);
  void (*to_fp16)(const float* values, std::int64_t count, std::uint16_t* out);

  // out[t * out_stride + 16 * b + r] = row (16 b + r) of the matrix times activations t, plus bias,
  // for blocks begin..end-1 and tokens 0..num_tokens-1. Rows from `num_rows` on are not written.
  void (*matmul)(const PackedMatrix& matrix, std::int64_t begin, std::int64_t end,
                 const Activations& x, std::int64_t num_tokens, std::int64_t num_rows, float* out,
                 std::int64_t out_stride);

  // Applies an activation to one row of the first projection. In gated rows, blocks of 16 gate and
  // 16 up values alternate; `inner` receives `cols` values.
  void (*activate)(const ActivationSpec& spec, const float* row, std::int64_t cols, float* inner);

  // The machine's peaks, for comparison. `read` reads memory and returns a checksum. The others
  // multiply eight independent registers `count` times and return the number of operations. int8
  // activations are multiplied with codes of 4 bits or of 8, whose instructions may differ.
  std::uint64_t (*read)(const std::uint8_t* data, std::int64_t bytes);
  std::int64_t (*multiply_int4)(std::int64_t count);
  std::int64_t (*multiply_int8)(std::int64_t count);
  std::int64_t (*multiply_bf16)(std::int64_t count);
};

// The first `cols` values of a row, dequantised.
void read_row(const PackedMatrix& matrix, std::int64_t row, std::int64_t cols, float* out);

const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& amx_kernels();  // AVX-512 with AMX's tiles for bf16, fp8, and int8 with many tokens
const Kernels& avx512_kernels();  // AVX-512 with VNNI and BF16
const Kernels& avxvnni_kernels();  // AVX-VNNI, AVX2, FMA and F16C
const Kernels& avx2_kernels();  // AVX2, FMA and F16C
#endif

}  // namespace tandem
