// What Python sees of the coordinator: once a step, not once a layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "bindings_calls.hpp"
#include "coordinator/coordinator.hpp"
#include "coordinator/copying.hpp"
#include "coordinator/driver_copies.hpp"
#include "coordinator/step_decisions.hpp"
#include "coordinator/twin_stream.hpp"
#include "program.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

using Layers = std::vector<RoutedLayer>;
using CopyTuple = std::tuple<std::int32_t, std::int32_t, std::int32_t, std::int32_t>;

// Of what Python prints of an error, the sentence.
std::string last_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();  // Python's limited API ends so
  if (text.empty()) return text;
  return text.substr(text.find_last_of('\n') + 1);
}

// A call of Python from a thread of ours; what it raises becomes a C++ error.
template <typename... Arguments>
std::function<void(Arguments...)> calling(const nb::object& function) {
  if (function.is_none()) return nullptr;
  const nb::handle callee = function;  // the owner of the thread keeps it alive
  return [callee](Arguments... arguments) {
    const nb::gil_scoped_acquire acquire;
    try {
      callee(arguments...);
    } catch (nb::python_error& error) {
      throw std::runtime_error(last_line(error.what()));
    }
  };
}

Resident resident_of(const nb::bytes& state, std::vector<std::int32_t> slot_of,
                     std::vector<Ids> members, std::vector<Ids> free, Ids staging) {
  const auto* bytes = static_cast<const std::uint8_t*>(state.data());
  const auto num_layers = static_cast<std::int64_t>(members.size());
  if (members.empty() || free.size() != members.size() || slot_of.size() != state.size() ||
      state.size() % members.size() != 0)
    throw std::invalid_argument("expected a state and a slot for each expert of each layer");
  return {num_layers, static_cast<std::int64_t>(state.size()) / num_layers,
          {bytes, bytes + state.size()}, std::move(slot_of), std::move(members), std::move(free),
          std::move(staging)};
}

nb::tuple as_tuple(const Resident& resident) {
  return nb::make_tuple(nb::bytes(resident.state.data(), resident.state.size()), resident.slot_of,
                        resident.members, resident.free);
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

// Where a GPU's copies go: its driver, and its own table of addresses.
struct DriverLink {
  std::shared_ptr<Driver> driver;
  std::uint64_t table;
};

// A coordinator with its slots, if it has any. Its end waits for its threads, without Python's
// lock: they may be in a hook.
class StepCoordinator {
 public:
  StepCoordinator(Layers layers, int num_threads, const std::string& isa)
      : layers_(layers), coordinator_(std::make_unique<Coordinator>(layers, num_threads, isa)) {}
  ~StepCoordinator() { close(); }

  Coordinator& get() {
    if (!coordinator_) throw std::invalid_argument("the coordinator has been closed");
    return *coordinator_;
  }
  const Layers& layers() const { return layers_; }

  void close() {
    const nb::gil_scoped_release release;
    coordinator_.reset();  // its thread submits copies
    copying_.reset();
  }

  void set_hook(const nb::object& hook) {
    hook_ = hook;
    get().set_hook(calling<std::int64_t>(hook));
  }

  // Of `slots`, which may be a GPU's memory, addresses come with the bytes of each.
  void manage_slots(const Tensor& entries, const std::vector<std::uintptr_t>& slots,
                    std::int64_t slot_bytes, StepPolicy* policy, double bytes_per_second,
                    const nb::object& before_copy, const DriverLink* link) {
    const auto num_layers = static_cast<std::int64_t>(layers_.size());
    entries.require_dims("entries", 2);
    auto* table = entries.dense<std::int64_t>("entries", num_layers * entries.size(1));
    for (const RoutedLayer& layer : layers_)
      require(layer.expert_bytes <= slot_bytes && layer.num_experts <= entries.size(1),
              "slots and entries for all experts");
    for (const std::uintptr_t slot : slots) require(slot != 0, "addresses of slots");
    get().set_decisions(nullptr);
    {
      const nb::gil_scoped_release release;
      copying_.reset();
    }
    before_copy_ = before_copy;
    num_slots_ = static_cast<std::int32_t>(slots.size());
    num_experts_ = entries.size(1);
    entries_ = table;
    std::vector<std::uint8_t*> memory;
    for (const std::uintptr_t slot : slots) memory.push_back(reinterpret_cast<std::uint8_t*>(slot));
    std::unique_ptr<CopyEngine> engine = std::make_unique<HostCopyEngine>(calling<>(before_copy));
    if (link != nullptr) engine = std::make_unique<DriverCopyEngine>(link->driver, link->table);
    copying_ = std::make_unique<CopyingThread>(std::move(engine), layers_, entries_, num_experts_,
                                               std::move(memory), bytes_per_second);
    auto decisions = std::make_unique<StepDecisions>(policy, *copying_);
    decisions_ = decisions.get();
    get().set_decisions(std::move(decisions));
  }

  CopyingThread& copying() {
    if (!copying_) throw std::invalid_argument("the coordinator has no slots");
    return *copying_;
  }
  StepDecisions& decisions() {
    copying();
    return *decisions_;
  }

  void clear(const std::vector<std::int64_t>& keys) {
    for (const std::int64_t key : keys)
      require(key >= 0 && key < num_experts_ * static_cast<std::int64_t>(layers_.size()),
              "keys of experts");
    copying().clear(keys);
  }

  void submit(const std::vector<CopyTuple>& copies) {
    std::vector<SlotCopy> found;
    for (const auto& [layer, expert, slot, victim] : copies) {
      const auto at = static_cast<std::size_t>(layer);
      if (layer < 0 || at >= layers_.size() || expert < 0 || expert >= layers_[at].num_experts ||
          slot < 0 || slot >= num_slots_ || victim >= num_experts_)
        throw std::invalid_argument("a copy of expert " + std::to_string(expert) + " of layer " +
                                    std::to_string(layer) + " into slot " + std::to_string(slot) +
                                    ", expected ones that exist");
      found.push_back({layer, expert, slot, victim});
    }
    copying().submit(found);
  }

  // Ahead of a launch, in the host's table.
  void clear_entries() {
    for (const std::int64_t key : copying().take_cleared())
      __atomic_store_n(entries_ + key, std::int64_t{0}, __ATOMIC_RELEASE);
  }

 private:
  Layers layers_;
  nb::object hook_ = nb::none(), before_copy_ = nb::none();
  std::unique_ptr<CopyingThread> copying_;
  std::unique_ptr<Coordinator> coordinator_;
  StepDecisions* decisions_ = nullptr;  // the coordinator's
  std::int64_t* entries_ = nullptr;
  std::int64_t num_experts_ = 0;
  std::int32_t num_slots_ = 0;
};

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
      .def_prop_ro("layer_bytes", &MailboxLayout::layer_bytes)
      .def_prop_ro("hidden", &MailboxLayout::hidden)
      .def_prop_ro("results", &MailboxLayout::results)
      .def_prop_ro("num_bytes", &MailboxLayout::num_bytes);
}

