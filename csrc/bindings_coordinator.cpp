// The Python binding of the coordinator: called once per step, not once per layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "bindings_coordinator.hpp"
#include "bindings_places.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

Resident resident_of(const nb::bytes& state, std::vector<std::int32_t> slot_of,
                     std::vector<Ids> members, std::vector<Ids> free, Ids staging,
                     std::vector<std::int64_t> ahead, Ids free_ahead) {
  const auto* bytes = static_cast<const std::uint8_t*>(state.data());
  const auto num_layers = static_cast<std::int64_t>(members.size());
  if (members.empty() || free.size() != members.size() || slot_of.size() != state.size() ||
      state.size() % members.size() != 0)
    throw std::invalid_argument("expected a state and a slot for each expert of each layer");
  return {num_layers, static_cast<std::int64_t>(state.size()) / num_layers,
          {bytes, bytes + state.size()}, std::move(slot_of), std::move(members), std::move(free),
          std::move(staging), std::move(ahead), std::move(free_ahead)};
}

nb::tuple as_tuple(const Resident& resident) {
  return nb::make_tuple(nb::bytes(resident.state.data(), resident.state.size()), resident.slot_of,
                        resident.members, resident.free, resident.ahead, resident.free_ahead);
}

std::vector<CopyTuple> as_tuples(std::span<const SlotCopy> copies) {
  std::vector<CopyTuple> found;
  for (const SlotCopy& c : copies) found.emplace_back(c.layer, c.expert, c.slot, c.victim);
  return found;
}

std::vector<std::tuple<std::int32_t, std::int32_t, double>> as_tuples(
    const std::vector<Arrival>& arrivals) {
  std::vector<std::tuple<std::int32_t, std::int32_t, double>> found;
  for (const Arrival& a : arrivals) found.emplace_back(a.layer, a.expert, a.seconds);
  return found;
}

void bind_mailbox(nb::module_& m) {
  nb::class_<MailboxLayout>(m, "MailboxLayout")
      .def("__init__",
           [](MailboxLayout* self, std::int64_t num_layers, std::int64_t num_rows,
              std::int64_t top_k, std::int64_t hidden_size, int type) {
             new (self) MailboxLayout{num_layers, num_rows, top_k, hidden_size, token_type(type)};
           })
      .def_prop_ro("doorbell", [](const MailboxLayout&) { return MailboxLayout::kDoorbell; })
      .def_prop_ro("done", [](const MailboxLayout&) { return MailboxLayout::kDone; })
      .def_prop_ro("error", [](const MailboxLayout&) { return MailboxLayout::kError; })
      .def_prop_ro("choice", [](const MailboxLayout&) { return MailboxLayout::kChoice; })
      .def_prop_ro("is_hit", &MailboxLayout::is_hit)
      .def_prop_ro("weights", &MailboxLayout::weights)
      .def_prop_ro("fetched", &MailboxLayout::fetched)
      .def_prop_ro("guessed", [](const MailboxLayout&) { return MailboxLayout::kGuessed; })
      .def_prop_ro("guess", &MailboxLayout::guess)
      .def_prop_ro("layer_bytes", &MailboxLayout::layer_bytes)
      .def_prop_ro("hidden", &MailboxLayout::hidden)
      .def_prop_ro("results", &MailboxLayout::results)
      .def_prop_ro("num_bytes", &MailboxLayout::num_bytes);
}

using KnownTuple = std::tuple<std::int32_t, Ids, Ids>;

std::vector<StepPolicy::KnownLoad> known_loads(std::vector<KnownTuple> known,
                                               std::int64_t num_layers, std::int64_t num_experts) {
  std::vector<StepPolicy::KnownLoad> found;
  for (auto& [layer, experts, tokens] : known) {
    require(layer >= 0 && layer < num_layers && (found.empty() || found.back().layer < layer),
            "layers in their order");
    require(experts.size() == tokens.size(), "a token count for each known expert");
    for (const std::int32_t expert : experts)
      require(expert >= 0 && expert < num_experts, "experts of the layer");
    for (const std::int32_t count : tokens)
      require(count > 0, "at least one token for each expert");
    found.push_back({layer, {std::move(experts), std::move(tokens)}});
  }
  return found;
}

