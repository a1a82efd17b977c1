// Small operations on rows that would each cost several calls of a tensor library per token.
#pragma once

#include <cstdint>
#include <string>

#include "values.hpp"

namespace tandem {

// What a norm's gate does: nothing, or it multiplies as silu(gate) before, as silu or sigmoid after.
enum class GateKind : int { kNone = 0, kSiluBefore = 1, kSiluAfter = 2, kSigmoidAfter = 3 };

// What of a norm in bf16 is rounded before its result: nothing, the row before it meets weights and gates,
// as most models do it, or the factor of the row.
enum class NormRounding : int { kNothing = 0, kRow = 1, kFactor = 2 };

// out = x / sqrt(mean(x^2) + eps) * weight, row by row.
struct RmsNorm {
  std::int64_t num_rows, cols;
  float eps;
  NormRounding rounding;
  ValueType type;        // of input and output
  const void* input;     // rows `input_stride` values apart
  std::int64_t input_stride;
  const float* weight;   // (weight_rows, cols), for one row after the other; or null for none
  std::int64_t weight_rows;
  GateKind gate_kind;
  const void* gate;      // rows `gate_stride` values apart
  std::int64_t gate_stride;
  void* out;             // (num_rows, cols)
};

// Rotary embedding: out = x * cos + rotated(x) * sin, where rotated swaps the halves of the first
// `rotated` values of a head and negates the new first half. In bf16 each product is rounded.
struct Rotary {
  std::int64_t num_tokens, num_heads, dim, rotated;
  ValueType type;
  const void* input;     // token t, head h at t * token_stride + h * head_stride
  std::int64_t token_stride, head_stride;
  const void* cos;       // (num_tokens, rotated)
  const void* sin;
  void* out;             // (num_tokens, num_heads, dim)
};

// Rotary embedding of neighbours: each pair of the last `turned` values is a complex number that is
// multiplied by its turn, in fp32.
struct RotaryPairs {
  std::int64_t num_tokens, num_heads, dim, turned;
  ValueType type;
  const void* input;     // token t, head h at t * token_stride + h * head_stride
  std::int64_t token_stride, head_stride;
  const float* turns;    // (num_tokens, turned): cosine and sine of each pair
  void* out;             // (num_tokens, num_heads, dim)
};

// A router's choice: softmax over the experts in fp32, the `top_k` largest, best first, divided by
// their sum if `is_normalised`, times `scale`. Of equal scores the first expert wins.
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

// A choice by ranks that are not the weights: the experts whose ranks are greatest, best first, of
// the `kept_groups` groups whose `best_of_group` greatest ranks have the greatest sum. Their scores
// are the weights, divided by sum + `epsilon` if `is_normalised`, times `scale`.
struct RankedChoice {
  std::int64_t num_tokens, num_experts, top_k;
  std::int64_t groups, kept_groups, best_of_group;  // all groups are kept if they are as many
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

// The arithmetic of one instruction set.
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

// `isa` is as of ExpertEngine.
const RowKernels& row_kernels(const std::string& isa);

}  // namespace tandem
