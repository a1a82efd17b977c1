// Small row-wise operations, each of which would take several calls of a tensor library per token.
#pragma once

#include <cstdint>
#include <string>

#include "values.hpp"

namespace tandem {

// How a norm's gate is applied: not at all, as silu(gate) before the norm, or as silu or sigmoid
// after it.
enum class GateKind : int { kNone = 0, kSiluBefore = 1, kSiluAfter = 2, kSigmoidAfter = 3 };

// What a bf16 norm rounds before its result: nothing; the row before weights and gates, as in most
// models; or the row's factor.
enum class NormRounding : int { kNothing = 0, kRow = 1, kFactor = 2 };

// out = x / sqrt(mean(x^2) + eps) * weight, row by row.
struct RmsNorm {
  std::int64_t num_rows, cols;
  float eps;
  NormRounding rounding;
  ValueType type;  // of input and output
  const void* input;  // `input_stride` values between rows
  std::int64_t input_stride;
  const float* weight;  // (weight_rows, cols), used for rows in turn; null: no weight
  std::int64_t weight_rows;
  GateKind gate_kind;
  const void* gate;  // `gate_stride` values between rows
  std::int64_t gate_stride;
  void* out;             // (num_rows, cols)
};

// Rotary embedding: out = x * cos + rotated(x) * sin, where rotated(x) swaps the halves of a head's
// first `rotated` values and negates the new first half. In bf16 each product is rounded.
struct Rotary {
  std::int64_t num_tokens, num_heads, dim, rotated;
  ValueType type;
  const void* input;     // token t, head h at t * token_stride + h * head_stride
  std::int64_t token_stride, head_stride;
  const void* cos;       // (num_tokens, rotated)
  const void* sin;
  void* out;             // (num_tokens, num_heads, dim)
};

// Rotary embedding of neighbours: each pair of the last `turned` values is a complex number and is
// multiplied by its rotation, in fp32.
struct RotaryPairs {
  std::int64_t num_tokens, num_heads, dim, turned;
  ValueType type;
  const void* input;     // token t, head h at t * token_stride + h * head_stride
  std::int64_t token_stride, head_stride;
  const float* turns;    // (num_tokens, turned): cosine and sine of each pair
  void* out;             // (num_tokens, num_heads, dim)
};

// A router's choice: softmax over the experts in fp32; the `top_k` largest, best first, divided by
// their sum if `is_normalised`, times `scale`. If scores are equal, the first expert wins.
struct Choice {
  std::int64_t num_tokens, num_experts, top_k;
  bool is_normalised;
  float scale;
  ValueType type;        // of logits
  const void* logits;    // (num_tokens, num_experts)
  ValueType weight_type;
  void* weights;         // (num_tokens, top_k)
  std::int64_t* index;   // (num_tokens, top_k)
};
void choose(const Choice& call);

// A choice by ranks that differ from the weights. Keeps the `kept_groups` groups with the greatest
// sum of their `best_of_group` greatest ranks. Chooses the experts of greatest rank there, best
// first. Their scores are the weights, divided by sum + `epsilon` if `is_normalised`, times
// `scale`.
struct RankedChoice {
  std::int64_t num_tokens, num_experts, top_k;
  // If both numbers are equal, all groups are kept.
  std::int64_t groups, kept_groups, best_of_group;
  bool is_normalised;
  float epsilon, scale;
  ValueType score_type;
  const void* scores;    // (num_tokens, num_experts)
  const float* ranks;    // (num_tokens, num_experts)
  ValueType weight_type;
  void* weights;         // (num_tokens, top_k)
  std::int64_t* index;   // (num_tokens, top_k)
};
void choose(const RankedChoice& call);

// The functions of one instruction set.
struct RowKernels {
  void (*norm)(const RmsNorm& call);
  void (*rotate)(const Rotary& call);
  void (*rotate_pairs)(const RotaryPairs& call);
};

const RowKernels& portable_rows();
#if defined(__x86_64__)
const RowKernels& avx2_rows();
const RowKernels& avx512_rows();
#endif

// `isa` is as in ExpertEngine.
const RowKernels& row_kernels(const std::string& isa);

}  // namespace tandem
