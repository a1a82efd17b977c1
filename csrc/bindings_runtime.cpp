// What Python sees of the calls that the hybrid runtime makes for each layer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "bindings_tensor.hpp"
#include "decider/assignment.hpp"
#include "decider/entries.hpp"
#include "policy_tables.hpp"
#include "routed.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

// Some experts of a layer, by number or by address, computed by an engine's workers while their
// caller does other work. Expert i has rows begin[i]..begin[i + 1] - 1 of a call of `num_rows` rows,
// whose results are at out; row_token has the tokens of this batch. From its making to `finish`,
// which its maker's thread calls, the engine is its own, and the tensors must live.
//
// Only the tokens of the batch's rows are read, by the workers: threads of another pool would be in
// their way, and most of a long prompt's tokens may have no row here.
class StartedBatch {
 public:
  StartedBatch(ExpertEngine& engine, const RoutedLayer& layer,
               const std::vector<std::uintptr_t>& experts, bool are_addresses,
               std::vector<std::int32_t> begin, const Tensor& row_token, std::int64_t first_token,
               const Tensor& hidden, const Tensor& out)
      : engine_(engine), coming_(engine), begin_(std::move(begin)) {
    const std::int64_t num_rows = out.size(0), num_tokens = hidden.size(0);
    const std::int64_t size = layer.layout.hidden_size, all_tokens = row_token.count();
    const ValueType type = hidden.token_type("hidden");
    const void* given = hidden.values("hidden", type, num_tokens * size);
    auto* rows = out.dense<float>("out", num_rows * size);
    const auto* tokens = row_token.dense<const std::int32_t>("row_token", all_tokens);
    if (begin_.size() != experts.size() + 1 || begin_.front() < 0 || begin_.back() > num_rows)
      throw std::invalid_argument("begin has " + std::to_string(begin_.size()) + " rows for " +
                                  std::to_string(experts.size()) +
                                  " experts, expected one more, and all of them from 0 to " +
                                  std::to_string(num_rows));
    addresses_.reserve(experts.size());
    for (const std::uintptr_t expert : experts) {
      if (!are_addresses && expert >= static_cast<std::uintptr_t>(layer.num_experts))
        throw std::invalid_argument("expert " + std::to_string(expert) + ", expected 0 to " +
                                    std::to_string(layer.num_experts - 1));
      addresses_.push_back(are_addresses ? expert_at(expert)
                                         : layer.expert(static_cast<std::int64_t>(expert)));
    }
    const std::int32_t first = begin_.front();
    for (std::int32_t& row : begin_) row -= first;
    ExpertCall call{static_cast<std::int64_t>(experts.size()),
                    num_tokens,
                    addresses_.data(),
                    begin_.data(),
                    tokens + first_token,
                    nullptr,
                    rows + first * size};
    require(first_token >= 0 && first_token <= all_tokens - begin_.back(), "a token for each row");
    require_in_range(call, begin_.back());
    const nb::gil_scoped_release release;
    turn_ = std::unique_lock(engine.busy());
    number_tokens(call);
    hidden_ = std::make_unique_for_overwrite<float[]>(used_.size() * size);
    engine.load_rows(given, type, size, used_, hidden_.get());
    call.num_tokens = static_cast<std::int64_t>(used_.size());
    call.row_token = row_token_.data();
    call.hidden = hidden_.get();
    if (layer.source != nullptr && !are_addresses) {
      is_coming_ = true;
      coming_.begin(layer, call, {experts.begin(), experts.end()});
    } else {
      engine.start(layer.layout, layer.activation, call);
    }
  }
  StartedBatch(const StartedBatch&) = delete;
  StartedBatch& operator=(const StartedBatch&) = delete;
  ~StartedBatch() {
    if (!is_coming_) finish();
  }

  // Computes with the workers, and returns when all is done.
  void finish() {
    if (!turn_.owns_lock()) return;
    const nb::gil_scoped_release release;
    const std::unique_lock turn = std::move(turn_);
    if (is_coming_)
      coming_.finish();
    else
      engine_.finish();
  }

 private:
  // Numbers the tokens that have rows, in the order of their first ones.
  void number_tokens(const ExpertCall& call) {
    std::vector<std::int32_t> number(call.num_tokens, -1);
    row_token_.reserve(begin_.back());
    for (std::int32_t row = 0; row < begin_.back(); ++row) {
      std::int32_t& place = number[call.row_token[row]];
      if (place < 0) {
        place = static_cast<std::int32_t>(used_.size());
        used_.push_back(call.row_token[row]);
      }
      row_token_.push_back(place);
    }
  }

