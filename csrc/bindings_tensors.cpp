// The Python bindings of small tensor operations, as steps of a program.
#include <nanobind/nanobind.h>

#include <utility>

#include "bindings.hpp"
#include "bindings_tensor.hpp"
#include "program.hpp"
#include "tensor_ops.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

// Sizes or strides, extended to four dimensions.
Four in_four(const Tensor& x, bool are_strides) {
  Four found{1, 1, 1, 1};
  if (are_strides) found = {};
  for (int dim = -1; dim >= -x.dims(); --dim)
    found[4 + dim] = are_strides ? x.stride(dim) : x.size(dim);
  return found;
}

Four sizes_of(const Tensor& x, const char* name) {
  if (x.dims() > 4) x.refuse(name, "at most four dimensions");
  return in_four(x, false);
}

// An operand with these sizes; the last `but` of them may differ.
Operand operand(const Tensor& x, const char* name, const Four& sizes, int but = 0) {
  const Four own = sizes_of(x, name);
  for (int i = 0; i < 4 - but; ++i)
    if (own[i] != sizes[i]) x.refuse(name, "the sizes of the result");
  return {x.element_type(name), x.data(name), in_four(x, true), 0};
}

Target target(const Tensor& x, const char* name) {
  sizes_of(x, name);
  return {x.element_type(name), x.data(name, true), in_four(x, true)};
}

// An operand: a tensor of these sizes, a number in its place, or None.
Operand given(nb::handle value, const char* name, const Four& sizes) {
  if (value.is_none()) return {};
  if (PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr()))
    return {ElementType::kFp32, nullptr, {}, static_cast<float>(PyFloat_AsDouble(value.ptr()))};
  Tensor x;
  if (!nb::try_cast(value, x)) refuse_call(std::string(name) + " is neither a tensor nor a number");
  return operand(x, name, sizes);
}

std::int64_t product(const Four& sizes, int first = 0, int last = 3) {
  std::int64_t count = 1;
  for (int i = first; i <= last; ++i) count *= sizes[i];
  return count;
}

void* written(const Tensor& out, std::int64_t count) {
  out.element_type("out");
  return out.values("out", out.element(), count, true);
}

void add_elementwise(Program& program, int kind, const Tensor& out, nb::handle a, nb::handle b,
                     nb::handle c) {
  require(kind >= 0 && kind <= static_cast<int>(ElementwiseKind::kClamp), "a known operation");
  const Target to = target(out, "out");
  const Four sizes = sizes_of(out, "out");
  const Elementwise call{static_cast<ElementwiseKind>(kind), sizes, given(a, "a", sizes),
                         given(b, "b", sizes), given(c, "c", sizes), to};
  const int operands = 1 + !b.is_none() + !c.is_none();
  require(!a.is_none() && operands == num_operands(call.kind),
          "as many operands as the operation takes");
  program.add(call);
}

void add_reduction(Program& program, int kind, const Tensor& x, const Tensor& out,
                   const MaybeTensor& index) {
  require(kind >= 0 && kind <= static_cast<int>(ReductionKind::kLength), "a known operation");
  const Four sizes = sizes_of(x, "x");
  require(sizes[3] > 0, "at least one value to reduce");
  const std::int64_t rows = product(sizes, 0, 2);
  program.add(Reduction{static_cast<ReductionKind>(kind), sizes, operand(x, "x", sizes),
                        out.element_type("out"), written(out, rows),
                        dense_or_null<std::int64_t>(index, "index", rows)});
}

void add_softmax(Program& program, const Tensor& x, const Tensor& out) {
  const Four sizes = sizes_of(x, "x");
  program.add(Softmax{sizes, operand(x, "x", sizes), out.element_type("out"),
                      written(out, product(sizes))});
}

void add_layer_norm(Program& program, const Tensor& x, float eps, const MaybeTensor& weight,
                    const MaybeTensor& bias, const Tensor& out) {
  const Four sizes = sizes_of(x, "x");
  program.add(LayerNorm{sizes, operand(x, "x", sizes), eps,
                        dense_or_null<const float>(weight, "weight", sizes[3]),
                        dense_or_null<const float>(bias, "bias", sizes[3]),
                        out.element_type("out"), written(out, product(sizes))});
}

// Chooses as many values per row as `out` and `index` have room for.
void add_greatest(Program& program, const Tensor& x, const Tensor& out, const Tensor& index) {
  const Four sizes = sizes_of(x, "x");
  const std::int64_t rows = product(sizes, 0, 2), top_k = out.size(-1);
  require(top_k <= sizes[3], "a top_k of at most the number of values");
  program.add(Greatest{sizes, operand(x, "x", sizes), top_k, out.element_type("out"),
                       written(out, rows * top_k),
                       index.dense<std::int64_t>("index", rows * top_k)});
}

// The index along a dimension of `x`, and the strides of `x` without that dimension. `index` must
// have as many dimensions, and only in this one it may be longer.
std::pair<DimIndex, Four> dim_index(const Tensor& x, const char* name, int dim,
                                    const Tensor& index) {
  sizes_of(x, name);
  const Four sizes = sizes_of(index, "index");
  if (index.element() != Element::kInt64 || index.dims() != x.dims() || dim < 0 || dim >= x.dims())
    index.refuse("index", "int64 with as many dimensions as " + std::string(name));
  const int along = 4 - x.dims() + dim;
  Four strides = in_four(x, true);
  const Four own = in_four(x, false);
  for (int i = 0; i < 4; ++i)
    if (i != along && sizes[i] > own[i])
      index.refuse("index", "no size greater than that of " + std::string(name));
  const std::int64_t stride = strides[along];
  strides[along] = 0;
  return {{static_cast<const std::int64_t*>(index.data("index")),
           in_four(index, true), own[along], stride},
          strides};
}

