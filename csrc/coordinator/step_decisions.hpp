// What is decided about each layer of a captured step: ended copies are told to the policy, it
// decides, its copies go to the copying thread, it learns. All on the answering thread: what is
// fetched for the layer itself, and copied ahead for the next one, ahead of its answer, everything
// else behind it, while the device goes on. Without a policy the caller decides between steps.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "coordinator/coordinator.hpp"
#include "coordinator/copying.hpp"
#include "coordinator/step_policy.hpp"

namespace tandem {

// What was decided about one layer, in the order in which it happened: first the arrivals.
struct DecidedLayer {
  std::int32_t layer;  // kNone: ahead of the first one
  double now;
  std::vector<Arrival> arrivals;
  std::vector<SlotCopy> ahead;   // of layers behind it
  std::vector<SlotCopy> copies;  // into slots of the cache, fetched or not, or with their own
  std::vector<SlotCopy> staged;  // for one use
  std::int64_t asked;            // staging slots that there should have been
};

class StepDecisions : public LayerDecisions {
 public:
  // Both must outlive it.
  StepDecisions(StepPolicy* policy, CopyingThread& copying)
      : policy_(policy), copying_(copying) {}

  void set_dense_seconds(double seconds) { dense_ = seconds; }  // of a layer; between steps

  // Ahead of a launch, by the thread that launches, behind Coordinator::begin_step: copies ahead of
  // what layers will use begin at once, so nothing on the device reads a slot. In the layers' order.
  void expect(std::vector<StepPolicy::KnownLoad> known);

  void begin_step() override;
  bool asks(std::int32_t layer) const override { return policy_ && policy_->asks(layer); }
  std::span<const Fetch> fetch(std::int64_t layer, std::span<const std::int32_t> choice,
                               std::span<const std::int32_t> guess,
                               std::span<const PlacedMiss> misses) override;
  void note(const LayerRecord& record) override;
  void end_step() override;

  // Of the last step; between steps, once.
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
  Load load_, guess_;  // of the layer that runs, and of the next one
  Ids tokens_of_;
  std::vector<Place> places_;  // of the load's experts; empty: memory has all
  StepCopies copies_;  // of the layer that runs
  bool has_begun_ = false;  // the step
  bool is_decided_ = false;
  std::vector<Fetch> fetches_;
  std::vector<DecidedLayer> decided_;  // their memory is used again
  std::size_t num_decided_ = 0;
};

}  // namespace tandem
