// The decisions about each layer of a captured step. Reports ended copies to the policy, lets it
// decide, hands its copies to the copying thread, and lets it learn, all on the answering thread.
// Fetches for the layer itself, and prefetches for the next one, come before the answer;
// everything else comes after it, while the device goes on. Without a policy the caller decides
// between steps.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "coordinator/coordinator.hpp"
#include "coordinator/copying.hpp"
#include "coordinator/step_policy.hpp"

namespace tandem {

// What was decided about one layer, in the order in which it happened; arrivals came first.
struct DecidedLayer {
  std::int32_t layer;  // kNone: before the first layer
  double now;
  std::vector<Arrival> arrivals;
  std::vector<SlotCopy> ahead;  // for later layers
  // Into slots of the cache: fetched, inserted, or prefetched earlier.
  std::vector<SlotCopy> copies;
  std::vector<SlotCopy> staged;  // for one use
  std::int64_t num_needed;  // staging slots that were needed
};

class StepDecisions : public LayerDecisions {
 public:
  // Both arguments must outlive this.
  StepDecisions(StepPolicy* policy, CopyingThread& copying)
      : policy_(policy), copying_(copying) {}

  void set_dense_seconds(double seconds) { dense_ = seconds; }  // per layer; set between steps

  // Called by the launching thread before a launch and after Coordinator::begin_step. Prefetches
  // for known loads begin at once, because nothing on the device reads a slot. `known` is in the
  // layers' order.
  void expect(std::vector<StepPolicy::KnownLoad> known);

  void begin_step() override;
  bool asks(std::int32_t layer) const override { return policy_ && policy_->asks(layer); }
  std::span<const Fetch> fetch(std::int64_t layer, std::span<const std::int32_t> choice,
                               std::span<const std::int32_t> guess,
                               std::span<const PlacedMiss> misses) override;
  void note(const LayerRecord& record) override;
  void end_step() override;

  // Returns the last step's layers; called once, between steps.
  std::span<const DecidedLayer> take_decided() {
    return {decided_.data(), std::exchange(num_decided_, 0)};
  }

 private:
  bool begin();
  DecidedLayer& new_decided(std::int32_t layer, double now);
  void decide(std::int64_t layer, std::span<const std::int32_t> choice,
              std::span<const std::int32_t> guess, std::span<const PlacedMiss> misses, double now);
  void count(std::span<const std::int32_t> choice, Load& load);

  StepPolicy* policy_;  // may be null
  CopyingThread& copying_;
  double dense_ = 0.0;
  Load load_, guess_;  // of the current layer, and of the next one
  Ids tokens_of_;
  std::vector<Place> places_;  // of the load's experts; empty: memory has all experts
  StepCopies copies_;  // of the current layer
  bool has_begun_ = false;  // whether the step has begun
  bool is_decided_ = false;
  std::vector<Fetch> fetches_;
  std::vector<DecidedLayer> decided_;  // reused
  std::size_t num_decided_ = 0;
};

}  // namespace tandem
