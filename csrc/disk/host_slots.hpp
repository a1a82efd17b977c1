// The experts of a model that is larger than the memory: each layer has slots in memory, the rest is
// read from the disk when it is asked for. A cache as that on a GPU, with the same eviction; here
// every active expert has to come. What eviction does not admit, and what does not fit at once, passes
// through transit slots that all layers share.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "coordinator/step_policy.hpp"
#include "decider/reads.hpp"
#include "disk/reader_pool.hpp"
#include "expert_source.hpp"
#include "policy_tables.hpp"

namespace tandem {

class HostSlots final : public ExpertSource {
 public:
  struct Layer {
    std::string path;
    std::int64_t first, stride, expert_bytes;  // in the file: expert e is at first + e * stride
    std::int32_t num_experts;
    // CRC-32C by expert of all bytes up to the next one; none: unknown.
    std::vector<std::uint32_t> sums;
    std::uint8_t* memory;             // num_slots * slot_bytes, from a page's begin on
    std::int64_t num_slots;
    NextUseTable* table;  // outlives this; null: the least recently used goes

    std::int64_t slot_bytes() const;
  };
  struct Options {
    std::uint8_t* transit;  // slots that hold the largest layer's experts
    std::int64_t num_transit, transit_bytes;
    std::int64_t num_held;  // on top, likewise: for experts that are held and have no slot
    int num_readers;
    std::int64_t piece_bytes;
    double patience;  // seconds without a byte until a use fails
  };
  struct Counts {
    std::int64_t hits = 0, misses = 0, ahead = 0, read_bytes = 0;  // ahead: of the hits
    std::int64_t device_hits = 0, device_misses = 0;  // of experts that were held for a device
    std::int64_t kept = 0;  // experts that came back from a device
    double waited_seconds = 0.0;
  };

  // Throws std::runtime_error for files that are not there or too short.
  HostSlots(std::vector<Layer> layers, const Options& options);

  // Reads experts into free slots while nothing else is asked of the disk, layer by layer; once.
  void fill();

  // By layer, from the first one on, the experts that its next use will want, as far as they are
  // known: their reads begin. In place of what was expected before.
  void expect(std::vector<Ids> experts);

  void begin(const ExpertUse& use) override;
  std::span<const Arrived> there() override;
  std::span<const Arrived> next() override;
  void end() noexcept override;

  // From any thread: so much of the slots is used from each layer's next use on; the memory of the
  // others goes back to the system. 1: all.
  void use_share(double share) { share_.store(share, std::memory_order_relaxed); }

  bool has_expert(std::int32_t layer, std::int32_t expert) const {
    return layer >= 0 && layer < resident_.num_layers && expert >= 0 &&
           expert < layers_[layer].num_experts;
  }
  ExpertHold hold(std::int32_t layer, std::int32_t expert, bool waits) override;
  bool has_come(const ExpertHold& hold) override;
  void wait_for(ExpertHold& hold) override;
  void let_go(const ExpertHold& hold) noexcept override;
  ExpertHold take_back(std::int32_t layer, std::int32_t expert) override;
  void keep(const ExpertHold& hold) noexcept override;

  // From any thread: the state of every expert on a device above, by layer and expert, as many as the
  // largest layer has. What is ready there is the first to leave here.
  bool takes_states(std::size_t count) const { return count == resident_.state.size(); }
  void note_on_device(const std::uint8_t* states);

  // Of slots that are pinned for a device: their memory stays, whatever share is used.
  void pin() { is_pinned_ = true; }

  // Throws DiskError in a process that was forked from the one with the readers; so do uses and holds.
  void require_here() const { tandem::require_here(readers_.home()); }

  Counts counts() const {
    const auto lock = locked();
    return counts_;
  }
  bool is_direct() const;
  // Before the first use: files whose system takes unbuffered reads and buffers them in silence.
  void read_buffered();
  bool has(std::int32_t layer, std::int64_t num_experts) const {
    return layer >= 0 && layer < resident_.num_layers && layers_[layer].num_experts == num_experts;
  }
  // Experts of a layer that are in memory, ascending.
  Ids resident(std::int32_t layer) const;
  // Where memory has some experts of a layer, for decisions about it.
  std::vector<Place> places(std::int32_t layer, const Ids& experts);
  ReaderPool& readers() { return readers_; }

