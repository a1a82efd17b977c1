// The small operations of a model's step: elementwise, along a dimension, and by index. Tensors
// have any strides and up to four dimensions. Arithmetic is fp32 and rounded once into the result,
// as in a tensor library.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "values.hpp"

namespace tandem {

// The first two are those of ValueType. Booleans are bytes of 0 or 1.
enum class ElementType : int { kFp32 = 0, kBf16 = 1, kInt64 = 2, kInt32 = 3, kBool = 4 };

constexpr std::int64_t element_bytes(ElementType type) {
  constexpr std::int64_t kBytes[] = {4, 2, 8, 4, 1};
  return kBytes[static_cast<int>(type)];
}

// Four dimensions: sizes, or strides in values (0 repeats a value).
using Four = std::array<std::int64_t, 4>;

// An input. Integers are exact up to 2^24.
struct Operand {
  ElementType type;
  const void* data;  // null: `scalar` everywhere
  Four strides;
  float scalar;
};

struct Target {
  ElementType type;
  void* data;
  Four strides;
};

// out = kind(a), kind(a, b) or kind(a, b, c), elementwise. The values are those of
// tandem.recording.fusion.elementwise.
enum class ElementwiseKind : int {
  kCopy, kSilu, kSigmoid, kSoftplus, kGelu, kGeluTanh, kRelu, kExp, kLog, kLog1p, kSin, kCos, kTanh,
  kNegate, kAbs, kSqrt, kRsqrt, kReciprocal, kFloor, kNot,
  kAdd, kMultiply, kSubtract, kDivide, kGreater, kLess, kPower, kIsGreater, kIsGreaterEqual, kIsLess,
  kIsLessEqual, kIsEqual, kIsUnequal, kAnd, kOr,
  kWhere,  // a ? b : c
  kClamp   // a, at least b, at most c
};
constexpr int num_operands(ElementwiseKind kind) {
  return kind < ElementwiseKind::kAdd ? 1 : kind < ElementwiseKind::kWhere ? 2 : 3;
}

struct Elementwise {
  ElementwiseKind kind;
  Four sizes;
  Operand a, b, c;
  Target out;  // may be an input
};

// kLength: the root of the sum of squares.
enum class ReductionKind : int { kSum = 0, kMean = 1, kGreatest = 2, kLeast = 3, kLength = 4 };

// out[i, j, k] = kind of x[i, j, k, 0..n-1], where sizes are (i, j, k, n).
struct Reduction {
  ReductionKind kind;
  Four sizes;
  Operand x;
  ElementType type;
  void* out;  // contiguous
  std::int64_t* index;  // of the first greatest or least; null: not requested
};

// Along the last dimension.
struct Softmax {
  Four sizes;
  Operand x;
  ElementType type;
  void* out;  // contiguous
};

// out = (x - mean) / sqrt(variance + eps) * weight + bias, along the last dimension.
struct LayerNorm {
  Four sizes;
  Operand x;
  float eps;
  const float* weight;  // or null
  const float* bias;    // or null
  ElementType type;
  void* out;  // contiguous
};

// The `top_k` greatest of the last dimension, best first; if equal, the first wins.
struct Greatest {
  Four sizes;
  Operand x;
  std::int64_t top_k;
  ElementType type;
  void* out;  // contiguous
  std::int64_t* index;
};

// An index into one dimension of a tensor, as for torch.gather.
struct DimIndex {
  const std::int64_t* index;
  Four index_strides;
  std::int64_t count, stride;  // of that dimension
};

// out[i] = x[i], where index[i] replaces one coordinate; NaN if the index is outside.
struct Lookup {
  Four sizes;
  Operand x;
  DimIndex along;
  ElementType type;
  void* out;  // contiguous
};

// out[i] = x[i], where index[i] replaces one coordinate of `out`; nothing is written if the index
// is outside.
struct Scatter {
  Four sizes;
  Operand x;
  DimIndex along;
  Target out;
};

// out[i, j, r, c] = sum over k of a[i, j, r, k] * b[i, j, k, c]. A row's result does not depend on
// other rows.
struct Product {
  Four sizes;  // i, j, r, c
  std::int64_t depth;
  Operand a, b;
  Target out;
};

// Scores of contiguous keys (count, dim): the sum over heads of weight * relu(query . key). Queries
// are (dim, heads); heads are padded with zero weights.
struct KeyScores {
  ValueType type;
  const void* keys;
  std::int64_t count, dim, heads;
  const float* queries;
  const float* weights;
  float* scores;
};
// With `best_keys`, each head gets the greatest of its products with the keys (heads); weights are
// not used.
constexpr std::int64_t padded_heads(std::int64_t heads) { return (heads + 15) / 16 * 16; }

// The functions of one instruction set.
struct TensorKernels {
  void (*combine)(const Elementwise& call);
  void (*reduce)(const Reduction& call);
  void (*softmax)(const Softmax& call);
  void (*layer_norm)(const LayerNorm& call);
  void (*find_greatest)(const Greatest& call);
  void (*look_up)(const Lookup& call);
  void (*scatter)(const Scatter& call);
  void (*multiply)(const Product& call);
  void (*score_keys)(const KeyScores& call);
  void (*best_keys)(const KeyScores& call);
};

const TensorKernels& portable_tensors();
#if defined(__x86_64__)
const TensorKernels& avx2_tensors();
const TensorKernels& avx512_tensors();
#endif

// `isa` is as in ExpertEngine.
const TensorKernels& tensor_kernels(const std::string& isa);

// The part of a call with `count` elements of dimension `dim` from `first` on.
Elementwise part_of(const Elementwise& call, int dim, std::int64_t first, std::int64_t count);
// The same for calls that write consecutive rows; `dim` is `first_of_several`.
Reduction part_of(const Reduction& call, int dim, std::int64_t first, std::int64_t count);
Softmax part_of(const Softmax& call, int dim, std::int64_t first, std::int64_t count);
Greatest part_of(const Greatest& call, int dim, std::int64_t first, std::int64_t count);
// The first dimension with more than one row; the last but one if there is none.
constexpr int first_of_several(const Four& sizes) {
  return sizes[0] > 1 ? 0 : sizes[1] > 1 ? 1 : 2;
}
// The part of a call with `count` columns from `first` on.
Product part_of(const Product& call, std::int64_t first, std::int64_t count);

}  // namespace tandem
