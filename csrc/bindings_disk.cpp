// The Python bindings of experts and tables on the disk.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "bindings_tensor.hpp"
#include "crc32c.hpp"
#include "disk/host_slots.hpp"
#include "disk/row_tables.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

using Layer = HostSlots::Layer;

constexpr std::int64_t kMostBytes = std::int64_t{1} << 46, kMostExperts = 1 << 16;
constexpr std::int64_t kMostReaders = 256, kMostPieceBytes = 1 << 30;
constexpr std::int64_t kMostRowBytes = 1 << 24, kMostRows = std::int64_t{1} << 40;

// `memory` (slots, slot bytes) begins at a page.
void init_layer(Layer* self, std::string path, std::int64_t first, std::int64_t stride,
                std::int64_t expert_bytes, std::vector<std::uint32_t> sums,
                std::int32_t num_experts, const Tensor& memory, NextUseTable* table) {
  Layer layer{std::move(path), first,   stride, expert_bytes, num_experts,
              std::move(sums), nullptr, 0,      table};
  require(first >= 0 && first <= kMostBytes && expert_bytes > 0 && stride >= expert_bytes &&
              stride <= kMostBytes / kMostExperts && num_experts > 0 && num_experts <= kMostExperts,
          "experts one after the other in a file");
  require(layer.sums.empty() || layer.sums.size() == static_cast<std::size_t>(num_experts),
          "a checksum for each expert, or none");
  require(table == nullptr || table->num_experts() >= num_experts,
          "a table with an entry for each expert");
  memory.require_dims("memory", 2);
  require(memory.size(1) == layer.slot_bytes(), "slots of slot_bytes bytes");
  layer.num_slots = memory.size(0);
  layer.memory = memory.dense<std::uint8_t>("memory", layer.num_slots * layer.slot_bytes());
  require(reinterpret_cast<std::uintptr_t>(layer.memory) % kDiskPage == 0,
          "memory that begins at a page");
  new (self) Layer(std::move(layer));
}

// The last `num_held` of the transit slots are for held experts.
void init_slots(HostSlots* self, const std::vector<Layer>& layers, const Tensor& transit,
                std::int64_t num_held, int num_readers, std::int64_t piece_bytes, double patience) {
  transit.require_dims("transit", 2);
  require(num_readers > 0 && num_readers <= kMostReaders && piece_bytes >= kDiskPage &&
              piece_bytes <= kMostPieceBytes && patience > 0.0,
          "1 to 256 readers, pieces of 4 KiB to 1 GiB, and some seconds");
  require(!layers.empty() && num_held >= 0 && transit.size(0) > num_held,
          "a layer and a transit slot or more");
  for (const Layer& layer : layers) {
    require(layer.slot_bytes() <= transit.size(1),
            "transit slots of at least the largest layer's slot size");
    // A table also reads the experts of the layer above.
    for (const Layer& other : layers)
      require(layer.table == nullptr || layer.table->num_experts() >= other.num_experts,
              "tables of as many experts as the largest layer has");
  }
  auto* memory = transit.dense<std::uint8_t>("transit", transit.size(0) * transit.size(1));
  require(
      reinterpret_cast<std::uintptr_t>(memory) % kDiskPage == 0 && transit.size(1) % kDiskPage == 0,
      "memory that begins at a page");
  new (self) HostSlots(layers, {memory, transit.size(0) - num_held, transit.size(1), num_held,
                                num_readers, piece_bytes, patience});
}

// If `waits`, the result is not empty.
std::optional<HeldExpert> hold(HostSlots& slots, std::int32_t layer, std::int32_t expert,
                               bool waits) {
  require(slots.has_expert(layer, expert), "an expert of these slots");
  const nb::gil_scoped_release release;
  HeldExpert held(slots, layer, expert, waits);
  return held ? std::optional(std::move(held)) : std::nullopt;
}

const HeldExpert& require_held(const HeldExpert& held) {
  require(static_cast<bool>(held), "an expert that is still held");
  return held;
}

using RouterOfLayer = std::tuple<const DenseMatrix*, std::vector<float>, int>;

// A router is (its matrix, or None, its bias by expert, its scoring function's number).
void init_look_ahead(LookAhead* self, const std::vector<RouterOfLayer>& routers,
                     std::int64_t hidden_size) {
  require(hidden_size > 0, "inputs of 1 value or more");
  std::vector<AheadRouter> found;
  for (const auto& [matrix, bias, scoring] : routers) {
    require(scoring >= 0 && scoring <= 2, "a scoring function from 0 to 2");
    require(matrix == nullptr || matrix->in_features == hidden_size,
            "routers with hidden_size columns");
    require(
        matrix == nullptr || bias.empty() || static_cast<std::int64_t>(bias.size()) == matrix->rows,
        "a bias for each expert, or none");
    found.push_back({matrix, bias, static_cast<AheadRouter::Scoring>(scoring)});
  }
  new (self) LookAhead(std::move(found), hidden_size);
}

