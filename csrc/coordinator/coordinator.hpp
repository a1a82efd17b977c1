// Answers the device during a decode step: a thread that polls the doorbells of a mailbox, computes
// the misses that each layer publishes, writes their results and lets the device go on. What may
// cost time (decisions, learning, records) it does behind each answer, while the device computes.
//
// Of experts on a disk those in memory are computed first, the others as they come. A read that
// takes too long loses the step (StepSlow): the caller may do it again without the device's graph.
//
// The thread never calls a driver, and takes no lock that another thread holds while it waits for
// the device. The caller that waits for the step's end (`finish_step`) is the watchdog: where the
// thread does not answer in time, the watchdog answers for it, with an error, so that the device
// never waits for ever.
//
// Misses that are copied to the device meanwhile (`LayerDecisions::fetch`) are not computed here,
// unless they come too late: the device never waits for a copy alone.
//
// Each layer has a state word that says which thread answers it. Within a step it only advances:
//
//   open -> taken    by the thread that answers, when it sees the doorbell
//   open or taken -> closed   by the one that may write `done`: after its results the thread, or,
//                             with an error, the watchdog
//
// `begin_step`, `finish_step` and `abort_step` are called by one thread, in turn; `records` in
// between.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/fetch_words.hpp"
#include "coordinator/mailbox.hpp"
#include "coordinator/row_experts.hpp"
#include "decider/reads.hpp"
#include "routed.hpp"

namespace tandem {

// One layer of one step, as it happened; times in seconds of the steady clock.
struct LayerRecord {
  std::int64_t layer;
  std::vector<std::int32_t> choice, is_hit;  // (num_rows, top_k)
  std::vector<std::int32_t> guess;  // of the next layer's choice; empty: there is none
  std::vector<float> weights;
  std::vector<std::int32_t> fetched;  // experts of which the device has got copies in time
  std::int64_t num_computed;  // experts that the CPU computed
  double rung, begun, ended, answered;  // seen, the threads at work, `done` set
};

// A step that the device did not get through as it should; the text is one sentence's part.
class StepLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A step that waited too long for a disk: the same step may be done again.
class StepSlow : public StepLost {
 public:
  using StepLost::StepLost;
};

// A missed expert of a layer over a disk.
struct PlacedMiss {
  std::int32_t expert;
  Place place;
  const std::uint8_t* address;  // if memory has it
};

// An expert that is copied to the device for the layer that runs.
struct Fetch {
  std::int32_t expert;
  std::uint64_t address;  // where it will be
  double until;  // of the steady clock; then the CPU computes it, if it is not there
  FetchWord word;
};

// What is done about each layer, on the answering thread. It may throw.
class LayerDecisions {
 public:
  virtual ~LayerDecisions() = default;
  virtual void begin_step() = 0;  // with the step's first doorbell
  virtual bool asks(std::int32_t) const { return false; }  // what the layer behind this will choose
  // Ahead of the answer to a layer with misses: which of them are copied. By its choice, and by what
  // the next one is guessed to choose. Over a disk, where memory has its misses, which are ascending.
  virtual std::span<const Fetch> fetch(std::int64_t, std::span<const std::int32_t>,
                                       std::span<const std::int32_t>, std::span<const PlacedMiss>) {
    return {};
  }
  virtual void note(const LayerRecord& record) = 0;  // behind the answer
  virtual void end_step() {}  // also where a layer that was asked about has had no answer
};

class Coordinator {
 public:
  // The experts of `layers` must outlive it. It computes with threads of its own, `num_threads`
  // with the one that answers; `isa` is as for ExpertEngine.
  Coordinator(std::vector<RoutedLayer> layers, int num_threads, const std::string& isa);
  ~Coordinator();  // waits for the end of what is being answered
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Returns the number of a new mailbox, in memory of its own or as class Mailbox asks for it;
  // between steps. Throws std::invalid_argument for other layers than these.
  std::int64_t add_mailbox(std::int64_t num_rows, std::int64_t top_k, ValueType type,
                           std::uint8_t* memory = nullptr);
  const Mailbox& mailbox(std::int64_t number) const { return mailboxes_.at(number).box; }

