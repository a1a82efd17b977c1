// A CPU twin of what a captured decode step does for its experts: publish, hits, wait, hits of what
// was fetched meanwhile, combine. It stands for a GPU's stream in tests.
// It can be late at every moment at which a GPU may be.
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

// One layer's tokens as the model has them, at most the mailbox's rows; other rows are idle.
struct TwinCall {
  std::int64_t layer, num_tokens;
  const void* hidden;         // (num_tokens, hidden_size) in the mailbox's type
  const std::int64_t* index;  // (num_tokens, top_k)
  ValueType weight_type;
  const void* weights;  // (num_tokens, top_k)
  void* out;            // as hidden
};

class TwinStream {
 public:
  // `addresses` (num_layers, most experts of a layer) says where experts lie, 0: nowhere. All of it
  // outlives the twin; the caller holds `engine.busy()` while it runs. Delays: up to so many
  // microseconds at a time, drawn from `seed`.
  TwinStream(std::vector<RoutedLayer> layers, const Mailbox& box, const std::int64_t* addresses,
             ExpertEngine& engine, int most_delay, unsigned seed);

  // Gives a layer up that is not answered for so long: throws StepLost, also for one that is
  // answered with an error. 0: waits on, as a GPU does.
  void set_patience(double seconds) { patience_ = seconds; }

  // Does one layer in the caller's thread; returns when its results are combined.
  void run(const TwinCall& call);

  // By layer, what the next one is guessed to choose, (num_rows, top_k) each; empty: not asked.
  void set_guesses(std::vector<std::vector<std::int32_t>> guesses) {
    guesses_ = std::move(guesses);
  }

  // Works for so long ahead of each layer, as a GPU at attention does.
  void set_dense_seconds(double seconds) { dense_seconds_ = seconds; }

  // Of the last step, by layer and the steady clock: the doorbell, and the end of the wait.
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
  const std::int64_t row_of_table_;  // entries of a layer
  ExpertEngine& engine_;
  RowExperts hits_;
  const int most_delay_;
  std::mt19937 random_;
  // The addresses that publish has read, and those that the host has answered with.
  std::vector<const std::uint8_t*> used_, fetched_;
  std::vector<float> rows_, weights_, sums_;
  std::vector<std::int32_t> row_of_;
  std::vector<Times> times_;
  std::vector<std::vector<std::int32_t>> guesses_;
  double dense_seconds_ = 0.0, patience_ = 0.0;
};

// A whole step on a thread of its own, for tests: layers one after the other, in memory that lives
// until `join`. With `stops_before` it ends ahead of a layer, as a GPU that hangs.
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