void make_policy(StepPolicy* self, const Costs& costs, std::int64_t max_fetches,
                 std::int64_t max_ahead, double copy_price, std::vector<NextUseTable*> tables,
                 RegressionPredictor* predictor, int hint_factor, const nb::bytes& state,
                 std::vector<std::int32_t> slot_of, std::vector<Ids> members, std::vector<Ids> free,
                 Ids staging, std::vector<std::int64_t> ahead, Ids free_ahead) {
  if (tables.size() != members.size())
    throw std::invalid_argument("expected a table for each layer");
  require(hint_factor == 1 || hint_factor == 3, "a hint factor of 1 or 3");
  new (self)
      StepPolicy(costs, {max_fetches, {max_ahead, copy_price}, hint_factor}, std::move(tables),
                 resident_of(state, std::move(slot_of), std::move(members), std::move(free),
                             std::move(staging), std::move(ahead), std::move(free_ahead)),
                 predictor);
}

nb::tuple decide(StepPolicy& self, std::int32_t layer, const Ids& experts, const Ids& tokens,
                 double now, const Ids& guessed, const Ids& guessed_tokens,
                 const nb::bytes& places) {
  require(guessed.size() == guessed_tokens.size(), "a token count for each predicted expert");
  for (const std::int32_t expert : guessed)
    require(expert >= 0 && expert < self.resident().num_experts, "experts of the layer");
  const StepCopies copies = self.decide(layer, {experts, tokens}, {guessed, guessed_tokens}, now,
                                        places_of(places, experts.size()));
  std::vector<SlotCopy> fetch;
  for (const FetchCopy& found : copies.fetch) fetch.push_back(found.copy);
  return nb::make_tuple(as_tuples(fetch), as_tuples(copies.ahead), as_tuples(copies.insert));
}

void bind_policy(nb::module_& m) {
  nb::class_<StepPolicy>(m, "StepPolicy")
      .def("__init__", make_policy, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>())
      .def("load",
           [](StepPolicy& self, const nb::bytes& state, std::vector<std::int32_t> slot_of,
              std::vector<Ids> members, std::vector<Ids> free, Ids staging,
              std::vector<std::int64_t> ahead, Ids free_ahead, double link_free_at,
              const std::vector<std::int64_t>& pending) {
             self.load(resident_of(state, std::move(slot_of), std::move(members), std::move(free),
                                   std::move(staging), std::move(ahead), std::move(free_ahead)),
                       link_free_at, pending);
           })
      .def(
          "set_rule",
          [](StepPolicy& self, int rule, bool predicts, bool asks) {
            require(rule >= 0 && rule <= static_cast<int>(Rule::kDaliInGraph),
                    "one of three rules");
            self.set_rule(static_cast<Rule>(rule), predicts, asks);
          },
          nb::arg(), nb::arg() = false, nb::arg() = false)
      .def("resident", [](const StepPolicy& self) { return as_tuple(self.resident()); })
      .def("link_free_at", &StepPolicy::link_free_at)
      .def(
          "begin_step",
          [](StepPolicy& self, double dense_seconds, std::vector<KnownTuple> known, double now) {
            const Resident& at = self.resident();
            return as_tuples(
                self.begin_step(dense_seconds,
                                known_loads(std::move(known), at.num_layers, at.num_experts), now)
                    .ahead);
          },
          nb::arg(), nb::arg() = std::vector<KnownTuple>(), nb::arg() = 0.0)
      .def("end_step", &StepPolicy::end_step)
      .def("decide", decide, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg() = Ids(),
           nb::arg() = Ids(), nb::arg() = nb::bytes("", 0))
      .def("copy_finished", &StepPolicy::copy_finished)
      .def("learn", &StepPolicy::learn)
      .def("warm_up", [](StepPolicy& self, std::int32_t layer) {
        require(layer >= 0, "a layer from 0 on");
        self.warm_up(layer);
      });
}

nb::list records_of(StepCoordinator& self) {
  nb::list found;
  for (const LayerRecord& r : self.get().records())
    found.append(nb::make_tuple(r.layer, r.choice, r.is_hit, r.weights, r.num_computed, r.rung,
                                r.begun, r.ended, r.answered, r.fetched));
  return found;
}