RouterInputs router_inputs(const LookAhead& look_ahead, std::int32_t layer, const Tensor& values,
                           std::int64_t top_k) {
  values.require_dims("values", 2);
  const std::int64_t num_tokens = values.size(0), size = look_ahead.hidden_size();
  require(layer >= 0 && layer < static_cast<std::int32_t>(look_ahead.num_layers()),
          "a layer with a router");
  require(top_k > 0, "one expert or more per token");
  return {layer, values.dense<const float>("values", num_tokens * size), size, num_tokens, top_k};
}

// A table is (its parts, bytes of a row); a part is (file, first byte, rows).
using PartOfTable = std::tuple<std::string, std::int64_t, std::int64_t>;

void init_tables(RowTables* self,
                 const std::vector<std::pair<std::vector<PartOfTable>, std::int64_t>>& tables,
                 int num_readers, double patience) {
  require(!tables.empty() && num_readers > 0 && num_readers <= kMostReaders && patience > 0.0,
          "a table, 1 to 256 readers, and some seconds");
  std::vector<RowTables::Table> found;
  for (const auto& [parts, row_bytes] : tables) {
    require(!parts.empty() && row_bytes > 0 && row_bytes <= kMostRowBytes,
            "tables of some parts, with rows of 1 byte to 16 MiB");
    found.push_back({{}, row_bytes});
    for (const auto& [path, first, num_rows] : parts) {
      require(first >= 0 && first <= kMostBytes && num_rows > 0 && num_rows <= kMostRows &&
                  num_rows <= kMostBytes / row_bytes,
              "rows one after the other in a file");
      found.back().parts.push_back({path, first, num_rows});
    }
  }
  new (self) RowTables(found, num_readers, patience);
}

void read_rows(RowTables& self, std::size_t table, const Tensor& rows, const Tensor& out) {
  require(table < self.num_tables(), "an existing table");
  const auto* numbers = rows.dense<const std::int64_t>("rows", rows.count());
  auto* to = out.memory("out", rows.count() * self.row_bytes(table), true);
  const nb::gil_scoped_release release;
  self.read(table, {numbers, static_cast<std::size_t>(rows.count())}, to);
}

// Translates a failed read into Python's model error, with the message for users.
void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const DiskError& found) {
    PyErr_SetString(nb::module_::import_("tandem.core.errors").attr("ModelError").ptr(),
                    found.what());
  }
}

}  // namespace

