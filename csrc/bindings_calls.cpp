#include "bindings_calls.hpp"

namespace tandem {
namespace {

// Checks that all matrices can share one converted input; returns the first matrix.
const DenseMatrix& first_of(const std::vector<const DenseMatrix*>& matrices) {
  require(!matrices.empty() && matrices.front() != nullptr, "at least one matrix");
  const PackedMatrix& first = matrices.front()->packed;
  for (const DenseMatrix* matrix : matrices)
    require(matrix != nullptr && matrix->packed.format == first.format &&
                matrix->packed.group == first.group && matrix->packed.cols == first.cols &&
                matrix->in_features == matrices.front()->in_features,
            "matrices of one format and one number of inputs");
  return *matrices.front();
}

// A tensor (heads, tokens, dim) in the kernels' form.
TokenView token_view(const Tensor& x, const char* name, ValueType type, std::int64_t heads,
                     std::int64_t tokens, std::int64_t dim) {
  const HeadView view = heads_of(x, name, type, heads, tokens, dim);
  return {view.data, view.head_stride, view.token_stride};
}

void take_tokens(AttentionCall& call, std::int64_t count, const Tensor& slots,
                 const Tensor& positions) {
  call.num_tokens = count;
  call.rows = slots.dense<const std::int64_t>("slots", count);
  call.positions = positions.dense<const std::int64_t>("positions", count);
}

}  // namespace

DenseProduct::DenseProduct(const std::vector<const DenseMatrix*>& matrices, const Tensor& x,
                           const std::vector<Tensor>& given) {
  in_features = first_of(matrices).in_features;
  require(given.size() == matrices.size(), "as many outputs as matrices");
  if (x.size(-1) != in_features) x.refuse("x", std::to_string(in_features) + " values per row");
  type = x.value_type("x");
  num_tokens = x.count() / in_features;
  input = x.values("x", type, x.count());
  for (std::size_t i = 0; i < given.size(); ++i)
    outputs.push_back(given[i].values("out", type, num_tokens * matrices[i]->rows, true));
}

GroupsProduct::GroupsProduct(const std::vector<const DenseMatrix*>& matrices, const Tensor& x,
                             const Tensor& out) {
  const DenseMatrix& first = first_of(matrices);
  const auto groups = static_cast<std::int64_t>(matrices.size());
  for (const DenseMatrix* matrix : matrices)
    require(matrix->rows == first.rows, "matrices of equal sizes");
  in_features = first.in_features;
  type = x.value_type("x");
  const HeadView view = heads_of(x, "x", type, -1, groups, in_features);
  num_tokens = x.size(0);
  input = view.data;
  token_stride = view.token_stride;
  group_stride = view.head_stride;
  out_stride = groups * first.rows;
  require(num_tokens <= 1 || token_stride > 0, "a stride of at least 1 between tokens");
  require(groups == 1 || group_stride > 0, "a stride of at least 1 between groups");
  auto* to = static_cast<std::uint8_t*>(out.values("out", type, num_tokens * out_stride, true));
  for (std::int64_t i = 0; i < groups; ++i) outputs.push_back(to + i * first.rows * value_bytes(type));
}

RowsCall rows_call(const DenseMatrix& matrix, const Tensor& numbers, const Tensor& out) {
  const std::int64_t count = numbers.count();
  const ValueType type = out.value_type("out");
  return {&matrix, matrix.in_features, count, numbers.dense<const std::int64_t>("numbers", count),
          type, out.values("out", type, count * matrix.in_features, true)};
}

void take_new(AttentionCall& call, const Tensor& slots, const Tensor& positions, const Tensor& key,
              const Tensor& value, const MaybeTensor& compressed) {
  take_tokens(call, key.size(1), slots, positions);
  require(compressed.has_value() == (call.compressed.ratio > 0),
          "compressed keys if, and only if, the layer has some");
  call.type = key.value_type("key");
  call.new_key = token_view(key, "key", call.type, call.num_kv_heads, call.num_tokens,
                            call.layout.key_dim);
  call.new_value = token_view(value, "value", call.type, call.num_kv_heads, call.num_tokens,
                              call.layout.value_dim);
  if (compressed)
    call.compressed.new_key =
        token_view(*compressed, "compressed", call.type, 1, call.num_tokens, call.layout.key_dim);
}

void take_query(AttentionCall& call, const Tensor& slots, const Tensor& positions,
                const Tensor& query, const MaybeTensor& selected, const MaybeTensor& bias_states,
                const MaybeTensor& sinks, const Tensor& out) {
  const ValueType type = query.value_type("query");
  take_tokens(call, query.size(1), slots, positions);
  call.type = type;
  call.query = token_view(query, "query", type, call.num_heads, call.num_tokens,
                          call.layout.key_dim);
  call.num_selected = selected ? selected->size(-1) : 0;
  call.selected = nullptr;
  if (selected) {
    require(!call.is_joint || call.compressed.ratio > 0,
            "no selection from a layer that has only a window");
    require(call.num_selected > 0, "at least one selected position");
    require(call.selected_heads == 1 || call.compressed.ratio == 0,
            "one selection of compressed keys for all heads");
    call.selected = selected->dense<const std::int32_t>(
        "selected", call.num_tokens * call.selected_heads * call.num_selected);
  }
  require(bias_states.has_value() == (call.bias.dim > 0),
          "states if, and only if, the layer has a bias by distance");
  if (bias_states)
    call.bias.states = token_view(*bias_states, "bias_states", type, call.num_heads, call.num_tokens,
                                  call.bias.dim);
  call.token_sinks =
      sinks ? sinks->values("sinks", type, call.num_tokens * call.num_heads) : nullptr;
  call.out = out.values("out", type, call.num_tokens * call.num_heads * call.layout.value_dim, true);
}

RoutedCall routed_call(const RoutedLayer& layer, const Tensor& hidden, const Tensor& index,
                       const Tensor& weights, const Tensor& out) {
  index.require_dims("index", 2);
  const std::int64_t tokens = index.size(0), top_k = index.size(1);
  const std::int64_t values = tokens * layer.layout.hidden_size;
  const ValueType type = hidden.token_type("hidden"), weight_type = weights.token_type("weights");
  return {tokens, top_k, type, hidden.values("hidden", type, values),
          index.dense<const std::int64_t>("index", tokens * top_k), weight_type,
          weights.values("weights", weight_type, tokens * top_k),
          out.values("out", type, values, true)};
}

}  // namespace tandem