  ExpertEngine& engine_;
  std::unique_lock<std::mutex> turn_;  // goes last
  ComingExperts coming_;
  bool is_coming_ = false;
  std::vector<const std::uint8_t*> addresses_;
  std::vector<std::int32_t> begin_, row_token_, used_;
  std::unique_ptr<float[]> hidden_;  // of the tokens that are used
};

// Numbers from Python index tables: nothing is read outside.
void require_experts(const Ids& experts, std::int32_t num_experts) {
  for (const std::int32_t expert : experts)
    if (expert < 0 || expert >= num_experts)
      throw std::invalid_argument("expert " + std::to_string(expert) + ", expected 0 to " +
                                  std::to_string(num_experts - 1));
}

// Numbers by expert, to be read in place: a list would make a Python object of each.
nb::bytes bytes_of(const std::vector<std::uint32_t>& values) {
  return nb::bytes(values.data(), values.size() * sizeof(std::uint32_t));
}

void bind_tables(nb::module_& m) {
  nb::class_<RuleStart>(m, "RuleStart").def(nb::init<std::int32_t>());
  nb::class_<SuccessorTable>(m, "SuccessorTable")
      .def("__init__",
           [](SuccessorTable* self, std::int32_t num_experts, std::int32_t first_row,
              std::uint32_t first_average, const Ids& losses, double rate,
              const std::array<std::int32_t, 3>& shifts, std::int32_t predicted_shift,
              std::int32_t max_tokens, const std::array<std::int32_t, 2>& margins,
              std::shared_ptr<RuleStart> start) {
             new (self) SuccessorTable({num_experts, first_row, first_average, losses, rate,
                                        shifts[0], shifts[1], shifts[2], predicted_shift, max_tokens,
                                        {margins[0], margins[1], std::move(start)}});
           })
      .def("note", [](SuccessorTable& self, const Ids& loaded, const Ids& tokens,
                      std::int32_t divisor, const Ids& experts, const Ids& above) {
        require_experts(loaded, self.num_experts());
        require_experts(experts, self.num_experts());
        require_experts(above, self.num_experts());
        if (loaded.empty() || loaded.size() != tokens.size() || divisor < 1)
          throw std::invalid_argument("expected a token count for each of some experts");
        self.note(loaded, tokens, divisor, experts, above);
      })
      .def("learn", &SuccessorTable::learn)
      .def("resize", &SuccessorTable::resize)
      .def("followed", &SuccessorTable::followed)
      .def("values", [](const SuccessorTable& self) { return bytes_of(self.values()); });
  nb::class_<ForesightTables>(m, "ForesightTables")
      .def("__init__",
           [](ForesightTables* self, std::int32_t num_layers, std::int32_t num_experts,
              std::int32_t first_row, std::int32_t num_buckets, double rate, double token_rate) {
             new (self) ForesightTables(
                 {num_layers, num_experts, first_row, num_buckets, rate, token_rate});
           })
      .def("begin_step", &ForesightTables::begin_step)
      .def("scores", [](const ForesightTables& self, std::int32_t layer, const Ids& above,
                        const Ids& before) {
        self.require(layer);
        require_experts(above, self.num_experts());
        require_experts(before, self.num_experts());
        return bytes_of(self.scores(layer, above, before));
      })
      .def("teach", [](ForesightTables& self, std::int32_t layer, const Ids& experts,
                       const Ids& tokens, const Ids& above, const Ids& before) {
        self.require(layer);
        require_experts(experts, self.num_experts());
        require_experts(above, self.num_experts());
        require_experts(before, self.num_experts());
        if (experts.size() != tokens.size())
          throw std::invalid_argument("expected a token count for each expert");
        self.teach(layer, experts, tokens, above, before);
      });
}

// The bytes of a Python object, as long as this lives.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::int64_t size() const { return view_.len; }
  template <typename T>
  const T* data() const {
    return static_cast<const T*>(view_.buf);
  }

 private:
  Py_buffer view_;
};

void require_scores(const Buffer& states, const Buffer& scores) {
  require(scores.size() == states.size() * static_cast<std::int64_t>(sizeof(std::uint32_t)),
          "a state and a 32-bit score for each expert");
}

