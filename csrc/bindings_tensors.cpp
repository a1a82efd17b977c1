// What Python sees of small tensor operations, as steps of a program.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <tuple>

#include "bindings.hpp"
#include "program.hpp"
#include "tensor_ops.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

// The type of a tensor's values, its address, its strides, and what stands for it where that is 0.
using View = std::tuple<int, std::uintptr_t, Four, float>;
// The type of a tensor without gaps, and its address.
using Dense = std::tuple<int, std::uintptr_t>;
// The address of an index, its strides, and the number and distance of the places it chooses from.
using Index = std::tuple<std::uintptr_t, Four, std::int64_t, std::int64_t>;

Operand operand(const View& view) {
  const auto& [type, data, strides, scalar] = view;
  return {static_cast<ElementType>(type), pointer<const void>(data), strides, scalar};
}

Target target(const View& view) {
  const auto& [type, data, strides, scalar] = view;
  return {static_cast<ElementType>(type), pointer<void>(data), strides};
}

ElementType type_of(const Dense& out) { return static_cast<ElementType>(std::get<0>(out)); }
void* data_of(const Dense& out) { return pointer<void>(std::get<1>(out)); }

Places places(const Index& index) {
  const auto& [data, strides, count, stride] = index;
  return {pointer<const std::int64_t>(data), strides, count, stride};
}

void add_elementwise(Program& program, int kind, const Four& sizes, const View& a, const View& b,
                     const View& c, const View& out) {
  program.add(Elementwise{static_cast<ElementwiseKind>(kind), sizes, operand(a), operand(b),
                          operand(c), target(out)});
}

void add_reduction(Program& program, int kind, const Four& sizes, const View& x, const Dense& out,
                   std::uintptr_t index) {
  program.add(Reduction{static_cast<ReductionKind>(kind), sizes, operand(x), type_of(out),
                        data_of(out), pointer<std::int64_t>(index)});
}

void add_softmax(Program& program, const Four& sizes, const View& x, const Dense& out) {
  program.add(Softmax{sizes, operand(x), type_of(out), data_of(out)});
}

void add_layer_norm(Program& program, const Four& sizes, const View& x, float eps,
                    std::uintptr_t weight, std::uintptr_t bias, const Dense& out) {
  program.add(LayerNorm{sizes, operand(x), eps, pointer<const float>(weight),
                        pointer<const float>(bias), type_of(out), data_of(out)});
}

void add_greatest(Program& program, const Four& sizes, const View& x, std::int64_t top_k,
                  const Dense& out, std::uintptr_t index) {
  if (top_k < 0 || top_k > sizes[3])
    throw std::invalid_argument("expected as many values as are chosen");
  program.add(Greatest{sizes, operand(x), top_k, type_of(out), data_of(out),
                       pointer<std::int64_t>(index)});
}

void add_lookup(Program& program, const Four& sizes, const View& x, const Index& index,
                const Dense& out) {
  program.add(Lookup{sizes, operand(x), places(index), type_of(out), data_of(out)});
}

void add_scatter(Program& program, const Four& sizes, const View& x, const Index& index,
                 const View& out) {
  program.add(Scatter{sizes, operand(x), places(index), target(out)});
}

void add_product(Program& program, const Four& sizes, std::int64_t depth, const View& a,
                 const View& b, const View& out) {
  program.add(Product{sizes, depth, operand(a), operand(b), target(out)});
}

void add_selection(Program& program, const IndexLayer& layer, std::int64_t num_tokens,
                   std::uintptr_t slots, std::uintptr_t positions, std::int64_t num_heads,
                   std::int64_t most, float scale, const View& key, const View& query,
                   const View& weights, std::uintptr_t out) {
  program.add(IndexSelection{&layer,
                             {num_tokens, pointer<const std::int64_t>(slots),
                              pointer<const std::int64_t>(positions)},
                             num_heads, most, scale, operand(key), operand(query), operand(weights),
                             pointer<std::int32_t>(out)});
}

}  // namespace

void bind_index_keys(nb::module_& m) {
  nb::class_<IndexLayer>(m, "IndexLayer")
      .def("__init__", [](IndexLayer* layer) { new (layer) IndexLayer{}; })
      .def("set_keys", [](IndexLayer& layer, std::uintptr_t keys, std::int64_t capacity,
                          std::int64_t dim) {
        layer = {pointer<float>(keys), capacity, dim};
      });
}

void bind_tensor_ops(nb::class_<Program>& program) {
  program.def("add_elementwise", &add_elementwise)
      .def("add_reduction", &add_reduction)
      .def("add_softmax", &add_softmax)
      .def("add_layer_norm", &add_layer_norm)
      .def("add_greatest", &add_greatest)
      .def("add_lookup", &add_lookup)
      .def("add_scatter", &add_scatter)
      .def("add_product", &add_product)
      .def("add_selection", &add_selection, nb::keep_alive<1, 2>());
}

}  // namespace tandem