 private:
  enum class Cause : std::uint8_t { kDemand, kAhead, kFilling };  // of a read
  struct Slot {
    DiskRead read;
    std::uint8_t* memory = nullptr;
    std::int32_t layer = -1, expert = -1;  // -1: nothing
    std::int32_t num_holders = 0;
    bool is_passed = false;  // of transit slots: only its holders need it
    bool is_coming_back = false;  // of rooms: its bytes come from a device

    void trade(Slot& other);
  };
  struct Wanted {
    Slot* slot = nullptr;  // null: waits for a transit slot
    bool is_handed_out = false, is_done = false;
    bool is_asked = false;  // by this use: what another one asked for and failed is read again
  };

  std::unique_lock<std::mutex> locked() const;
  void settle(std::int32_t layer);
  void settle_transit(std::int32_t layer);
  ExpertHold try_hold(std::int32_t layer, std::int32_t expert, bool waits);
  Slot* slot_to_hold(std::int32_t layer, std::int32_t expert);
  Slot* free_room(bool waits);
  Slot& slot_of(const ExpertHold& hold);
  static void leave(Slot& slot);
  void require_read(Slot& slot, std::int32_t layer, bool& is_asked);
  using Moment = std::chrono::steady_clock::time_point;
  Moment end_of(double patience) const;
  bool arrives(std::uint32_t seen, Moment last);
  [[noreturn]] void give_up(std::int32_t layer) const;
  void note(const ExpertUse& use);
  Scores scores_of(std::int32_t layer) const;
  Admitted admitted_back(std::int32_t layer, std::int32_t expert) const;
  void describe(Slot& slot, std::int32_t layer, std::int32_t expert);
  Slot* find(std::int32_t layer, std::int32_t expert, std::deque<Slot>& others);
  bool is_resident(const Slot& slot) const;
  void resize(std::int32_t layer);
  void admit_absent(const Scores& scores, Ids absent);
  void read_into(Slot& slot, std::int32_t layer, std::int32_t expert, Cause cause);
  void use_transit_slots();
  void order_ahead();
  bool is_expected(const Slot& slot) const;
  void read_expected();
  bool read_ahead(std::int32_t layer, std::int32_t expert);
  bool has_passed(const Slot& slot) const;
  Slot* free_transit();
  SharedSlots shared_slots() const;
  void release_handed_out();
  bool hand_out();
  void learn();
  void fill_next();
  bool is_wanted(std::int32_t layer, std::int32_t expert) const;

  std::vector<Layer> layers_;
  std::vector<ExpertFile> files_;
  Resident resident_;
  std::vector<std::deque<Slot>> slots_;  // by layer
  std::deque<Slot> transit_, held_;
  std::vector<std::uint8_t> on_device_;  // states as in `resident_`
  std::vector<Scores> last_use_;  // by layer and expert: number of the step, without a table
  std::uint32_t step_ = 1;  // 0: never
  std::int32_t layer_ = -1;  // of the present use, or the last one
  bool is_prompt_ = false, has_learned_ = true;
  std::int32_t batch_ = 1;  // tokens of a decode step
  double use_patience_ = 0.0;  // of the present use
  Ids experts_, above_, ahead_;  // in use; of the layer above; to read ahead, the first one last
  std::vector<Ids> expected_;  // by layer; none of a layer that has been used since
  std::vector<Wanted> wanted_;  // by place
  std::vector<Arrived> arrived_;
  bool has_one_size_ = true;  // of all slots: their memory can be traded
  Scores scores_;  // by expert of the present use's layer
  std::vector<Ids> unused_;  // by layer: slots without memory
  bool is_filled_ = false;  // or is being filled
  std::int32_t filling_ = 0;  // the layer
  std::atomic<double> share_{1.0};
  std::atomic<bool> is_pinned_{false};
  double patience_;
  Counts counts_;
  mutable std::mutex mutex_;  // of all above; not held while something is waited for
  std::condition_variable is_let_go_;
  ReaderPool::Owner owned_readers_;  // goes first, and with it what writes into slots
  ReaderPool& readers_;
};

}  // namespace tandem
