// Copies experts into slots while captured steps run: a thread that alone calls the driver and may
// block. It keeps the order that makes a slot right:
//
//   submit(copy)           the victim's entry is to be cleared; the slot may still be read. An expert
//                          on a disk is held where it lies from now on, until its copy has happened
//     -> take_cleared      ahead of the next launch, once the last step's thread has stopped deciding
//                          (Coordinator::begin_step): the entries are cleared on the launch's stream
//     -> begin_step        that launch's first doorbell: no kernel reads the slot any more
//     -> a victim of a disk is copied back into a host slot, if it is worth that
//     -> the copy, part by part, then its entry in a table of the device, if it has one that can be
//        written while a step runs, on one stream; once they are seen to have happened its entry in
//        the host's table, which is copied to the device ahead of each launch: a late entry is a
//        miss now and a hit next time, never half an expert. The next copy is queued meanwhile
//     -> arrivals          only then may the slot be given away again
//
// An entry is set at any time, and cleared only between steps. `submit` is called by any thread,
// `take_cleared` by the one that launches.
//
// What is decided about the layer that runs begins at once (`submit` of slots that are not read), and
// what that layer is waiting for goes ahead of all else (`fetch`):
//
//   look_out               behind the answer to the layer before: the thread keeps its processor, as
//                          the one that answers does, so that a fetch need not wake it
//   the layer's doorbell   the layer before has ended, so nothing reads its staging slots; and this
//                          layer has looked its experts up, of which none is a victim. So nothing
//                          reads a victim's slot, which is the same layer's, before the next launch
//     -> submit, fetch     the victim's entry is cleared ahead of that launch, as above
//     -> the bytes, then the word is landed, unless it has been claimed. A staging slot gets no
//        entry; of two copies into one, the later one lies behind the other on the stream
//
// Copies ahead of layers to come are next, into slots that are clear: whose last copy is known to
// have happened, and whose entry was cleared ahead of this launch, or is that of an expert of a layer
// that this step has passed. They may begin ahead of the launch too (StepDecisions::expect), where
// the device has come to the end of the last one. They get their entries: one that is late is a miss, whose copy has its
// slot until it has happened and a later launch has cleared it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "coordinator/copy_engine.hpp"
#include "coordinator/fetch_words.hpp"
#include "coordinator/step_policy.hpp"
#include "routed.hpp"

namespace tandem {

struct Arrival {
  std::int32_t layer, expert;
  double seconds;  // of the steady clock
};

class CopyingThread {
 public:
  // `entries` is the host's table (num_layers, num_experts); slot i lies at slots[i]. The experts
  // of `layers`, the slots and the table outlive it. 0 bytes per second: as fast as it can be.
  CopyingThread(std::unique_ptr<CopyEngine> engine, std::vector<RoutedLayer> layers,
                std::int64_t* entries, std::int64_t num_experts,
                std::vector<std::uint8_t*> slots, double bytes_per_second = 0.0);
  ~CopyingThread();  // gives up what has not begun
  CopyingThread(const CopyingThread&) = delete;
  CopyingThread& operator=(const CopyingThread&) = delete;

  // `is_read` tells whether what runs may read the victims' slots.
  void submit(std::span<const SlotCopy> copies, bool is_read = true);

  // Copies for the layer whose doorbell has been taken; returns who computes each, until the next
  // call. One for this use alone (`is_staged`) is given up when it is claimed. Those `ahead` are for
  // layers to come, into clear slots. Called by one thread. All at once: the thread that the first
  // one wakes takes the lock which the second one needs.
  std::span<const FetchWord> fetch(std::span<const FetchCopy> copies,
                                   std::span<const SlotCopy> ahead = {});

  // Behind an answer: a call of `fetch` is expected soon. Then waking the thread, 2 to 4 microseconds
  // ahead of a first miss and more until it is at work, is not needed. Until that call, or for a while.
  void look_out();

  std::uint64_t address(std::int32_t slot) const {
    return reinterpret_cast<std::uintptr_t>(slots_[slot]);
  }

  // These entries must be cleared ahead of the launch that comes, and their slots are for fetches.
  void clear(const std::vector<std::int64_t>& keys);

  // Returns the keys whose entries must be cleared ahead of the launch that comes.
  std::vector<std::int64_t> take_cleared();
  void begin_step();

  // Moves what has ended to the end of `found`.
  void take_arrivals(std::vector<Arrival>& found);

  // Returns when nothing is left that may begin.
  void drain();

  // What has stopped the thread; empty: nothing.
  std::string error();

 private:
  struct Job {
    SlotCopy copy;
    std::uint64_t launch;  // from which on the slot may be written
    HeldExpert held;       // of a layer that has a source, if there was room: where it lies
    bool is_staged = false;
    FetchWord word{};

    bool is_given_up() const { return is_staged && !word.is_open(); }
  };

  struct Queued {
    Job job;
    std::int64_t num_before;  // operations up to its last one
    HeldExpert back;          // room for what was in the slot
  };

  void loop();
  void wait_for_call(std::unique_lock<std::mutex>& lock);
  bool tell();
  HeldExpert held(const SlotCopy& copy, bool waits) const;
  HeldExpert take_back(const SlotCopy& copy);
  std::optional<Job> next();
  void carry_out(Job job);
  HeldExpert bring(Job& job);
  void let_all_go() noexcept;
  void wait_for(std::int64_t most_left);
  void keep_pace(std::int64_t bytes, double begin);
  bool may_begin() const {
    return !fetches_.empty() || !ahead_.empty() || (!jobs_.empty() && jobs_.front().launch <= begun_);
  }

  std::deque<Queued> queued_;  // of the thread alone; what it holds goes after the engine
  const std::unique_ptr<CopyEngine> engine_;
  const std::vector<RoutedLayer> layers_;
  std::int64_t* const entries_;
  const std::int64_t num_experts_;
  const std::vector<std::uint8_t*> slots_;
  const double bytes_per_second_;
  FetchWords words_;
  std::vector<FetchWord> fetched_;  // of the last call
  std::vector<HeldExpert> holds_;  // likewise, on their way to the jobs
  double behind_ = 0.0;  // seconds that copies have been too fast

  std::mutex mutex_;  // of what follows; held for moments only
  std::condition_variable changed_;
  std::deque<Job> fetches_, ahead_, jobs_;  // in this order
  std::vector<std::int64_t> to_clear_;
  std::vector<Arrival> arrivals_;
  std::uint64_t launched_ = 0, begun_ = 0;
  bool is_closing_ = false, is_copying_ = false, is_looking_ = false;
  double looks_until_ = 0.0;
  std::atomic<std::uint32_t> num_calls_{0};  // raised by who holds the mutex
  std::string error_;
  std::thread thread_;
};

}  // namespace tandem
