// The only file that knows Python: it exposes the kernels as the module tandem.kernels._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "bindings.hpp"
#include "bindings_tensor.hpp"
#include "cpu_features.hpp"
#include "crc32c.hpp"
#include "experts.hpp"
#include "memory.hpp"
#include "sizes.hpp"

namespace nb = nanobind;
using tandem::ExpertLayout;
using tandem::Tensor;

namespace tandem {

void require_in_range(const ExpertCall& call, std::int64_t num_rows) {
  const std::int32_t* begin = call.row_begin;
  for (std::int64_t e = 0; e < call.num_experts; ++e)
    if (begin[e + 1] < begin[e])
      throw std::invalid_argument("row_begin falls from " + std::to_string(begin[e]) + " to " +
                                  std::to_string(begin[e + 1]) + " at expert " + std::to_string(e) +
                                  ", expected rows sorted by expert");
  for (std::int64_t e = 0; e < call.num_experts; ++e)
    if (call.experts[e] == nullptr && begin[e + 1] > begin[e])
      throw std::invalid_argument(
          "expert " + std::to_string(e) +
          " of the call has rows but no address, expected the address of its weights");
  if (begin[0] != 0 || begin[call.num_experts] != num_rows)
    throw std::invalid_argument("row_begin goes from " + std::to_string(begin[0]) + " to " +
                                std::to_string(begin[call.num_experts]) + ", expected 0 to " +
                                std::to_string(num_rows) + ", the rows of row_token");
  for (std::int64_t i = 0; i < num_rows; ++i)
    if (call.row_token[i] < 0 || call.row_token[i] >= call.num_tokens)
      throw std::invalid_argument("row " + std::to_string(i) + " belongs to token " +
                                  std::to_string(call.row_token[i]) + ", expected 0 to " +
                                  std::to_string(call.num_tokens - 1));
}

ActivationSpec activation_spec(const ExpertLayout& layout, int activation, float alpha, float limit,
                               float offset) {
  const bool is_known = activation >= 0 && activation <= static_cast<int>(Activation::kSoftcapped);
  const auto kind = static_cast<Activation>(activation);
  require(is_known && (kind != Activation::kRelu2) == layout.is_gated,
          "an activation for as many halves as the first matrix has");
  return {kind, alpha, limit, offset};
}

namespace {

ExpertCall expert_call(const Tensor& experts, const Tensor& row_begin, const Tensor& row_token,
                       const Tensor& inputs, std::int64_t in_size, const Tensor& out,
                       std::int64_t out_size) {
  const std::int64_t num_experts = experts.count(), num_rows = row_token.count();
  const std::int64_t num_tokens = inputs.size(0);
  const ExpertCall call{
      num_experts,
      num_tokens,
      reinterpret_cast<const std::uint8_t* const*>(
          experts.dense<const std::int64_t>("experts", num_experts)),
      row_begin.dense<const std::int32_t>("row_begin", num_experts + 1),
      row_token.dense<const std::int32_t>("row_token", num_rows),
      inputs.dense<const float>("hidden", num_tokens * in_size),
      out.dense<float>("out", num_rows * out_size)};
  require_in_range(call, num_rows);
  return call;
}

// Runs experts at addresses; all parts of an expert are within `expert_bytes`.
void run_experts(ExpertEngine& engine, const ExpertLayout& layout, std::int64_t expert_bytes,
                 int activation, float alpha, float limit, float offset, const Tensor& experts,
                 const Tensor& row_begin, const Tensor& row_token, const Tensor& hidden,
                 const Tensor& out) {
  require_layout(layout, expert_bytes);
  const ActivationSpec spec = activation_spec(layout, activation, alpha, limit, offset);
  const ExpertCall call = expert_call(experts, row_begin, row_token, hidden, layout.hidden_size, out,
                                      layout.hidden_size);
  const Turn turn(engine);
  engine.run(layout, spec, call);
}

void project(ExpertEngine& engine, const ExpertLayout& layout, std::int64_t expert_bytes, bool is_up,
             const Tensor& experts, const Tensor& row_begin, const Tensor& row_token,
             const Tensor& inputs, const Tensor& out) {
  require_layout(layout, expert_bytes);
  const std::int64_t inner = layout.inner_rows, up = inner * (layout.is_gated ? 2 : 1);
  const std::int64_t in_size = is_up ? layout.hidden_size : inner;
  const ExpertCall call = expert_call(experts, row_begin, row_token, inputs, in_size, out,
                                      is_up ? up : layout.hidden_size);
  const Turn turn(engine);
  engine.project(layout, is_up, call);
}

template <std::uint32_t (*sum)(const std::uint8_t*, std::int64_t, std::uint32_t)>
std::uint32_t sum_of(const Tensor& data, std::uint32_t before) {
  const std::int64_t bytes = data.count() * data.element_bytes();
  const std::uint8_t* at = data.memory("data", bytes);
  const nb::gil_scoped_release release;
  return sum(at, bytes, before);
}

// Sums weight times row over k, first to last; -1 adds nothing.
void add_rows(ExpertEngine& engine, const Tensor& rows, const Tensor& row_of, const Tensor& weights,
              const Tensor& out) {
  rows.require_dims("rows", 2);
  row_of.require_dims("row_of", 2);
  const std::int64_t tokens = row_of.size(0), top_k = row_of.size(1), size = rows.size(1);
  const RowSum sum{tokens, top_k, size, rows.dense<const float>("rows", rows.size(0) * size),
                   row_of.dense<const std::int32_t>("row_of", tokens * top_k),
                   weights.dense<const float>("weights", tokens * top_k),
                   out.dense<float>("out", tokens * size)};
  for (std::int64_t i = 0; i < tokens * top_k; ++i)
    require(sum.row_of[i] < rows.size(0), "existing rows");
  const Turn turn(engine);
  engine.add_rows(sum);
}

}  // namespace
}  // namespace tandem