// out[i] = x[i], where index[i] replaces the coordinate in dimension `dim`.
void add_lookup(Program& program, const Tensor& x, int dim, const Tensor& index,
                const Tensor& out) {
  const auto [where, strides] = dim_index(x, "x", dim, index);
  const Four sizes = sizes_of(index, "index");
  Operand read = operand(x, "x", sizes, 4);
  const bool is_whole = out.element() == Element::kInt64;
  if (is_whole != (x.element() == Element::kInt64))
    x.refuse("x", "integers if, and only if, out has integers");
  read.strides = strides;
  program.add(Lookup{sizes, read, where, out.element_type("out"), written(out, product(sizes))});
}

// out[i] = x[i], where index[i] replaces the coordinate in dimension `dim` of `out`.
void add_scatter(Program& program, nb::handle x, int dim, const Tensor& index, const Tensor& out) {
  Target to = target(out, "out");
  const auto [where, strides] = dim_index(out, "out", dim, index);
  to.strides = strides;
  const Four sizes = sizes_of(index, "index");
  require(!x.is_none(), "a tensor to write");
  program.add(Scatter{sizes, given(x, "x", sizes), where, to});
}

// (.., rows, depth) times (.., depth, columns); the other dimensions are equal.
void add_product(Program& program, const Tensor& a, const Tensor& b, const Tensor& out) {
  const Four sizes = sizes_of(out, "out"), left = sizes_of(a, "a"), right = sizes_of(b, "b");
  const Operand first = operand(a, "a", sizes, 1), second = operand(b, "b", sizes, 2);
  if (left[3] != right[2] || right[3] != sizes[3])
    b.refuse("b", "(.., " + std::to_string(left[3]) + ", " + std::to_string(sizes[3]) + ")");
  program.add(Product{sizes, left[3], first, second, target(out, "out")});
}

constexpr std::int64_t kMostBlock = std::int64_t{1} << 30;

// Selects as many positions as a row of `out` has, by keys (n, dim) and queries (n, heads, dim). If
// `block` is given, selects blocks for each head, and `out` is (n, heads, most).
void add_selection(Program& program, const IndexLayer& layer, const Tensor& slots,
                   const Tensor& positions, float scale, const Tensor& key, const Tensor& query,
                   const MaybeTensor& weights, const Tensor& out, std::int64_t block,
                   std::int64_t num_local) {
  const std::int64_t num_tokens = key.size(0), heads = query.size(1), most = out.size(-1);
  const Four none{};
  key.strided("key", key.element(), {num_tokens, layer.dim});
  query.strided("query", query.element(), {num_tokens, heads, layer.dim});
  if (weights) weights->strided("weights", weights->element(), {num_tokens, heads});
  out.require_dims("out", block > 0 ? 3 : 2);
  require(most > 0 && block >= 0 && block <= kMostBlock && num_local >= 0,
          "one position to be selected or more, in blocks of 2^30 at most");
  require(block == 0 || (!weights && layer.ratio == 1 && out.size(1) == heads),
          "blocks of tokens' own keys without weights, by head");
  const std::int64_t num_rows = block > 0 ? num_tokens * heads : num_tokens;
  program.add(IndexSelection{&layer,
                             {num_tokens, slots.dense<const std::int64_t>("slots", num_tokens),
                              positions.dense<const std::int64_t>("positions", num_tokens), false},
                             heads, most, scale, operand(key, "key", none, 4),
                             operand(query, "query", none, 4),
                             weights ? operand(*weights, "weights", none, 4) : Operand{},
                             out.dense<std::int32_t>("out", num_rows * most), block, num_local});
}

}  // namespace

void bind_index_keys(nb::module_& m) {
  nb::class_<IndexLayer>(m, "IndexLayer")
      .def("__init__", [](IndexLayer* layer) { new (layer) IndexLayer{}; })
      .def("set_keys", [](IndexLayer& layer, const Tensor& keys, std::int64_t ratio) {
        keys.require_dims("keys", 3);
        require(ratio >= 1, "at least one token per key");
        const ValueType type = keys.value_type("keys");
        layer = {type, keys.values("keys", type, keys.count(), true), keys.size(1), keys.size(2),
                 keys.size(0), ratio};
      }, nb::arg(), nb::arg() = 1);
}

void bind_tensor_ops(nb::class_<Program>& program) {
  program
      .def("add_elementwise", &add_elementwise, nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none() = nb::none(), nb::arg().none() = nb::none())
      .def("add_reduction", &add_reduction)
      .def("add_softmax", &add_softmax)
      .def("add_layer_norm", &add_layer_norm)
      .def("add_greatest", &add_greatest)
      .def("add_lookup", &add_lookup)
      .def("add_scatter", &add_scatter)
      .def("add_product", &add_product)
      .def("add_selection", &add_selection, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg().none(), nb::arg(), nb::arg() = 0, nb::arg() = 0,
           nb::keep_alive<1, 2>());
}

}  // namespace tandem
