// The Python bindings of the decider and of the tables that it reads.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "bindings_places.hpp"
#include "bindings_tensor.hpp"
#include "decider/ahead.hpp"
#include "decider/assignment.hpp"
#include "decider/entries.hpp"
#include "decider/reads.hpp"
#include "decider/regression_predictor.hpp"
#include "policy_tables.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

// Checks numbers from Python, so that nothing outside of tables is read.
void require_experts(const Ids& experts, std::int32_t num_experts) {
  for (const std::int32_t expert : experts)
    if (expert < 0 || expert >= num_experts)
      throw std::invalid_argument("expert " + std::to_string(expert) + ", expected 0 to " +
                                  std::to_string(num_experts - 1));
}

// Returns numbers by expert as bytes, which Python reads in place. A list would need one object per
// number.
nb::bytes bytes_of(const std::vector<std::uint32_t>& values) {
  return nb::bytes(values.data(), values.size() * sizeof(std::uint32_t));
}

void bind_tables(nb::module_& m) {
  nb::class_<RuleStart>(m, "RuleStart").def(nb::init<std::int32_t>());
  nb::class_<NextUseTable>(m, "NextUseTable")
      .def("__init__",
           [](NextUseTable* self, std::int32_t num_experts, std::int32_t first_row,
              std::uint32_t first_average, const Ids& losses, double rate,
              const std::array<std::int32_t, 3>& shifts, std::int32_t predicted_shift,
              std::int32_t max_tokens, const std::array<std::int32_t, 2>& margins,
              std::shared_ptr<RuleStart> start) {
             new (self) NextUseTable({num_experts,
                                      first_row,
                                      first_average,
                                      losses,
                                      rate,
                                      shifts[0],
                                      shifts[1],
                                      shifts[2],
                                      predicted_shift,
                                      max_tokens,
                                      {margins[0], margins[1], std::move(start)}});
           })
      .def("note",
           [](NextUseTable& self, const Ids& loaded, const Ids& tokens, std::int32_t divisor,
              const Ids& experts, const Ids& above) {
             require_experts(loaded, self.num_experts());
             require_experts(experts, self.num_experts());
             require_experts(above, self.num_experts());
             if (loaded.empty() || loaded.size() != tokens.size() || divisor < 1)
               throw std::invalid_argument(
                   "expected at least one expert, and a token count for each");
             self.note(loaded, tokens, divisor, experts, above);
           })
      .def("learn", &NextUseTable::learn)
      .def("resize", &NextUseTable::resize)
      .def("followed", &NextUseTable::followed)
      .def("values", [](const NextUseTable& self) { return bytes_of(self.values()); });
}

using CountsTuple =
    std::tuple<std::vector<double>, std::vector<double>, std::int64_t, std::int64_t>;

RegressionPredictor::Counts counts_of(CountsTuple counts) {
  auto& [seen, came_true, countdown, count_every] = counts;
  return {std::move(seen), std::move(came_true), countdown, count_every};
}

CountsTuple as_tuple(const RegressionPredictor::Counts& counts) {
  return {counts.seen, counts.came_true, counts.countdown, counts.count_every};
}

void require_load(const RegressionPredictor& predictor, std::int32_t layer, const Ids& experts,
                  const Ids& tokens) {
  predictor.require(layer);
  require_experts(experts, predictor.num_experts());
  require(experts.size() == tokens.size(), "a token count for each expert");
}

void bind_regression_predictor(nb::module_& m) {
  nb::class_<RegressionPredictor>(m, "RegressionPredictor")
      .def("__init__",
           [](RegressionPredictor* self, std::int32_t num_layers, std::int32_t num_experts,
              std::int32_t first_row, std::int32_t num_buckets, double rate, double token_rate,
              std::int32_t max_tokens, CountsTuple counts, CountsTuple of_hints) {
             new (self) RegressionPredictor(
                 {num_layers, num_experts, first_row, num_buckets, rate, token_rate, max_tokens},
                 {std::vector<Ids>(num_layers), counts_of(std::move(counts)),
                  counts_of(std::move(of_hints))});
           })
      .def("load",
           [](RegressionPredictor& self, std::vector<Ids> before, CountsTuple counts,
              CountsTuple of_hints) {
             self.load(
                 {std::move(before), counts_of(std::move(counts)), counts_of(std::move(of_hints))});
           })
      .def("state",
           [](const RegressionPredictor& self) {
             const RegressionPredictor::State& at = self.state();
             return nb::make_tuple(at.before, as_tuple(at.counts), as_tuple(at.of_hints));
           })
      .def("begin_step", &RegressionPredictor::begin_step)
      .def("hint",
           [](RegressionPredictor& self, std::int32_t layer, const Ids& experts, const Ids& tokens,
              int factor) {
             require_load(self, layer, experts, tokens);
             require(factor == 1 || factor == 3, "a hint factor of 1 or 3");
             self.hint(layer, experts, tokens, factor);
           })
      .def("is_hinted", &RegressionPredictor::is_hinted)
      .def(
          "observe",
          [](RegressionPredictor& self, std::int32_t layer, const Ids& experts, const Ids& tokens) {
            require_load(self, layer, experts, tokens);
            self.observe(layer, experts, tokens);
          })
      .def("learn", &RegressionPredictor::learn)
      .def("forecast", [](RegressionPredictor& self, std::int32_t layer) -> nb::object {
        self.require(layer);
        const auto found = self.forecast(layer);
        if (!found) return nb::none();
        return nb::make_tuple(bytes_of(found->scores()), found->chances());
      });
}