void bind_policy(nb::module_& m) {
  nb::class_<StepPolicy>(m, "StepPolicy")
      .def("__init__",
           [](StepPolicy* self, std::vector<double> cpu, std::vector<double> gpu, double cpu_first,
              double link, double cpu_slowdown, double link_slowdown, std::int64_t max_fetches,
              int rule, std::vector<SuccessorTable*> tables, const nb::bytes& state,
              std::vector<std::int32_t> slot_of, std::vector<Ids> members, std::vector<Ids> free,
              Ids staging) {
             if (tables.size() != members.size())
               throw std::invalid_argument("expected a table for each layer");
             require(rule >= 0 && rule <= static_cast<int>(GraphRule::kDali), "one of three rules");
             new (self) StepPolicy({std::move(cpu), std::move(gpu), cpu_first, link, cpu_slowdown,
                                    link_slowdown, max_fetches},
                                   std::move(tables),
                                   resident_of(state, std::move(slot_of), std::move(members),
                                               std::move(free), std::move(staging)),
                                   static_cast<GraphRule>(rule));
           },
           nb::keep_alive<1, 10>())
      .def("load",
           [](StepPolicy& self, const nb::bytes& state, std::vector<std::int32_t> slot_of,
              std::vector<Ids> members, std::vector<Ids> free, Ids staging, double link_free_at,
              const std::vector<std::int64_t>& pending) {
             self.load(resident_of(state, std::move(slot_of), std::move(members), std::move(free),
                                   std::move(staging)),
                       link_free_at, pending);
           })
      .def("resident", [](const StepPolicy& self) { return as_tuple(self.resident()); })
      .def("link_free_at", &StepPolicy::link_free_at)
      .def("begin_step", &StepPolicy::begin_step)
      .def("decide", [](StepPolicy& self, std::int32_t layer, const Ids& experts,
                        const Ids& tokens, double now) {
        const StepCopies copies = self.decide(layer, experts, tokens, now);
        std::vector<SlotCopy> fetch;
        for (const FetchCopy& found : copies.fetch) fetch.push_back(found.copy);
        return nb::make_tuple(as_tuples(fetch), as_tuples(copies.insert));
      })
      .def("copy_finished", &StepPolicy::copy_finished)
      .def("learn", &StepPolicy::learn);
}

