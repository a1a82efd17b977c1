// The experts of a model that is larger than memory. Each layer has slots in memory; all other
// experts are read from the disk on demand. It is a cache like the GPU's, with the same eviction,
// except that every active expert must be read into memory. Experts that eviction does not
// admit, and those that do not fit at once, pass through transit slots that all layers share.
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
#include "disk/look_ahead.hpp"
#include "disk/reader_pool.hpp"
#include "expert_source.hpp"
#include "policy_tables.hpp"

namespace tandem {

class HostSlots final : public ExpertSource {
 public:
  struct Layer {
    std::string path;
    std::int64_t first, stride, expert_bytes;  // in the file, expert e begins at first + e * stride
    std::int32_t num_experts;
    // CRC-32C by expert, of all bytes up to the next expert; empty: unknown.
    std::vector<std::uint32_t> sums;
    std::uint8_t* memory;  // num_slots * slot_bytes, aligned to a page
    std::int64_t num_slots;
    NextUseTable* table;  // must outlive this; null: evicts the least recently used

    std::int64_t slot_bytes() const;
  };
  struct Options {
    std::uint8_t* transit;  // slots of the largest layer's expert size
    std::int64_t num_transit, transit_bytes;
    std::int64_t num_held;  // additional ones for held experts without a slot
    int num_readers;
    std::int64_t piece_bytes;
    double patience;  // seconds without a byte after which a use fails
  };
  struct Counts {
    std::int64_t hits = 0, misses = 0, ahead = 0, read_bytes = 0;  // ahead: part of the hits
    std::int64_t likely = 0, likely_used = 0;  // reads of likely experts; those that were used
    std::int64_t device_hits = 0, device_misses = 0;  // of experts held for a device
    std::int64_t kept = 0;  // experts taken back from a device
    double waited_seconds = 0.0;
  };

  // Throws std::runtime_error for files that are missing or too short.
  HostSlots(std::vector<Layer> layers, const Options& options);

  // Reads experts into free slots while the disk is idle, layer by layer; once.
  void fill();

  // The experts that each layer's next use will need, from the first layer on, as far as they are
  // known. Their reads begin. Replaces earlier expectations.
  void expect(std::vector<Ids> experts);

  // The experts that a layer's next use may need, each token's best first, as (tokens, top_k). Reads
  // of some begin while the disk is idle. Replaces earlier ones.
  void note_likely(std::int32_t layer, const Ids& experts, std::int64_t top_k);

  void begin(const ExpertUse& use) override;
  std::span<const Arrived> there() override;
  std::span<const Arrived> next() override;
  void end() noexcept override;
  void look_ahead(DenseEngine& engine, const RouterInputs& inputs) override;
  // From now on the next layers' routers are run ahead. `look_ahead` must outlive this.
  void run_ahead(LookAhead& look_ahead) { look_ahead_ = &look_ahead; }
  // No trial decides whether steps look ahead.
  void look_always() { always_looks_ = true; }
  // Instead of what routers say: predictions (tokens, top_k) by layer, for measurements.
  void script(std::vector<Ids> predicted) { script_ = std::move(predicted); }

  // From any thread. From its next use on, each layer uses this share of its slots; the memory of
  // the others returns to the system. 1: all.
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

  // From any thread: the state of every expert on a device, by layer and expert, with as many
  // experts per layer as the largest layer has. Experts that are ready there leave here first.
  bool takes_states(std::size_t count) const { return count == resident_.state.size(); }
  void note_on_device(const std::uint8_t* states);

  // For slots that are pinned for a device: they keep their memory, whatever share is used.
  void pin() { is_pinned_ = true; }

  // Throws DiskError in a process that was forked from the one with the readers. So do uses and
  // holds.
  void require_here() const { tandem::require_here(readers_.home()); }

  Counts counts() const {
    const auto lock = locked();
    return counts_;
  }
  bool is_direct() const;
  // Call it before the first use if the file system accepts unbuffered reads but buffers them
  // silently.
  void read_buffered();
  bool has(std::int32_t layer, std::int64_t num_experts) const {
    return layer >= 0 && layer < resident_.num_layers && layers_[layer].num_experts == num_experts;
  }
  // Experts of a layer that are in memory, in ascending order.
  Ids resident(std::int32_t layer) const;
  // Where memory has these experts of a layer, for decisions about it.
  std::vector<Place> places(std::int32_t layer, const Ids& experts);
  ReaderPool& readers() { return readers_; }