// Returns the layers in which something was copied or decided.
nb::list take_decided(StepCoordinator& self) {
  nb::list found;
  for (const DecidedLayer& d : self.decisions().take_decided())
    if (!d.arrivals.empty() || !d.ahead.empty() || !d.copies.empty() || d.num_needed > 0)
      found.append(nb::make_tuple(d.layer, d.now, as_tuples(d.arrivals), as_tuples(d.copies),
                                  as_tuples(d.staged), d.num_needed, as_tuples(d.ahead)));
  return found;
}

void bind_steps(nb::module_& m) {
  const auto lost = nb::exception<StepLost>(m, "StepLostError", PyExc_RuntimeError);
  nb::exception<StepSlow>(m, "StepSlowError", lost);
  nb::class_<DriverLink>(m, "DriverLink")
      .def("__init__", [](DriverLink* self, const std::string& library, std::uint64_t table) {
        new (self) DriverLink{std::make_shared<Driver>(library), table};
      });
  nb::class_<StepCoordinator>(m, "StepCoordinator")
      .def(nb::init<Layers, int, const std::string&>())
      .def("close", &StepCoordinator::close)
      .def("set_hook", &StepCoordinator::set_hook, nb::arg().none())
      .def("add_mailbox",
           [](StepCoordinator& self, std::int64_t num_rows, std::int64_t top_k, int type,
              const MaybeTensor& memory) {
             const auto num_layers = static_cast<std::int64_t>(self.layers().size());
             require(num_layers > 0 && std::min(num_rows, top_k) > 0 && std::max(num_rows, top_k) < 1 << 16,
                     "layers, and 1 to 65535 rows and choices");
             const MailboxLayout box{num_layers, num_rows, top_k,
                                     self.layers().front().layout.hidden_size, token_type(type)};
             std::uint8_t* at = memory ? memory->memory("memory", box.num_bytes(), true) : nullptr;
             require(reinterpret_cast<std::uintptr_t>(at) % MailboxLayout::kLineBytes == 0,
                     "memory that begins with a line of the cache");
             return self.get().add_mailbox(num_rows, top_k, token_type(type), at);
           },
           nb::arg(), nb::arg(), nb::arg(), nb::arg().none() = nb::none())
      .def("begin_step", [](StepCoordinator& self, std::int64_t number, double patience) {
        const nb::gil_scoped_release release;
        self.get().begin_step(number, patience);
      })
      .def("finish_step", [](StepCoordinator& self, double patience) {
        const nb::gil_scoped_release release;
        self.get().finish_step(patience);
      })
      .def("abort_step", [](StepCoordinator& self, double patience) {
        const nb::gil_scoped_release release;
        return self.get().abort_step(patience);
      })
      .def("records", &records_of)
      .def("manage_slots", &StepCoordinator::manage_slots, nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg().none() = nb::none(),
           nb::keep_alive<1, 5>())
      .def("set_dense_seconds", [](StepCoordinator& self, double seconds) {
        self.decisions().set_dense_seconds(seconds);
      })
      .def("expect", [](StepCoordinator& self, std::vector<KnownTuple> known) {
        self.decisions().expect(known_loads(std::move(known),
                                            static_cast<std::int64_t>(self.layers().size()),
                                            self.num_experts()));
      })
      .def("take_decided", &take_decided)
      .def("submit", &StepCoordinator::submit)
      .def("clear", &StepCoordinator::clear)
      .def("clear_entries", &StepCoordinator::clear_entries)
      .def("begin_copies", [](StepCoordinator& self) { self.copying().begin_step(); })
      .def("take_arrivals", [](StepCoordinator& self) {
        std::vector<Arrival> found;
        self.copying().take_arrivals(found);
        return as_tuples(found);
      })
      .def("drain_copies", [](StepCoordinator& self) {
        const nb::gil_scoped_release release;
        self.copying().drain();
      })
      .def("copy_error", [](StepCoordinator& self) { return self.copying().error(); });
}

}  // namespace

void bind_coordinator(nb::module_& m) {
  bind_mailbox(m);
  bind_policy(m);
  bind_steps(m);
  bind_twin(m);
}

}  // namespace tandem