  // Both before the first step. The hook sees each layer before it is answered; if it throws, the
  // thread ends: tests of what may go wrong.
  void set_decisions(std::unique_ptr<LayerDecisions> found) { decisions_ = std::move(found); }
  void set_hook(std::function<void(std::int64_t layer)> hook) { hook_ = std::move(hook); }

  ExpertEngine& engine() { return engine_; }

  // Before the device is given a step that uses this mailbox, and after it has ended the last one.
  // Throws StepLost if the thread is still at a step that was lost, after `patience` seconds.
  void begin_step(std::int64_t mailbox, double patience);

  // Returns when every layer has been answered and noted. Throws StepSlow, or StepLost when nothing
  // has happened for `patience` seconds; the device is then let go through the rest of the step, by
  // a thread of its own, however late it comes.
  void finish_step(double patience);

  // Gives up a step that the device will not go on with: nothing waits in it. Returns whether the
  // thread has left it, within `patience` seconds.
  bool abort_step(double patience);

  // Of the layers of the last step that were noted, in order.
  std::span<const LayerRecord> records() const { return {records_.data(), num_records_}; }

 private:
  enum Answer : std::uint8_t { kOpen, kTaken, kClosed };

  struct Owned {
    std::unique_ptr<std::uint8_t[]> memory;
    Mailbox box;
  };

  void start_thread();
  void loop();
  void answer_step();
  bool wait_for_doorbell(std::int64_t layer);
  void answer(std::int64_t layer);
  bool find_misses(std::int64_t layer, std::int64_t num_experts);
  std::span<const std::int32_t> wait_for_guess(std::int64_t layer) const;
  std::span<const Fetch> fetch(std::int64_t layer);
  std::int64_t compute(const RoutedLayer& host, std::span<const Fetch> fetches);
  void ask(const RoutedLayer& host);
  std::int64_t compute_coming(const RoutedLayer& host, std::span<const Fetch> fetches);
  const std::uint8_t* address_of(const RoutedLayer& host, std::int32_t expert) const;
  std::int64_t settle(const RoutedLayer& host, std::span<const Fetch> fetches);
  std::int64_t compute_rows(const RoutedLayer& host);
  void publish_fetched(std::int64_t layer, std::span<const Fetch> fetches);
  void note(std::int64_t layer, std::int64_t num_computed, double rung);
  void wait_until_idle(double patience);
  void let_go();
  void stop_letting_go();
  bool close_for_device(std::int64_t layer);
  std::string what_is_missing(std::int64_t layer, double patience) const;
  std::int64_t first_open() const;

  const std::vector<RoutedLayer> layers_;
  ExpertEngine engine_;
  RowExperts experts_;
  std::deque<Owned> mailboxes_;
  std::unique_ptr<LayerDecisions> decisions_;
  std::function<void(std::int64_t)> hook_;
  // Of the layer that is answered, by row: the missed expert, -1: none, and where it lies.
  std::vector<std::int32_t> missed_;
  std::vector<const std::uint8_t*> addresses_;
  std::vector<std::int32_t> asked_, tokens_;  // its experts that are asked for
  std::vector<PlacedMiss> places_;  // where these are; empty: memory has all
  std::vector<std::int32_t> fetched_;         // those that have come in time
  std::span<const std::int32_t> guess_;       // of the next layer's choice
  double begun_ = 0.0, ended_ = 0.0;          // of the threads' work
  std::vector<LayerRecord> records_;  // of all layers: their memory is used again
  std::size_t num_records_ = 0;

  const Mailbox* box_ = nullptr;  // of the step
  std::unique_ptr<std::atomic<std::uint8_t>[]> answers_;  // by layer
  std::atomic<std::uint64_t> progress_{0};
  std::atomic<bool> is_lost_{false};  // the thread leaves the step
  std::atomic<bool> has_ended_{false};  // and the device too
  std::thread letting_go_;  // of a step that is lost, until the next one begins

  std::mutex mutex_;  // of what follows; held for moments only
  std::condition_variable changed_;
  std::uint64_t wanted_step_ = 0, finished_step_ = 0;
  bool is_closing_ = false, is_idle_ = true, has_died_ = false, is_slow_ = false;
  std::string death_;
  std::thread thread_;
};

}  // namespace tandem
