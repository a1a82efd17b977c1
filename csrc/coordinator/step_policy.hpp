// Knows the slots and the link while captured steps run, and asks the decider (csrc/decider) about each
// layer: which misses are fetched for it, which get a slot for later, and who leaves for them; which
// experts of layers to come are copied ahead. Decides what tandem.policy.planner decides for a step in
// one graph, with the eviction `next-use` and one set of slots per layer, to the last bit; see there
// for the reasons.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "decider/ahead.hpp"
#include "decider/assignment.hpp"
#include "decider/entries.hpp"
#include "decider/reads.hpp"
#include "policy_tables.hpp"

namespace tandem {

// An expert on its way into a slot, from which `victim` goes (kNone: it was free).
struct SlotCopy {
  std::int32_t layer, expert, slot, victim;
};

// Which expert is in which slot; keys are layer * num_experts + expert. See
// tandem.policy.residency.
struct Resident {
  std::int64_t num_layers, num_experts;
  std::vector<std::uint8_t> state;    // by key: kEmpty, kCopying, kReady
  std::vector<std::int32_t> slot_of;  // by key; -1: none
  std::vector<Ids> members;           // by layer: experts with a slot, in the order they got it
  std::vector<Ids> free;              // by layer: slots, the last one is given first
  Ids staging{};  // slots of experts that are fetched for one use
  // Keys of experts that were copied ahead, which are no layer's members, and clear slots for more.
  std::vector<std::int64_t> ahead{};
  Ids free_ahead{};

  std::int32_t insert(std::int32_t layer, std::int32_t expert);  // returns the slot
  void remove(std::int32_t layer, std::int32_t expert);
  std::int32_t insert_ahead(std::int64_t key);                  // returns the slot
  void adopt(std::int32_t layer, std::int32_t expert);  // one that was copied ahead: a member now
  std::vector<std::int64_t> release_ahead();  // those that are ready leave; returns their keys
  bool has_every_expert() const;
};

// A copy for the layer that runs.
struct FetchCopy {
  SlotCopy copy;
  bool is_staged;  // for this use alone
  // When it is expected, and what the CPU would need for it. It is waited for until then and for as
  // long again as computing takes: who waits for less claims too many, as copies vary and a thread
  // that sleeps wakes up late; who waits for more pays more than the computing is worth.
  double arrives, cpu_seconds;
};

// The copies of a layer; the link serves them in the order of the first three.
struct StepCopies {
  std::span<const FetchCopy> fetch;
  std::span<const SlotCopy> ahead;    // for layers to come, into clear slots
  std::span<const SlotCopy> insert;   // for later steps
  std::span<const SlotCopy> entered;  // who got a slot, by a copy or with its own, in this order
  std::span<const std::int64_t> left;  // keys of those from whose slots nothing is copied over yet
  std::int64_t asked = 0;             // staging slots that there should have been
};

class StepPolicy {
 public:
  struct Limits {
    std::int64_t max_fetches = 0;  // of one layer
    AheadLimits ahead;
    int hint_factor = 1;  // of routers that are asked; see RegressionPredictor::hint
  };

  // A table for each layer; these and `predictor` must outlive it. Without it nothing is predicted.
  StepPolicy(Costs costs, const Limits& limits, std::vector<NextUseTable*> tables,
             Resident resident, RegressionPredictor* predictor = nullptr);

  // Between steps: takes the place of what is known. `pending` are the keys whose copies have not
  // ended, of experts with a slot and of those that were fetched for one use.
  void load(Resident resident, double link_free_at, const std::vector<std::int64_t>& pending);
  // Between steps. `predicts` tells whether experts of the next layer are copied ahead, `asks`
  // whether its router is asked for that.
  void set_rule(Rule rule, bool predicts = false, bool asks = false) {
    rule_ = rule;
    predicts_ = predicts && predictor_ != nullptr;
    asks_ = asks && predicts_;
  }
  const Resident& resident() const { return resident_; }
  double link_free_at() const { return link_free_at_; }

