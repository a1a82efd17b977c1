// Keeps track of slots and the link while captured steps run, and asks the decider (csrc/decider)
// about each layer: which misses are fetched for it, which get a slot for later, which experts they
// replace, and which experts of later layers are prefetched. Its decisions are equal, bit by bit,
// to those of tandem.policy.planner for a step in one graph with the eviction `next-use` and one
// set of slots per layer. The reasons are explained there.
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

// A copy of an expert into a slot, where it replaces `victim` (kNone: the slot was free).
struct SlotCopy {
  std::int32_t layer, expert, slot, victim;
};

// Which expert is in which slot; keys are layer * num_experts + expert. See
// tandem.policy.residency.
struct Resident {
  std::int64_t num_layers, num_experts;
  std::vector<std::uint8_t> state;  // by key: kEmpty, kCopying, kReady
  std::vector<std::int32_t> slot_of;  // by key; -1: none
  std::vector<Ids> members;  // by layer: experts with a slot, in the order in which they got it
  std::vector<Ids> free;  // by layer: free slots, of which the last one is given first
  Ids staging{};  // slots for experts that are fetched for one use
  // Keys of experts that were prefetched, which are members of no layer; and clear slots for
  // more.
  std::vector<std::int64_t> ahead{};
  Ids free_ahead{};

  std::int32_t insert(std::int32_t layer, std::int32_t expert);  // returns the slot
  void remove(std::int32_t layer, std::int32_t expert);
  std::int32_t insert_ahead(std::int64_t key);                  // returns the slot
  // Makes a prefetched expert a member.
  void adopt(std::int32_t layer, std::int32_t expert);
  std::vector<std::int64_t> release_ahead();  // removes those that are ready; returns their keys
  bool has_every_expert() const;
};

// A copy for the current layer.
struct FetchCopy {
  SlotCopy copy;
  bool is_staged;  // only for this use
  // When the copy is expected, and how long the CPU would take. The layer waits until the copy is
  // expected, and then as long again as computing takes. Waiting less would claim too many experts,
  // because copies vary and a sleeping thread wakes up late; waiting longer would cost more than
  // computing.
  double arrives, cpu_seconds;
};

// The copies of a layer. The link serves the first three in this order.
struct StepCopies {
  std::span<const FetchCopy> fetch;
  std::span<const SlotCopy> ahead;  // into clear slots, for later layers
  std::span<const SlotCopy> insert;  // for later steps
  // Experts that got a slot, by a copy or with the slot of a prefetch, in this order.
  std::span<const SlotCopy> entered;
  // Keys of experts that lost their slot, which no copy overwrites yet.
  std::span<const std::int64_t> left;
  std::int64_t num_needed = 0;  // staging slots that were needed
};

class StepPolicy {
 public:
  struct Limits {
    std::int64_t max_fetches = 0;  // per layer
    AheadLimits ahead;
    int hint_factor = 1;  // for routers run ahead; see RegressionPredictor::hint
  };

  // One table per layer. Tables and `predictor` must outlive this. Without a predictor nothing is
  // predicted.
  StepPolicy(Costs costs, const Limits& limits, std::vector<NextUseTable*> tables,
             Resident resident, RegressionPredictor* predictor = nullptr);

  // Replaces the state; called between steps. `pending` are the keys of copies that have not ended,
  // of experts with a slot and of those fetched for one use.
  void load(Resident resident, double link_free_at, const std::vector<std::int64_t>& pending);
  // Called between steps. `predicts`: experts of the next layer are prefetched; `asks`: its
  // router is run ahead for that.
  void set_rule(Rule rule, bool predicts = false, bool asks = false) {
    rule_ = rule;
    predicts_ = predicts && predictor_ != nullptr;
    asks_ = asks && predicts_;
  }
  const Resident& resident() const { return resident_; }
  double link_free_at() const { return link_free_at_; }

  // The load of a layer that is routed by token, which is known before the step begins.
  struct KnownLoad {
    std::int32_t layer;
    Load load;
  };

  // `known` is in the layers' order. Returns its prefetches that begin at once.
  StepCopies begin_step(double dense_seconds, std::vector<KnownLoad> known = {}, double now = 0.0);

  // Returns the keys of experts that were prefetched and leave. Their slots are clear when their
  // entries are cleared.
  std::vector<std::int64_t> end_step() { return resident_.release_ahead(); }

  // Whether a layer is decided before its answer, because something may be copied for it or ahead.
  bool decides_first(std::int32_t layer) const {
    return !has_every_expert_ && (fetches() || predicts_ || knows_after(layer));
  }
  // Whether the next layer's router is run ahead; not if its choice is known.
  bool asks(std::int32_t layer) const {
    const auto is_next = [&](const KnownLoad& known) { return known.layer == layer + 1; };
    return asks_ && !has_every_expert_ && std::none_of(known_.begin(), known_.end(), is_next);
  }
  // Whether the load of a later layer is known.
  bool knows_after(std::int32_t layer) const {
    return !known_.empty() && known_.back().layer > layer;
  }

  // Decides by the layer's load and the next layer's guessed load (empty: unknown). Over a disk,
  // `places` says where memory has each of its experts: kInSlot for hits.
  StepCopies decide(std::int32_t layer, const Load& load, const Load& guess, double now,
                    const std::vector<Place>& places = {});
  void copy_finished(std::int32_t layer, std::int32_t expert, double now);
  void learn(std::int32_t layer);
  // Called after the previous layer's answer: runs much of `decide` on the layer's last load, and
  // decides nothing. Computing experts has displaced tables and code from the CPU's caches, and
  // loading them again would take most of the time of a decision before a first miss.
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
  std::size_t num_warmed_ = 0;  // a result, so that the compiler keeps the call
  LayerProblem problem_;
  std::vector<FetchCopy> fetches_;
  std::vector<SlotCopy> ahead_, inserts_, entered_;
  std::vector<std::int64_t> left_;
  std::vector<KnownLoad> known_;  // of the current step
  std::int64_t num_needed_ = 0;
  std::vector<std::int64_t> staged_;  // keys of copies for one use that have not ended
  Ids late_;  // those of `staged_` that belong to a coming layer
  std::vector<std::uint8_t> states_;  // of a layer with such keys
  double dense_ = 0.0, link_free_at_ = 0.0;
  std::int64_t num_pending_ = 0;  // copies that have not ended
  bool has_every_expert_ = false;
};

}  // namespace tandem
