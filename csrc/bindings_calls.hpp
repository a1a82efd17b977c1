// Calls that Python runs or adds to a program, built from checked tensors.
#pragma once

#include <vector>

#include "attention.hpp"
#include "bindings.hpp"
#include "bindings_tensor.hpp"
#include "dense.hpp"
#include "routed.hpp"

namespace tandem {

// Matrices of one format times the same input (.., in_features), which is contiguous.
struct DenseProduct {
  std::int64_t num_tokens, in_features;
  ValueType type;
  const void* input;
  std::vector<void*> outputs;

  DenseProduct(const std::vector<const DenseMatrix*>& matrices, const Tensor& x,
               const std::vector<Tensor>& outputs);
};

// Matrices of equal sizes with one input each: (tokens, matrices, in_features) to (tokens,
// matrices, rows).
struct GroupsProduct {
  std::int64_t num_tokens, in_features, token_stride, group_stride, out_stride;
  ValueType type;
  const void* input;
  std::vector<void*> outputs;

  GroupsProduct(const std::vector<const DenseMatrix*>& matrices, const Tensor& x,
                const Tensor& out);
};

RowsCall rows_call(const DenseMatrix& matrix, const Tensor& numbers, const Tensor& out);

// New keys and values are (KV heads, tokens, dim), queries and their results (heads, tokens, dim).
// Layers with compressed keys have `compressed` (1, tokens, dim), layers with a bias by distance
// `bias_states` (heads, tokens, dim); `sinks` are (tokens, heads).
void take_new(AttentionCall& call, const Tensor& slots, const Tensor& positions, const Tensor& key,
              const Tensor& value, const MaybeTensor& compressed);
void take_query(AttentionCall& call, const Tensor& slots, const Tensor& positions,
                const Tensor& query, const MaybeTensor& selected, const MaybeTensor& bias_states,
                const MaybeTensor& sinks, const Tensor& out);

RoutedCall routed_call(const RoutedLayer& layer, const Tensor& hidden, const Tensor& index,
                       const Tensor& weights, const Tensor& out);

}  // namespace tandem