  // What a layer that is routed by token will use: its tokens are known before the step begins.
  struct KnownLoad {
    std::int32_t layer;
    Load load;
  };

  // `known` are in the layers' order. Returns what is copied ahead of them at once.
  StepCopies begin_step(double dense_seconds, std::vector<KnownLoad> known = {}, double now = 0.0);

  // Returns the keys of experts that were copied ahead and leave: their slots are clear once their
  // entries are.
  std::vector<std::int64_t> end_step() { return resident_.release_ahead(); }

  // Whether a layer is to be decided ahead of its answer: something may be copied for it, or ahead.
  bool decides_first(std::int32_t layer) const {
    return !has_every_expert_ && (fetches() || predicts_ || knows_behind(layer));
  }
  // Whether the router behind a layer is asked: not where it is known what it chooses.
  bool asks(std::int32_t layer) const {
    const auto is_next = [&](const KnownLoad& known) { return known.layer == layer + 1; };
    return asks_ && !has_every_expert_ && std::none_of(known_.begin(), known_.end(), is_next);
  }
  // Whether it is known what a layer behind this one will use.
  bool knows_behind(std::int32_t layer) const {
    return !known_.empty() && known_.back().layer > layer;
  }

  // By what a layer uses now, and what the next one is guessed to use (none: unknown). Of a model over
  // a disk `places` say where memory has each of its experts, kInSlot for those that are no misses.
  StepCopies decide(std::int32_t layer, const Load& load, const Load& guess, double now,
                    const std::vector<Place>& places = {});
  void copy_finished(std::int32_t layer, std::int32_t expert, double now);
  void learn(std::int32_t layer);
  // Behind the answer to the layer before: does much of what `decide` will do, by what the layer used
  // last, and decides nothing. Experts that were computed have displaced tables and code from the
  // processor's caches, and ahead of a first miss their way back is what a decision takes.
  void warm_up(std::int32_t layer);

 private:
  bool fetches() const { return rule_ != Rule::kReadyOnGpu; }
  const std::uint8_t* states_of(std::int32_t layer);
  LayerSlots slots_of(std::int32_t layer, const Ids& experts, const std::uint8_t* states,
                      const Scores& scores) const;
  void pose(const std::uint8_t* states, const Ids& experts, const Ids& tokens, double now);
  double issue(double ready);
  FetchCopy fetch_of(const SlotCopy& copy, bool is_staged, double now, double cpu_seconds);
  bool is_ahead(std::int32_t layer, std::int32_t expert) const;
  void copy_ahead(std::int32_t layer, std::size_t num_fetched, double now, double next_plan);
  void copy_known(const KnownLoad& known, double ready, double published);
  ComingLayer coming(std::int32_t layer, double ready, double published);
  void insert_ahead(std::int32_t layer, const Ids& experts);
  void enter(std::int32_t layer, const Admitted& admitted);
  void place(std::int32_t layer, const Ids& fetched, const Ids& experts, double now);

  Costs costs_;
  Limits limits_;
  std::vector<NextUseTable*> tables_;
  Resident resident_;
  Ids above_;  // experts in use in the layer above
  Rule rule_ = Rule::kReadyOnGpu;
  RegressionPredictor* predictor_;
  bool predicts_ = false, asks_ = false;
  std::vector<Load> last_loads_;  // by layer
  std::size_t num_warmed_ = 0;  // so that no compiler leaves it out
  LayerProblem problem_;
  std::vector<FetchCopy> fetches_;
  std::vector<SlotCopy> ahead_, inserts_, entered_;
  std::vector<std::int64_t> left_;
  std::vector<KnownLoad> known_;  // of the step
  std::int64_t asked_ = 0;
  std::vector<std::int64_t> staged_;   // keys that were fetched for one use, not yet ended
  Ids late_;  // of these the experts of a layer to come
  std::vector<std::uint8_t> states_;  // of the layer, if it has some of these
  double dense_ = 0.0, link_free_at_ = 0.0;
  std::int64_t num_pending_ = 0;  // copies that have not ended
  bool has_every_expert_ = false;
};

}  // namespace tandem
