// Copies experts into slots while captured steps run, in a thread that alone calls the driver and
// may block. A slot's content is right because of this order:
//
//   submit(copy)           the victim's entry is to be cleared; the slot may still be read. An
//                          expert on a disk is held in memory from now on, until its copy has
//                          happened
//     -> take_cleared      before the next launch, when the last step's thread has stopped
//                          deciding (Coordinator::begin_step): the entries are cleared on the
//                          launch's stream
//     -> begin_step        that launch's first doorbell: no kernel reads the slot any more
//     -> a victim from a disk is copied back into a host slot, if that is worth it
//     -> the copy in parts, then its entry in the device's table, if there is one that can be
//        written while a step runs, all on one stream. When these are known to have happened, its
//        entry in the host's table, which is copied to the device before each launch. So a late
//        entry is a miss now and a hit next time, never half an expert. Meanwhile the next copy is
//        queued
//     -> arrivals          only now may the slot be given away again
//
// Entries are set at any time, but cleared only between steps. Any thread calls `submit`; the one
// that launches calls `take_cleared`.
//
// Copies for the current layer begin at once (`submit` of slots that are not read), and those that
// the layer waits for come before all others (`fetch`):
//
//   look_out               after the answer to the previous layer: the thread spins, like the one
//                          that answers, so that a fetch need not wake it
//   the layer's doorbell   the previous layer has ended, so nothing reads its staging slots. This
//                          layer has looked up its experts, of which none is a victim. So until
//                          the next launch nothing reads a victim's slot, which belongs to the
//                          same layer
//     -> submit, fetch     the victim's entry is cleared before that launch, as above
//     -> the bytes, then the word becomes "landed" unless it was claimed. A staging slot gets no
//        entry; if two copies go into one, the stream keeps them in order
//
// Prefetches for later layers come next. They go into clear slots: the last copy is known to have
// happened, and the entry was cleared before this launch, or belonged to an expert of a layer that
// this step has passed. If the device has ended the last launch, they may begin before the next one
// (StepDecisions::expect). They get entries. A late one is a miss; its copy keeps the slot until it
// has happened and a later launch has cleared the entry.
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
  double seconds;  // by the steady clock
};

class CopyingThread {
 public:
  // `entries` is the host's table (num_layers, num_experts); slots[i] is the address of slot i. The
  // experts of `layers`, the slots and the table must outlive this. With 0 bytes per second the
  // speed is not limited.
  CopyingThread(std::unique_ptr<CopyEngine> engine, std::vector<RoutedLayer> layers,
                std::int64_t* entries, std::int64_t num_experts,
                std::vector<std::uint8_t*> slots, double bytes_per_second = 0.0);
  ~CopyingThread();  // drops copies that have not begun
  CopyingThread(const CopyingThread&) = delete;
  CopyingThread& operator=(const CopyingThread&) = delete;

  // `is_read` tells whether the current step may read the victims' slots.
  void submit(std::span<const SlotCopy> copies, bool is_read = true);

  // Copies experts for the layer whose doorbell has been taken. Returns who computes each, valid
  // until the next call. A copy for this use alone (`is_staged`) is dropped if it is claimed.
  // Copies `ahead` go into clear slots for later layers. One thread calls this. All copies come in
  // one call, because the thread that the first would wake takes the lock that the second would
  // need.
  std::span<const FetchWord> fetch(std::span<const FetchCopy> copies,
                                   std::span<const SlotCopy> ahead = {});

  // Called after an answer, when `fetch` will probably be called soon. The thread then spins until
  // that call, or for a while. Waking it up would take 2 to 4 microseconds before a first miss, and
  // more until it runs.
  void look_out();

  std::uint64_t address(std::int32_t slot) const {
    return reinterpret_cast<std::uintptr_t>(slots_[slot]);
  }

  // Adds entries that must be cleared before the next launch. Their slots are for fetches.
  void clear(const std::vector<std::int64_t>& keys);

  // Returns the keys whose entries must be cleared before the next launch.
  std::vector<std::int64_t> take_cleared();
  void begin_step();

  // Appends the copies that have ended to `found`.
  void take_arrivals(std::vector<Arrival>& found);

  // Returns when no copy is left that may begin.
  void drain();

  // The error that stopped the thread; empty: none.
  std::string error();

 private:
  struct Job {
    SlotCopy copy;
    std::uint64_t launch;  // the first launch at which the slot may be written
    HeldExpert held;  // the expert's memory, if its layer has a source and there was room
    bool is_staged = false;
    FetchWord word{};

    bool is_given_up() const { return is_staged && !word.is_open(); }
  };

  struct Queued {
    Job job;
    std::int64_t num_before;  // operations up to this job's last one
    HeldExpert back;  // room for the slot's old content
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

  std::deque<Queued> queued_;  // used only by the thread; destroyed after the engine
  const std::unique_ptr<CopyEngine> engine_;
  const std::vector<RoutedLayer> layers_;
  std::int64_t* const entries_;
  const std::int64_t num_experts_;
  const std::vector<std::uint8_t*> slots_;
  const double bytes_per_second_;
  FetchWords words_;
  std::vector<FetchWord> fetched_;  // of the last call
  std::vector<HeldExpert> holds_;  // likewise, before jobs take them
  double owed_seconds_ = 0.0;  // seconds by which copies were too fast

  std::mutex mutex_;  // guards the members below; held only for moments
  std::condition_variable changed_;
  std::deque<Job> fetches_, ahead_, jobs_;  // in order of priority
  std::vector<std::int64_t> to_clear_;
  std::vector<Arrival> arrivals_;
  std::uint64_t launched_ = 0, begun_ = 0;
  bool is_closing_ = false, is_copying_ = false, is_looking_ = false;
  double looks_until_ = 0.0;
  std::atomic<std::uint32_t> num_calls_{0};  // incremented under the mutex
  std::string error_;
  std::thread thread_;
};

}  // namespace tandem