NB_MODULE(_native, m) {
  // Layouts in Python's caches outlive the module at exit. This is no leak, and users need no
  // warning.
  nb::set_leak_warnings(false);
  nb::class_<tandem::CpuFeatures>(m, "CpuFeatures")
      .def_ro("vendor", &tandem::CpuFeatures::vendor)
      .def_ro("instruction_sets", &tandem::CpuFeatures::instruction_sets)
      .def_ro("l1_data_bytes", &tandem::CpuFeatures::l1_data_bytes)
      .def_ro("l2_bytes", &tandem::CpuFeatures::l2_bytes)
      .def_ro("l3_bytes", &tandem::CpuFeatures::l3_bytes);
  m.def("detect_cpu_features", &tandem::detect_cpu_features);
  m.def("available_isas", &tandem::available_isas);
  m.def("advise_huge_pages", [](const Tensor& memory) {
    const std::int64_t bytes = memory.count() * memory.element_bytes();
    return tandem::advise_huge_pages(memory.memory("memory", bytes), bytes);
  });

  m.def("crc32c", &tandem::sum_of<&tandem::crc32c>);
  m.def("crc32c_portable", &tandem::sum_of<&tandem::crc32c_portable>);
  m.def("join_crc32c", [](std::uint32_t first, std::uint32_t second, std::int64_t second_bytes) {
    tandem::require(second_bytes >= 0, "at least 0 bytes in the second piece");
    return tandem::join_crc32c(first, second, second_bytes);
  });

  using tandem::ProjectionLayout;
  nb::class_<ProjectionLayout>(m, "ProjectionLayout")
      .def(nb::init<>())
      .def_rw("format", &ProjectionLayout::format)
      .def_rw("group", &ProjectionLayout::group)
      .def_rw("cols", &ProjectionLayout::cols)
      .def_rw("data", &ProjectionLayout::data)
      .def_rw("scales", &ProjectionLayout::scales)
      .def_rw("bias", &ProjectionLayout::bias);
  nb::class_<ExpertLayout>(m, "ExpertLayout")
      .def(nb::init<>())
      .def_rw("up", &ExpertLayout::up)
      .def_rw("down", &ExpertLayout::down)
      .def_rw("hidden_size", &ExpertLayout::hidden_size)
      .def_rw("inner_rows", &ExpertLayout::inner_rows)
      .def_rw("is_gated", &ExpertLayout::is_gated);

  nb::class_<tandem::ExpertEngine>(m, "ExpertEngine")
      .def(nb::init<int, const std::string&>(), nb::arg("num_threads"), nb::arg("isa"))
      .def_prop_ro("isa", [](const tandem::ExpertEngine& e) { return std::string(e.isa()); })
      .def_prop_ro("num_threads", &tandem::ExpertEngine::num_threads)
      .def("run", &tandem::run_experts)
      .def("project", &tandem::project)
      .def("add_rows", &tandem::add_rows)
      .def("wake", &tandem::ExpertEngine::wake)
      .def("bind_workers",
           [](tandem::ExpertEngine& e, const std::vector<int>& processors) {
             e.pool().bind_workers(processors);
           })
      .def("read_all",
           [](tandem::ExpertEngine& e, const Tensor& data) {
             const std::int64_t bytes = data.count() * data.element_bytes();
             const std::uint8_t* at = data.memory("data", bytes);
             const tandem::Turn turn(e);
             return e.read_all(at, bytes);
           })
      .def("multiply", [](tandem::ExpertEngine& e, int bits, std::int64_t count) {
        const tandem::Turn turn(e);
        return e.multiply(bits, count);
      });

  tandem::bind_dense(m);
  tandem::bind_program(m);
  tandem::bind_runtime(m);
  tandem::bind_coordinator(m);
  tandem::bind_disk(m);
}