 private:
  enum class Cause : std::uint8_t { kDemand, kAhead, kLikely, kFilling };  // why a read is made
  struct Slot {
    DiskRead read;
    std::uint8_t* memory = nullptr;
    std::int32_t layer = -1, expert = -1;  // -1: nothing
    std::int32_t num_holders = 0;
    bool is_passed = false;  // for transit slots: only holders need it
    bool is_coming_back = false;  // for rooms: its bytes come from a device

    void trade(Slot& other);
  };
  struct Wanted {
    Slot* slot = nullptr;  // null: waiting for a transit slot
    bool is_handed_out = false, is_done = false;
    bool was_under_way = false;  // when the use began; it asks for a slot once it is done
    bool is_demanded = false;  // by this use; a failed read that another use requested is repeated
  };

  std::unique_lock<std::mutex> locked() const;
  void settle(std::int32_t layer);
  void settle_transit(std::int32_t layer);
  ExpertHold try_hold(std::int32_t layer, std::int32_t expert, bool waits);
  Slot* slot_to_hold(std::int32_t layer, std::int32_t expert);
  Slot* free_room(bool waits);
  Slot& slot_of(const ExpertHold& hold);
  static void leave(Slot& slot);
  void require_read(Slot& slot, std::int32_t layer, bool& is_demanded);
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
  bool may_look_ahead(std::int32_t layer) const;
  void note_step(const ExpertUse& use);
  void judge_likely(std::int32_t layer);
  void withdraw(std::int32_t layer, std::int32_t expert);
  void admit_late(Wanted& wanted, std::int32_t expert);
  bool is_expected(const Slot& slot) const;
  void read_expected();
  bool read_ahead(std::int32_t layer, std::int32_t expert, Cause cause);
  bool has_passed(const Slot& slot) const;
  Slot* free_transit();
  SharedSlots shared_slots() const;
  void release_handed_out();
  bool hand_out();
  template <class IsOfKind>
  bool hand_out(std::size_t most, const IsOfKind& is_of_kind);
  bool has_reads_left() const;
  void learn();
  void fill_next();
  bool is_wanted(std::int32_t layer, std::int32_t expert) const;

  std::vector<Layer> layers_;
  std::vector<ExpertFile> files_;
  Resident resident_;
  std::vector<std::deque<Slot>> slots_;  // by layer
  std::deque<Slot> transit_, held_;
  std::vector<std::uint8_t> on_device_;  // states as in `resident_`
  // By layer and expert: step of the last use, for layers without a table.
  std::vector<Scores> last_use_;
  std::uint32_t step_ = 1;  // 0: never
  std::int32_t layer_ = -1;  // the current or last use's
  bool is_prompt_ = false, has_learned_ = true;
  std::int32_t batch_ = 1;  // tokens per decode step
  double use_patience_ = 0.0;  // of the current use
  // Used now; used in the layer above; to read ahead, the first one last.
  Ids experts_, above_, ahead_;
  std::vector<Ids> expected_;  // by layer; empty once the layer has been used
  // Of the layer that is used next: absent experts that are likely to be used.
  std::int32_t likely_layer_ = -1;
  std::vector<LikelyExpert> likely_;
  Chances chances_ = Chances(1, kFirstChance);  // by rank
  LookAhead* look_ahead_ = nullptr;
  LookAheadTrial trial_;
  bool always_looks_ = false;
  std::int64_t step_tokens_ = 0;
  Moment step_began_;
  std::vector<Ids> script_;
  std::vector<Wanted> wanted_;  // by position in the use
  std::vector<Arrived> arrived_;
  bool has_one_size_ = true;  // whether all slots have one size, so that memory can be traded
  Scores scores_;  // by expert of the current use's layer
  std::vector<Ids> unused_;  // by layer: slots without memory
  bool is_filled_ = false;  // or filling is under way
  std::int32_t filling_ = 0;  // the layer to fill
  std::atomic<double> share_{1.0};
  std::atomic<bool> is_pinned_{false};
  double patience_;
  Counts counts_;
  mutable std::mutex mutex_;  // guards all members above; not held while waiting
  std::condition_variable is_let_go_;
  ReaderPool::Owner owned_readers_;  // destroyed first, because readers write into slots
  ReaderPool& readers_;
};

}  // namespace tandem
