// Answers the device during a decode step. A thread polls the doorbells of a mailbox, computes the
// misses that each layer publishes, writes their results and lets the device go on. It does
// everything else that takes time (decisions, learning, records) after each answer, while the
// device computes.
//
// Of experts on a disk, those in memory are computed first, the others as they arrive. If a read
// takes too long, the step is lost (StepSlow); the caller may repeat it without the device's graph.
//
// The thread never calls a driver, and takes no lock that another thread holds while it waits for
// the device. The caller that waits for the step's end (`finish_step`) is the watchdog. If the
// thread does not answer in time, the watchdog answers with an error, so that the device never
// waits forever.
//
// Misses that are meanwhile copied to the device (`LayerDecisions::fetch`) are computed here only
// if they arrive too late: the device never waits for a copy alone.
//
// Each layer has a state word that says who answers it. Within a step it only advances:
//
//   open -> taken             by the answering thread, when it sees the doorbell
//   open or taken -> closed   by the writer of `done`: the thread after the results, or the
//                             watchdog with an error
//
// One thread calls `begin_step`, `finish_step` and `abort_step` in turn, and `records` in between.
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

// What happened at one layer of a step; times in seconds of the steady clock.
struct LayerRecord {
  std::int64_t layer;
  std::vector<std::int32_t> choice, is_hit;  // (num_rows, top_k)
  std::vector<std::int32_t> guess;  // the next layer's guessed choice; empty: none
  std::vector<float> weights;
  std::vector<std::int32_t> fetched;  // experts whose copies reached the device in time
  std::int64_t num_computed;  // experts that the CPU computed
  double rung, begun, ended, answered;  // doorbell seen, work begun, work ended, `done` set
};

// A step that the device could not complete; the message is part of a sentence.
class StepLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A step that waited too long for a disk. It may be repeated.
class StepSlow : public StepLost {
 public:
  using StepLost::StepLost;
};

// A missed expert of a layer over a disk.
struct PlacedMiss {
  std::int32_t expert;
  Place place;
  const std::uint8_t* address;  // null if memory does not have it
};

// An expert that is copied to the device for the current layer.
struct Fetch {
  std::int32_t expert;
  std::uint64_t address;  // its address on the device
  double until;  // by the steady clock; after it the CPU computes the expert unless it has arrived
  FetchWord word;
};

// The decisions about each layer. Called on the answering thread; may throw.
class LayerDecisions {
 public:
  virtual ~LayerDecisions() = default;
  virtual void begin_step() = 0;  // at the step's first doorbell
  // Whether the next layer's router is run ahead.
  virtual bool asks(std::int32_t) const { return false; }
  // Called before a layer with misses is answered; returns the misses to copy. Arguments: the
  // layer's choice, the next layer's guessed choice, and over a disk the places of the misses, in
  // ascending order.
  virtual std::span<const Fetch> fetch(std::int64_t, std::span<const std::int32_t>,
                                       std::span<const std::int32_t>, std::span<const PlacedMiss>) {
    return {};
  }
  virtual void note(const LayerRecord& record) = 0;  // after the answer
  virtual void end_step() {}  // also if a layer that was decided got no answer
};

class Coordinator {
 public:
  // The experts of `layers` must outlive this. It computes with `num_threads` threads including the
  // answering one; `isa` is as in ExpertEngine.
  Coordinator(std::vector<RoutedLayer> layers, int num_threads, const std::string& isa);
  ~Coordinator();  // waits until the current layer is answered
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Returns the number of a new mailbox, in its own memory or in `memory`, which must satisfy class
  // Mailbox. Call it between steps. Throws std::invalid_argument if layers do not fit.
  std::int64_t add_mailbox(std::int64_t num_rows, std::int64_t top_k, ValueType type,
                           std::uint8_t* memory = nullptr);
  const Mailbox& mailbox(std::int64_t number) const { return mailboxes_.at(number).box; }

  // Call both before the first step. The hook is called before each layer is answered. If it
  // throws, the thread ends; tests cause failures this way.
  void set_decisions(std::unique_ptr<LayerDecisions> found) { decisions_ = std::move(found); }
  void set_hook(std::function<void(std::int64_t layer)> hook) { hook_ = std::move(hook); }

  ExpertEngine& engine() { return engine_; }

  // Call it before the device gets a step with this mailbox, and after it has ended the previous
  // one. Throws StepLost if the thread is still in a lost step after `patience` seconds.
  void begin_step(std::int64_t mailbox, double patience);

  // Returns when every layer has been answered and noted. Throws StepSlow, or StepLost if nothing
  // happens for `patience` seconds. Then another thread lets the device go through the rest of the
  // step, however late it comes.
  void finish_step(double patience);

  // Gives up a step that the device will not continue. Returns whether the answering thread has
  // left it within `patience` seconds.
  bool abort_step(double patience);

  // The noted layers of the last step, in order.
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
  void request_misses(const RoutedLayer& host);
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
  // The current layer by row: the missed expert (-1: none), and its address.
  std::vector<std::int32_t> missed_;
  std::vector<const std::uint8_t*> addresses_;
  // Missed experts and their tokens, as requested from a source.
  std::vector<std::int32_t> requested_, tokens_;
  std::vector<PlacedMiss> places_;  // their places; empty: memory has all experts
  std::vector<std::int32_t> fetched_;  // those that arrived in time
  std::span<const std::int32_t> guess_;  // of the next layer's choice
  double begun_ = 0.0, ended_ = 0.0;  // of the threads' work
  std::vector<LayerRecord> records_;  // of all layers; reused
  std::size_t num_records_ = 0;

  const Mailbox* box_ = nullptr;  // of the current step
  std::unique_ptr<std::atomic<std::uint8_t>[]> answers_;  // by layer
  std::atomic<std::uint64_t> progress_{0};
  std::atomic<bool> is_lost_{false};  // the thread must leave the step
  std::atomic<bool> has_ended_{false};  // the device has left it, too
  std::thread letting_go_;  // runs after a lost step, until the next one begins

  std::mutex mutex_;  // guards the members below; held only for moments
  std::condition_variable changed_;
  std::uint64_t wanted_step_ = 0, finished_step_ = 0;
  bool is_closing_ = false, is_idle_ = true, has_died_ = false, is_slow_ = false;
  std::string death_;
  std::thread thread_;
};

}  // namespace tandem
