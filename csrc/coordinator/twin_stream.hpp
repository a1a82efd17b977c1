// A CPU twin of what a captured decode step does for its experts: publish, compute hits, wait,
// compute what was meanwhile fetched, combine. In tests it stands in for a GPU's stream, and can be
// late wherever a GPU may be.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "coordinator/coordinator.hpp"
#include "coordinator/mailbox.hpp"
#include "coordinator/row_experts.hpp"
#include "routed.hpp"

namespace tandem {

// One layer's tokens, at most as many as the mailbox has rows; the other rows are padding.
struct TwinCall {
  std::int64_t layer, num_tokens;
  const void* hidden;         // (num_tokens, hidden_size) in the mailbox's type
  const std::int64_t* index;  // (num_tokens, top_k)
  ValueType weight_type;
  const void* weights;  // (num_tokens, top_k)
  void* out;  // same type as hidden
};

class TwinStream {
 public:
  // `addresses` (num_layers, most experts of a layer) has the experts' addresses; 0: none. All
  // arguments must outlive the twin, and the caller holds `engine.busy()` while it runs.
  // `most_delay` is the longest delay in microseconds, drawn from `seed`.
  TwinStream(std::vector<RoutedLayer> layers, const Mailbox& box, const std::int64_t* addresses,
             ExpertEngine& engine, int most_delay, unsigned seed);

  // Throws StepLost for a layer that is not answered within this time, or answered with an error.
  // 0: waits forever, like a GPU.
  void set_patience(double seconds) { patience_ = seconds; }

  // Runs one layer in the caller's thread; returns when its results are combined.
  void run(const TwinCall& call);

  // The guessed choice of the next layer, by layer, (num_rows, top_k) each; empty: none.
  void set_guesses(std::vector<std::vector<std::int32_t>> guesses) {
    guesses_ = std::move(guesses);
  }

  // Spins for this time before each layer, as a GPU computes attention.
  void set_dense_seconds(double seconds) { dense_seconds_ = seconds; }

  // Of the last step, by layer: times of the doorbell and of the end of the wait, by the steady
  // clock.
  struct Times {
    double rung, went_on;
  };
  const std::vector<Times>& times() const { return times_; }

 private:
  void publish(const TwinCall& call);
  void publish_guess(std::int64_t layer);
  void wait(std::int64_t layer);
  void add_fetched(const TwinCall& call);
  void combine(const TwinCall& call);
  void be_late();

  const std::vector<RoutedLayer> layers_;
  const Mailbox box_;
  const std::int64_t* addresses_;
  const std::int64_t row_of_table_;  // entries per layer
  ExpertEngine& engine_;
  RowExperts hits_;
  const int most_delay_;
  std::mt19937 random_;
  // The addresses that were read when publishing, and those in the host's answers.
  std::vector<const std::uint8_t*> used_, fetched_;
  std::vector<float> rows_, weights_, sums_;
  std::vector<std::int32_t> row_of_;
  std::vector<Times> times_;
  std::vector<std::vector<std::int32_t>> guesses_;
  double dense_seconds_ = 0.0, patience_ = 0.0;
};

// Runs a whole step on its own thread, for tests. The memory must stay valid until `join`. With
// `stops_before` it ends before that layer, like a GPU that hangs.
class TwinStep {
 public:
  TwinStep(TwinStream& stream, std::vector<TwinCall> calls, std::int64_t stops_before);
  ~TwinStep() { join(); }
  TwinStep(const TwinStep&) = delete;
  TwinStep& operator=(const TwinStep&) = delete;

  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

}  // namespace tandem