void bind_disk(nb::module_& m) {
  nb::register_exception_translator(translate);
  m.def("slot_bytes", [](std::int64_t first, std::int64_t stride, std::int64_t expert_bytes,
                         bool has_sums) {
    Layer layer{};
    layer.first = first, layer.stride = stride, layer.expert_bytes = expert_bytes;
    layer.sums.resize(has_sums ? 1 : 0);
    return layer.slot_bytes();
  });
  nb::class_<Layer>(m, "SlotLayer")
      .def("__init__", &init_layer, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg().none(), nb::keep_alive<1, 8>(),
           nb::keep_alive<1, 9>());
  nb::class_<HostSlots::Counts>(m, "SlotCounts")
      .def_ro("hits", &HostSlots::Counts::hits)
      .def_ro("misses", &HostSlots::Counts::misses)
      .def_ro("ahead", &HostSlots::Counts::ahead)
      .def_ro("likely", &HostSlots::Counts::likely)
      .def_ro("likely_used", &HostSlots::Counts::likely_used)
      .def_ro("device_hits", &HostSlots::Counts::device_hits)
      .def_ro("device_misses", &HostSlots::Counts::device_misses)
      .def_ro("kept", &HostSlots::Counts::kept)
      .def_ro("read_bytes", &HostSlots::Counts::read_bytes)
      .def_ro("waited_seconds", &HostSlots::Counts::waited_seconds);
  nb::class_<HeldExpert>(m, "HeldExpert")
      .def("address",
           [](const HeldExpert& self) {
             return reinterpret_cast<std::uintptr_t>(require_held(self).address());
           })
      .def("has_come", [](const HeldExpert& self) { return require_held(self).has_come(); })
      .def("wait",
           [](HeldExpert& self) {
             require_held(self);
             const nb::gil_scoped_release release;
             self.wait();
           })
      .def("keep",
           [](HeldExpert& self) {
             require_held(self);
             self.keep();
           })
      .def("let_go", &HeldExpert::let_go);
  nb::class_<LookAhead>(m, "LookAhead")
      .def("__init__", &init_look_ahead, nb::keep_alive<1, 2>())
      .def("learn", [](LookAhead& self, std::int32_t layer,
                       const Tensor& values) { self.learn(router_inputs(self, layer, values, 1)); })
      .def("predict", [](LookAhead& self, DenseEngine& engine, std::int32_t layer,
                         const Tensor& values, std::int64_t top_k) {
        const RouterInputs inputs = router_inputs(self, layer, values, top_k);
        const std::unique_lock turn(engine.busy());
        return self.predict(engine, inputs);
      });
  nb::class_<HostSlots>(m, "HostSlots")
      .def("__init__", &init_slots, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def(
          "hold",
          [](HostSlots& self, std::int32_t layer, std::int32_t expert) {
            return std::move(*hold(self, layer, expert, true));
          },
          nb::keep_alive<0, 1>())
      .def(
          "try_hold",
          [](HostSlots& self, std::int32_t layer, std::int32_t expert) {
            return hold(self, layer, expert, false);
          },
          nb::keep_alive<0, 1>())
      .def(
          "take_back",
          [](HostSlots& self, std::int32_t layer,
             std::int32_t expert) -> std::optional<HeldExpert> {
            require(self.has_expert(layer, expert), "an expert of these slots");
            HeldExpert held(self, self.take_back(layer, expert));
            return held ? std::optional(std::move(held)) : std::nullopt;
          },
          nb::keep_alive<0, 1>())
      .def("note_on_device",
           [](HostSlots& self, const nb::bytes& states) {
             require(self.takes_states(states.size()), "a state for each expert");
             self.note_on_device(static_cast<const std::uint8_t*>(states.data()));
           })
      .def("expect",
           [](HostSlots& self, std::vector<Ids> experts) {
             for (std::size_t layer = 0; layer < experts.size(); ++layer)
               for (const std::int32_t expert : experts[layer])
                 require(self.has_expert(static_cast<std::int32_t>(layer), expert),
                         "experts of these slots");
             self.expect(std::move(experts));
           })
      .def("note_likely",
           [](HostSlots& self, std::int32_t layer, const Ids& experts, std::int64_t top_k) {
             for (const std::int32_t expert : experts)
               require(self.has_expert(layer, expert), "experts of these slots");
             require(top_k > 0, "one expert or more per token");
             self.note_likely(layer, experts, top_k);
           })
      .def("script",
           [](HostSlots& self, std::vector<Ids> predicted) {
             for (std::size_t layer = 0; layer < predicted.size(); ++layer)
               for (const std::int32_t expert : predicted[layer])
                 require(self.has_expert(static_cast<std::int32_t>(layer), expert),
                         "experts of these slots");
             self.script(std::move(predicted));
           })
      .def(
          "run_ahead",
          [](HostSlots& self, LookAhead& look_ahead) {
            for (std::size_t layer = 0; layer < look_ahead.num_layers(); ++layer)
              require(look_ahead.num_experts(layer) == 0 ||
                          self.has(static_cast<std::int32_t>(layer), look_ahead.num_experts(layer)),
                      "routers of these layers");
            self.run_ahead(look_ahead);
          },
          nb::keep_alive<1, 2>())
      .def("look_always", &HostSlots::look_always)
      .def("pin", &HostSlots::pin)
      .def("require_here", &HostSlots::require_here)
      .def("fill", &HostSlots::fill)
      .def("use_share",
           [](HostSlots& self, double share) {
             require(share >= 0.0 && share <= 1.0, "a share of the slots, 0 to 1");
             self.use_share(share);
           })
      .def("counts", &HostSlots::counts)
      .def("is_direct", &HostSlots::is_direct)
      .def("read_buffered", &HostSlots::read_buffered)
      .def("resident", &HostSlots::resident)
      .def("places",
           [](HostSlots& self, std::int32_t layer, const Ids& experts) {
             for (const std::int32_t expert : experts)
               require(self.has_expert(layer, expert), "experts of these slots");
             const std::vector<Place> found = self.places(layer, experts);
             return nb::bytes(found.data(), found.size());
           })
      .def("fail", [](HostSlots& self, int error, std::int64_t every, double delay_seconds) {
        self.readers().fail(error, every, delay_seconds);
      });
  nb::class_<RowTables::Counts>(m, "RowCounts")
      .def_ro("rows", &RowTables::Counts::rows)
      .def_ro("read_bytes", &RowTables::Counts::read_bytes)
      .def_ro("waited_seconds", &RowTables::Counts::waited_seconds);
  nb::class_<RowTables>(m, "RowTables")
      .def("__init__", &init_tables)
      .def("read", &read_rows)
      .def("counts", &RowTables::counts, nb::call_guard<nb::gil_scoped_release>())
      .def("is_direct", &RowTables::is_direct)
      .def("close", &RowTables::close, nb::call_guard<nb::gil_scoped_release>())
      .def("fail", [](RowTables& self, int error, std::int64_t every, double delay_seconds) {
        self.readers().fail(error, every, delay_seconds);
      });
}

}  // namespace tandem