// The bytes of a Python object, valid as long as this exists.
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

// Splits a layer's active experts. By position: `states` (bytes), `coming` (when copies under way
// will end; empty if there are none), `places` (bytes; empty if memory has all experts). By expert:
// `scores` (32 bits). Returns (fetched experts, spilled experts, GPU seconds, CPU seconds).
nb::tuple split_layer(const Costs& costs, int rule, bool is_never_worse_than_cpu,
                      std::int64_t max_fetches, const Ids& experts, const Ids& tokens,
                      const nb::bytes& states, const std::vector<double>& coming, nb::handle scores,
                      double link_busy, const nb::bytes& places) {
  const Buffer score_by_expert(scores);
  require_experts(experts,
                  static_cast<std::int32_t>(score_by_expert.size() / sizeof(std::uint32_t)));
  require(rule >= 0 && rule < kNumAssignments, "an assignment rule from 0 to 3");
  require(tokens.size() == experts.size() && states.size() == experts.size(),
          "a token count and a state for each expert");
  require(coming.empty() || coming.size() == experts.size(),
          "no arrival times, or one for each expert");
  LayerProblem problem{};
  pose(costs, tokens, problem);
  problem.link_busy = link_busy;
  problem.max_fetches = max_fetches;
  problem.places = places_of(places, experts.size());
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const auto state = static_cast<std::uint8_t>(states.c_str()[i]);
    require(state != kCopying || !coming.empty(), "an arrival time for each copy in progress");
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

Admitted keys_of(Admitted found, std::int32_t first) {
  for (auto& [entering, victim] : found) {
    entering += first;
    if (victim != kNone) victim += first;
  }
  return found;
}

// By expert: `states` (bytes) and `scores` (32 bits). `members` and `staged` are keys; `first` is
// the layer's first key. Returns pairs of keys.
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
  return keys_of(entries({experts, state_by_expert.data<std::uint8_t>(),
                          score_by_expert.data<std::uint32_t>(), members, free_slots},
                         staged, fetched, room),
                 first);
}

// Returns the keys of the absent experts with the highest scores, at most `most`. By expert:
// `states` (bytes) and `scores` (32 bits); `first` is the layer's first key.
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

// Returns the experts of a coming layer that `predictor` expects; `states` is a byte by expert.
Ids expected_ahead_of(RegressionPredictor& predictor, const Costs& costs, std::int64_t most,
                      double price, std::int32_t layer, nb::handle states, const Ids& late,
                      double begin, double needed_at, std::int64_t room, bool in_graph) {
  const Buffer state_by_expert(states);
  predictor.require(layer);
  require(state_by_expert.size() == predictor.num_experts(), "a state for each expert");
  return expected_ahead(
      predictor, costs, {most, price},
      {layer, state_by_expert.data<std::uint8_t>(), late, begin, needed_at, room, in_graph});
}

// `members` are keys; `first` is the layer's first key. Returns pairs of keys, and how often there
// were such chances.
nb::tuple over_residents_of(RegressionPredictor& predictor, const Costs& costs, double price,
                            std::int32_t layer, nb::handle states, nb::handle scores,
                            std::int32_t first, Ids members, std::int64_t free_slots,
                            const Ids& expected, std::int64_t chances) {
  const Buffer state_by_expert(states), score_by_expert(scores);
  require_scores(state_by_expert, score_by_expert);
  predictor.require(layer);
  require(state_by_expert.size() == predictor.num_experts(), "a state for each expert");
  for (std::int32_t& key : members) key -= first;
  require_experts(members, predictor.num_experts());
  require_experts(expected, predictor.num_experts());
  const auto forecast = predictor.forecast(layer);
  require(forecast.has_value(), "a layer with a forecast");
  CopyChances recurrence{chances};
  const Ids nobody;
  Admitted found = over_residents(*forecast, costs, {0, price},
                                  {nobody, state_by_expert.data<std::uint8_t>(),
                                   score_by_expert.data<std::uint32_t>(), members, free_slots},
                                  expected, recurrence);
  return nb::make_tuple(keys_of(std::move(found), first), recurrence.level);
}