// Of a layer's active experts: `states` is a byte by position, `coming` when those are there whose
// copy is under way, by position too, empty where there are none. `scores` is a 32-bit number by
// expert. Returns (fetched experts, spilled ones, GPU seconds, CPU seconds).
nb::tuple split_layer(const Costs& costs, int rule, bool is_never_worse_than_cpu,
                      std::int64_t max_fetches, const Ids& experts, const Ids& tokens,
                      const nb::bytes& states, const std::vector<double>& coming, nb::handle scores,
                      double link_busy) {
  const Buffer score_by_expert(scores);
  require_experts(experts,
                  static_cast<std::int32_t>(score_by_expert.size() / sizeof(std::uint32_t)));
  require(rule >= 0 && rule < kNumAssignments, "one of four rules");
  require(tokens.size() == experts.size() && states.size() == experts.size(),
          "tokens and a state for each expert");
  require(coming.empty() || coming.size() == experts.size(), "no time or one for each expert");
  LayerProblem problem{};
  pose(costs, tokens, problem);
  problem.link_busy = link_busy;
  problem.max_fetches = max_fetches;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const auto state = static_cast<std::uint8_t>(states.c_str()[i]);
    require(state != kCopying || !coming.empty(), "a time for each copy under way");
    problem.wait.push_back(state == kEmpty ? -1.0 : state == kReady ? 0.0 : coming[i]);
    problem.scores.push_back(score_by_expert.data<std::uint32_t>()[experts[i]]);
  }
  const auto chosen = static_cast<Rule>(rule);
  Split found = split(chosen, problem);
  if (is_never_worse_than_cpu) found = never_worse_than_cpu(chosen, problem, std::move(found));
  for (Positions* some : {&found.fetch, &found.spill})
    for (std::int32_t& place : *some) place = experts[place];
  return nb::make_tuple(found.fetch, found.spill, found.gpu_seconds, found.cpu_seconds);
}

// `states` is a byte by expert, `scores` a 32-bit number; `members` and `staged` are keys, of which
// `first` is the layer's first. Returns pairs of keys.
Admitted layer_entries(const Ids& experts, nb::handle states, nb::handle scores, std::int32_t first,
                       Ids members, Ids staged, std::int64_t free_slots, const Ids& fetched,
                       std::int64_t room) {
  const Buffer state_by_expert(states), score_by_expert(scores);
  const auto num_experts = static_cast<std::int32_t>(state_by_expert.size());
  require_scores(state_by_expert, score_by_expert);
  for (Ids* some : {&members, &staged})
    for (std::int32_t& key : *some) key -= first;
  require_experts(experts, num_experts);
  require_experts(members, num_experts);
  Admitted found = entries({experts, state_by_expert.data<std::uint8_t>(),
                            score_by_expert.data<std::uint32_t>(), members, free_slots},
                           staged, fetched, room);
  for (auto& [entering, victim] : found) {
    entering += first;
    if (victim != kNobody) victim += first;
  }
  return found;
}

// The absent experts by score, at most so many; `states` is a byte by expert, `scores` a 32-bit number.
// Returns keys, of which `first` is the layer's first.
Ids most_valued(nb::handle states, nb::handle scores, std::int32_t first, std::int64_t most) {
  const Buffer state_by_expert(states), score_by_expert(scores);
  require_scores(state_by_expert, score_by_expert);
  Ids absent;
  for (std::int32_t expert = 0; expert < state_by_expert.size(); ++expert)
    if (state_by_expert.data<std::uint8_t>()[expert] == kEmpty) absent.push_back(expert);
  absent = by_score(std::move(absent), score_by_expert.data<std::uint32_t>());
  absent.resize(std::clamp<std::int64_t>(most, 0, static_cast<std::int64_t>(absent.size())));
  for (std::int32_t& expert : absent) expert += first;
  return absent;
}

void bind_decider(nb::module_& m) {
  nb::class_<Costs>(m, "Costs")
      .def("__init__",
           [](Costs* self, std::vector<double> cpu, std::vector<double> gpu, double cpu_first,
              double link, double cpu_slowdown, double link_slowdown, double copy_wake) {
             new (self) Costs{std::move(cpu), std::move(gpu), cpu_first, link,
                              cpu_slowdown,   link_slowdown,  copy_wake};
           });
  m.def("split_layer", &split_layer);
  m.def("layer_entries", &layer_entries);
  m.def("most_valued", &most_valued);
}

}  // namespace

void bind_runtime(nb::module_& m) {
  nb::class_<StartedBatch>(m, "StartedBatch")
      .def(nb::init<ExpertEngine&, const RoutedLayer&, const std::vector<std::uintptr_t>&, bool,
                    std::vector<std::int32_t>, const Tensor&, std::int64_t, const Tensor&,
                    const Tensor&>(),
           nb::keep_alive<1, 2>())
      .def("finish", &StartedBatch::finish);
  bind_tables(m);
  bind_decider(m);
}

}  // namespace tandem