nb::list records_of(StepCoordinator& self) {
  nb::list found;
  for (const LayerRecord& r : self.get().records())
    found.append(nb::make_tuple(r.layer, r.choice, r.is_hit, r.weights, r.num_computed, r.rung,
                                r.begun, r.ended, r.answered, r.fetched));
  return found;
}

// Of the layers in which something was copied or decided.
nb::list take_decided(StepCoordinator& self) {
  nb::list found;
  for (const DecidedLayer& d : self.decisions().take_decided())
    if (!d.arrivals.empty() || !d.copies.empty() || d.asked > 0)
      found.append(nb::make_tuple(d.layer, d.now, as_tuples(d.arrivals), as_tuples(d.copies),
                                  as_tuples(d.staged), d.asked));
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

// layer, hidden, index, weights, out
using TwinTuple = std::tuple<std::int64_t, Tensor, Tensor, Tensor, Tensor>;

// A twin on the threads of an engine that is its own while it runs.
class BoundTwin {
 public:
  BoundTwin(StepCoordinator& coordinator, std::int64_t mailbox, const Tensor& addresses,
            ExpertEngine& engine, int most_delay, unsigned seed)
      : layers_(coordinator.layers()),
        box_(coordinator.get().mailbox(mailbox).layout()),
        engine_(engine),
        stream_(layers_, coordinator.get().mailbox(mailbox), table_of(layers_, addresses), engine,
                most_delay, seed) {}
  ~BoundTwin() { join(); }

  TwinCall call_of(const TwinTuple& call) const {
    const auto& [layer, hidden, index, weights, out] = call;
    const std::int64_t tokens = hidden.size(0);
    require(layer >= 0 && layer < static_cast<std::int64_t>(layers_.size()), "a layer that exists");
    const auto& own = layers_[static_cast<std::size_t>(layer)];
    const RoutedCall found = routed_call(own, hidden, index, weights, out);
    require(found.type == box_.type && found.top_k == box_.top_k && tokens <= box_.num_rows &&
                found.num_tokens == tokens,
            "tokens as the mailbox has them, at most its rows");
    return {layer, tokens, found.hidden, found.index, found.weight_type, found.weights, found.out};
  }

  void run(const TwinTuple& call) {
    const TwinCall found = call_of(call);
    const Turn turn(engine_);
    stream_.run(found);
  }

  // For programs on the same threads.
  void add_to(Program& program, const TwinTuple& call) {
    program.add([this, found = call_of(call)] { stream_.run(found); });
  }

  // A whole step on a thread beside: nothing else uses the engine until `join`.
  void start(const std::vector<TwinTuple>& calls, std::int64_t stops_before) {
    join();
    std::vector<TwinCall> found;
    for (const TwinTuple& call : calls) found.push_back(call_of(call));
    step_ = std::make_unique<TwinStep>(stream_, std::move(found), stops_before);
  }

  void join() {
    const nb::gil_scoped_release release;
    step_.reset();
  }

  TwinStream& stream() { return stream_; }

 private:
  static const std::int64_t* table_of(const Layers& layers, const Tensor& addresses) {
    std::int64_t most = 0;
    for (const RoutedLayer& layer : layers) most = std::max(most, layer.num_experts);
    const auto count = static_cast<std::int64_t>(layers.size());
    return addresses.dense<const std::int64_t>("addresses", count * most);
  }

  const Layers layers_;
  const MailboxLayout box_;
  ExpertEngine& engine_;
  TwinStream stream_;
  std::unique_ptr<TwinStep> step_;
};

}  // namespace

void bind_coordinator(nb::module_& m) {
  bind_mailbox(m);
  bind_policy(m);
  bind_steps(m);
  nb::class_<BoundTwin>(m, "TwinStream")
      .def(nb::init<StepCoordinator&, std::int64_t, const Tensor&, ExpertEngine&, int, unsigned>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>())
      .def("run", &BoundTwin::run)
      .def("add_to", &BoundTwin::add_to)
      .def("start", &BoundTwin::start)
      .def("join", &BoundTwin::join)
      .def("set_patience",
           [](BoundTwin& self, double seconds) { self.stream().set_patience(seconds); })
      .def("set_dense_seconds",
           [](BoundTwin& self, double seconds) { self.stream().set_dense_seconds(seconds); })
      .def("times", [](BoundTwin& self) {
        std::vector<std::tuple<double, double>> found;
        for (const TwinStream::Times& t : self.stream().times())
          found.emplace_back(t.rung, t.went_on);
        return found;
      });
}

}  // namespace tandem
