// The small operations that are left of a model's step besides its large ones: value by value, along
// a dimension, and by index. Tensors have any strides and up to four dimensions; arithmetic is fp32,
// rounded once into the result, as a tensor library does it.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "values.hpp"

namespace tandem {

// The first two are those of ValueType. Truth values are bytes of 0 or 1.
enum class ElementType : int { kFp32 = 0, kBf16 = 1, kInt64 = 2, kInt32 = 3, kBool = 4 };

constexpr std::int64_t element_bytes(ElementType type) {
  constexpr std::int64_t kBytes[] = {4, 2, 8, 4, 1};
  return kBytes[static_cast<int>(type)];
}

// Four-dimensional: sizes, or how many values apart the next one is (0 repeats).
using Four = std::array<std::int64_t, 4>;

// What is read: whole numbers are exact up to 2^24.
struct Operand {
  ElementType type;
  const void* data;  // null: `scalar` everywhere
  Four strides;
  float scalar;
};

// What is written.
struct Target {
  ElementType type;
  void* data;
  Four strides;
};

// out = kind(a), kind(a, b) or kind(a, b, c), value by value. The numbers are those of
// tandem.decode.recording.fusion.elementwise.
enum class ElementwiseKind : int {
  kCopy, kSilu, kSigmoid, kSoftplus, kGelu, kGeluTanh, kRelu, kExp, kLog, kLog1p, kSin, kCos, kTanh,
  kNegate, kAbs, kSqrt, kRsqrt, kReciprocal, kFloor, kNot,
  kAdd, kMultiply, kSubtract, kDivide, kGreater, kLess, kPower, kIsGreater, kIsGreaterEqual, kIsLess,
  kIsLessEqual, kIsEqual, kIsUnequal, kAnd, kOr,
  kWhere,  // a ? b : c
  kClamp   // a, not below b, not above c
};
constexpr int num_operands(ElementwiseKind kind) {
  return kind < ElementwiseKind::kAdd ? 1 : kind < ElementwiseKind::kWhere ? 2 : 3;
}

struct Elementwise {
  ElementwiseKind kind;
  Four sizes;
  Operand a, b, c;
  Target out;  // may be what is read
};

// kLength: the root of the sum of squares.
enum class ReductionKind : int { kSum = 0, kMean = 1, kGreatest = 2, kLeast = 3, kLength = 4 };

// out[i, j, k] = kind of x[i, j, k, 0..n-1], where sizes are (i, j, k, n).
struct Reduction {
  ReductionKind kind;
  Four sizes;
  Operand x;
  ElementType type;
  void* out;            // without gaps
  std::int64_t* index;  // of the first greatest or least; null: not asked for
};

// Along the last dimension.
struct Softmax {
  Four sizes;
  Operand x;
  ElementType type;
  void* out;  // without gaps
};

// out = (x - mean) / sqrt(variance + eps) * weight + bias, along the last dimension.
struct LayerNorm {
  Four sizes;
  Operand x;
  float eps;
  const float* weight;  // or null
  const float* bias;    // or null
  ElementType type;
  void* out;  // without gaps
};

// The `top_k` greatest of the last dimension, best first; of equal ones the first wins.
struct Greatest {
  Four sizes;
  Operand x;
  std::int64_t top_k;
  ElementType type;
  void* out;  // without gaps
  std::int64_t* index;
};

// An index into one dimension of a tensor, as torch.gather takes it.
struct DimIndex {
  const std::int64_t* index;
  Four index_strides;
  std::int64_t count, stride;  // of that dimension
};

// out[i] = x[i with index[i] along one dimension]: NaN where the index is outside.
struct Lookup {
  Four sizes;
  Operand x;
  DimIndex along;
  ElementType type;
  void* out;  // without gaps
};

// out[i with index[i] along one dimension] = x[i]: nothing is written where the index is outside.
struct Scatter {
  Four sizes;
  Operand x;
  DimIndex along;
  Target out;
};

// out[i, j, r, c] = sum over k of a[i, j, r, k] * b[i, j, k, c]. A row's result does not depend on the
// others.
struct Product {
  Four sizes;  // i, j, r, c
  std::int64_t depth;
  Operand a, b;
  Target out;
};

// Scores of keys (count, dim) that lie side by side: the sum over heads of weight * relu(query . key).
// Queries are (dim, heads); heads are padded with weights of zero.
struct KeyScores {
  ValueType type;
  const void* keys;
  std::int64_t count, dim, heads;
  const float* queries;
  const float* weights;
  float* scores;
};
// With `best_keys` a head has the greatest of its products with the keys, (heads); weights are not read.
constexpr std::int64_t padded_heads(std::int64_t heads) { return (heads + 15) / 16 * 16; }

// The arithmetic of one instruction set.
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

// `isa` is as of ExpertEngine.
const TensorKernels& tensor_kernels(const std::string& isa);

// The part of a call whose dimension `dim` begins at `first` and has `count`.
Elementwise part_of(const Elementwise& call, int dim, std::int64_t first, std::int64_t count);
// The same of calls that write their rows one after the other; `dim` is `first_of_several`.
Reduction part_of(const Reduction& call, int dim, std::int64_t first, std::int64_t count);
Softmax part_of(const Softmax& call, int dim, std::int64_t first, std::int64_t count);
Greatest part_of(const Greatest& call, int dim, std::int64_t first, std::int64_t count);
// The first dimension that has several rows; the last but one if none has.
constexpr int first_of_several(const Four& sizes) {
  return sizes[0] > 1 ? 0 : sizes[1] > 1 ? 1 : 2;
}
// The part of a call whose columns begin at `first`.
Product part_of(const Product& call, std::int64_t first, std::int64_t count);

}  // namespace tandem
