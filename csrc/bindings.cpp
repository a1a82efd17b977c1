// The only file that knows Python: it exposes the kernels as the module tandem.kernels._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "bindings.hpp"
#include "cpu_features.hpp"
#include "experts.hpp"
#include "memory.hpp"

namespace nb = nanobind;
using tandem::ExpertLayout;
using tandem::pointer;

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
      throw std::invalid_argument("expert " + std::to_string(e) +
                                  " of the call has rows but no address, expected its weights'");
  if (begin[0] != 0 || begin[call.num_experts] != num_rows)
    throw std::invalid_argument("row_begin goes from " + std::to_string(begin[0]) + " to " +
                                std::to_string(begin[call.num_experts]) + ", expected 0 to " +
                                std::to_string(num_rows) + ", the rows of row_token");
  for (std::int64_t i = 0; i < num_rows; ++i)
    if (call.row_token[i] < 0 || call.row_token[i] >= call.num_tokens)
      throw std::invalid_argument("row " + std::to_string(i) + " is of token " +
                                  std::to_string(call.row_token[i]) + ", expected 0 to " +
                                  std::to_string(call.num_tokens - 1));
}

}  // namespace tandem

namespace {

// Addresses come from torch tensors, whose shapes and dtypes tandem.kernels.native has checked.
tandem::ExpertCall expert_call(std::int64_t num_experts, std::int64_t num_tokens,
                               std::int64_t num_rows, std::uintptr_t experts,
                               std::uintptr_t row_begin, std::uintptr_t row_token,
                               std::uintptr_t hidden, std::uintptr_t out) {
  const tandem::ExpertCall call{num_experts,
                                num_tokens,
                                pointer<const std::uint8_t* const>(experts),
                                pointer<const std::int32_t>(row_begin),
                                pointer<const std::int32_t>(row_token),
                                pointer<const float>(hidden),
                                pointer<float>(out)};
  tandem::require_in_range(call, num_rows);
  return call;
}

void run_experts(tandem::ExpertEngine& engine, const ExpertLayout& layout, int activation,
                 float alpha, float limit, float offset, std::int64_t num_experts,
                 std::int64_t num_tokens, std::int64_t num_rows, std::uintptr_t experts,
                 std::uintptr_t row_begin, std::uintptr_t row_token,
                 std::uintptr_t hidden, std::uintptr_t out) {
  const tandem::ExpertCall call = expert_call(num_experts, num_tokens, num_rows, experts, row_begin,
                                              row_token, hidden, out);
  const tandem::Turn turn(engine);
  engine.run(layout, {static_cast<tandem::Activation>(activation), alpha, limit, offset}, call);
}

void project(tandem::ExpertEngine& engine, const ExpertLayout& layout, bool is_up,
             std::int64_t num_experts, std::int64_t num_tokens, std::int64_t num_rows,
             std::uintptr_t experts, std::uintptr_t row_begin, std::uintptr_t row_token,
             std::uintptr_t hidden, std::uintptr_t out) {
  const tandem::ExpertCall call = expert_call(num_experts, num_tokens, num_rows, experts, row_begin,
                                              row_token, hidden, out);
  const tandem::Turn turn(engine);
  engine.project(layout, is_up, call);
}

void add_rows(tandem::ExpertEngine& engine, std::int64_t num_tokens, std::int64_t top_k,
              std::int64_t size, std::uintptr_t rows, std::uintptr_t row_of,
              std::uintptr_t weights, std::uintptr_t out) {
  const tandem::Turn turn(engine);
  engine.add_rows({num_tokens, top_k, size, pointer<const float>(rows),
                   pointer<const std::int32_t>(row_of), pointer<const float>(weights),
                   pointer<float>(out)});
}

}  // namespace

NB_MODULE(_native, m) {
  // Layouts in Python's caches outlive the module at exit: no leak, and nothing for users to read.
  nb::set_leak_warnings(false);
  nb::class_<tandem::CpuFeatures>(m, "CpuFeatures")
      .def_ro("vendor", &tandem::CpuFeatures::vendor)
      .def_ro("instruction_sets", &tandem::CpuFeatures::instruction_sets)
      .def_ro("l1_data_bytes", &tandem::CpuFeatures::l1_data_bytes)
      .def_ro("l2_bytes", &tandem::CpuFeatures::l2_bytes)
      .def_ro("l3_bytes", &tandem::CpuFeatures::l3_bytes);
  m.def("detect_cpu_features", &tandem::detect_cpu_features);
  m.def("available_isas", &tandem::available_isas);
  m.def("advise_huge_pages", [](std::uintptr_t data, std::int64_t bytes) {
    return tandem::advise_huge_pages(pointer<void>(data), bytes);
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
      .def("run", &run_experts)
      .def("project", &project)
      .def("add_rows", &add_rows)
      .def("wake", &tandem::ExpertEngine::wake)
      .def("bind_workers",
           [](tandem::ExpertEngine& e, const std::vector<int>& processors) {
             e.pool().bind_workers(processors);
           })
      .def("read_all",
           [](tandem::ExpertEngine& e, std::uintptr_t data, std::int64_t bytes) {
             const tandem::Turn turn(e);
             return e.read_all(pointer<const std::uint8_t>(data), bytes);
           })
      .def("multiply", [](tandem::ExpertEngine& e, int bits, std::int64_t count) {
        const tandem::Turn turn(e);
        return e.multiply(bits, count);
      });

  tandem::bind_dense(m);
  tandem::bind_program(m);
  tandem::bind_runtime(m);
  tandem::bind_coordinator(m);
}
