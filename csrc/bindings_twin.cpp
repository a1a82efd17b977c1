// The Python bindings of a GPU's CPU twin, which runs captured steps on the CPU's threads.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings_coordinator.hpp"
#include "coordinator/twin_stream.hpp"
#include "program.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

// (layer, hidden, index, weights, out)
using TwinTuple = std::tuple<std::int64_t, Tensor, Tensor, Tensor, Tensor>;

// A twin on an engine's threads; it locks the engine while it runs.
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
    require(layer >= 0 && layer < static_cast<std::int64_t>(layers_.size()), "an existing layer");
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

  // Adds the call to a program on the same threads.
  void add_to(Program& program, const TwinTuple& call) {
    program.add([this, found = call_of(call)] { stream_.run(found); });
  }

  // Runs a whole step on another thread. Nothing else may use the engine until `join`.
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

void bind_twin(nb::module_& m) {
  nb::class_<BoundTwin>(m, "TwinStream")
      .def(nb::init<StepCoordinator&, std::int64_t, const Tensor&, ExpertEngine&, int, unsigned>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>())
      .def("run", &BoundTwin::run)
      .def("add_to", &BoundTwin::add_to)
      .def("start", &BoundTwin::start)
      .def("join", &BoundTwin::join)
      .def("set_patience",
           [](BoundTwin& self, double seconds) { self.stream().set_patience(seconds); })
      .def("set_guesses",
           [](BoundTwin& self, std::vector<std::vector<std::int32_t>> guesses) {
             self.stream().set_guesses(std::move(guesses));
           })
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
