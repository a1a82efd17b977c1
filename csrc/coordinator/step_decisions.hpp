// What follows each answer of a captured step: ended copies are told to the policy, it decides, its
// copies go to the copying thread, it learns. All on the answering thread, while the device goes
// on. Without a policy the caller decides between steps.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "coordinator/coordinator.hpp"
#include "coordinator/copying.hpp"
#include "coordinator/step_policy.hpp"

namespace tandem {

// What was decided behind one layer, in the order in which it happened: first the arrivals.
struct DecidedLayer {
  std::int32_t layer;
  double now;
  std::vector<Arrival> arrivals;
  std::vector<SlotCopy> copies;
};

class StepDecisions : public AfterAnswer {
 public:
  // Both must outlive it.
  StepDecisions(StepPolicy* policy, CopyingThread& copying)
      : policy_(policy), copying_(copying) {}

  void set_dense_seconds(double seconds) { dense_ = seconds; }  // of a layer; between steps

  void begin_step() override;
  void note(const LayerRecord& record) override;

  // Of the last step; between steps, once.
  std::span<const DecidedLayer> take_decided() {
    return {decided_.data(), std::exchange(num_decided_, 0)};
  }

 private:
  void count(const LayerRecord& record);

  StepPolicy* policy_;  // may be null
  CopyingThread& copying_;
  double dense_ = 0.0;
  Ids experts_, tokens_, tokens_of_;
  std::vector<DecidedLayer> decided_;  // their memory is used again
  std::size_t num_decided_ = 0;
};

}  // namespace tandem