// For a layer whose load is known: returns how many copies would be worth their price, and of which
// experts.
nb::tuple known_ahead(const Costs& costs, double price, Ids experts, Ids tokens, nb::handle states,
                      const Ids& late, double begin, double needed_at, std::int64_t room,
                      bool in_graph) {
  const Buffer state_by_expert(states);
  require_experts(experts, static_cast<std::int32_t>(state_by_expert.size()));
  require(tokens.size() == experts.size(), "a token count for each expert");
  const Load load{std::move(experts), std::move(tokens)};
  const ComingLayer coming{
      0, state_by_expert.data<std::uint8_t>(), late, begin, needed_at, room, in_graph};
  Ids misses = known_misses(costs, {0, price}, load, coming);
  const std::size_t count = misses.size();
  misses.resize(num_in_time(costs, load, misses, coming));
  return nb::make_tuple(count, misses);
}

// Chooses the experts that leave for those that enter in any case; `experts` stay, `members` are
// keys. Returns pairs of keys.
Admitted over_lowest_of(const Ids& experts, nb::handle states, nb::handle scores,
                        std::int32_t first, Ids members, std::int64_t free_slots,
                        const Ids& entering) {
  const Buffer state_by_expert(states), score_by_expert(scores);
  require_scores(state_by_expert, score_by_expert);
  for (std::int32_t& key : members) key -= first;
  require_experts(members, static_cast<std::int32_t>(state_by_expert.size()));
  return keys_of(over_lowest({experts, state_by_expert.data<std::uint8_t>(),
                              score_by_expert.data<std::uint32_t>(), members, free_slots},
                             entering),
                 first);
}

// `coming`: (layer, experts, a byte by expert that says which are in memory, free slots of the
// layer).
std::vector<std::tuple<std::int32_t, std::int32_t, bool>> known_reads_of(
    const std::vector<std::tuple<std::int32_t, Ids, nb::bytes, std::int64_t>>& coming,
    std::int64_t all, std::int64_t free, std::int64_t expected) {
  std::vector<ComingUse> uses;
  for (const auto& [layer, experts, are_there, free_slots] : coming) {
    require_experts(experts, static_cast<std::int32_t>(are_there.size()));
    uses.push_back(
        {layer, experts, static_cast<const std::uint8_t*>(are_there.data()), free_slots});
  }
  std::vector<std::tuple<std::int32_t, std::int32_t, bool>> found;
  for (const ReadAhead& read : known_reads(uses, {all, free, expected}))
    found.emplace_back(read.layer, read.expert, read.passes);
  return found;
}

void bind_deciding(nb::module_& m) {
  nb::class_<Costs>(m, "Costs")
      .def("__init__", [](Costs* self, std::vector<double> cpu, std::vector<double> gpu,
                          double cpu_first, double link, double cpu_slowdown, double link_slowdown,
                          double copy_wake, double read) {
        new (self) Costs{std::move(cpu), std::move(gpu), cpu_first, link,
                         cpu_slowdown,   link_slowdown,  copy_wake, read};
      });
  m.def("split_layer", &split_layer);
  m.def("layer_entries", &layer_entries);
  m.def("most_valued", &most_valued);
  m.def("expected_ahead", &expected_ahead_of);
  m.def("over_residents", &over_residents_of);
  m.def("known_ahead", &known_ahead);
  m.def("over_lowest", &over_lowest_of);
  m.def("known_reads", &known_reads_of);
  m.def("likely_reads", [](const std::vector<std::pair<std::int32_t, std::int32_t>>& likely,
                           const Chances& chances, std::int64_t num_shared) {
    std::vector<LikelyExpert> found;
    for (const auto& [expert, rank] : likely) {
      require(rank >= 0 && rank < static_cast<std::int32_t>(chances.size()), "a chance by rank");
      found.push_back({expert, rank});
    }
    return likely_reads(found, chances, num_shared);
  });
  m.def("updated_chance", &updated_chance);
  nb::class_<LookAheadTrial>(m, "LookAheadTrial")
      .def(nb::init<>())
      .def("looks", &LookAheadTrial::looks)
      .def("end_step", &LookAheadTrial::end_step);
  m.def("may_look_ahead", &may_look_ahead);
  m.def("prompt_reads", [](nb::handle on_device, const Scores& scores, std::size_t most) {
    const Buffer states(on_device);
    require(states.size() == static_cast<std::int64_t>(scores.size()), "a score for each expert");
    return prompt_reads(states.data<std::uint8_t>(), scores, most);
  });
  m.def("rank_last", [](nb::handle on_device, Scores scores) {
    const Buffer states(on_device);
    require(states.size() == static_cast<std::int64_t>(scores.size()), "a score for each expert");
    rank_last(states.data<std::uint8_t>(), scores);
    return scores;
  });
  m.def("is_prompt", &is_prompt);
  m.def("may_lend", &may_lend);
  m.def("may_take_room", &may_take_room);
}

}  // namespace

void bind_decider(nb::module_& m) {
  bind_tables(m);
  bind_regression_predictor(m);
  bind_deciding(m);
}

}  // namespace tandem
