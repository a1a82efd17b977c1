// Compares captured steps on the CPU twin with the same experts in one call: with random delays,
// copies into slots under way, fetches for the layer itself, experts in memory or on a disk, and
// every failure.
// Also built with ThreadSanitizer.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "coordinator/coordinator.hpp"
#include "coordinator/copying.hpp"
#include "coordinator/step_decisions.hpp"
#include "coordinator/twin_stream.hpp"
#include "disk/host_slots.hpp"
#include "random_layers.hpp"

namespace {

using namespace tandem;  // NOLINT: a program of its own
using checks::Layer;
using checks::make_layer;
using checks::Random;
using checks::Values;

constexpr int kMachines = 12, kSteps = 25;
constexpr double kPatience = 20.0, kShortPatience = 0.15;
constexpr std::int64_t kNumHeld = 4;

void sleep_us(std::int64_t microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// The tokens of a step, and its layers' results.
struct Step {
  std::int64_t num_tokens;
  std::vector<Values> hidden, weights;  // by layer
  std::vector<std::vector<std::int64_t>> index;
  std::vector<std::vector<std::uint8_t>> out;
};

class Machine {
 public:
  // With `has_disk`, experts come from a file, and memory has room for a few of them.
  Machine(Random& random, std::int64_t slots_a_layer, bool has_policy, bool blocks_copies,
          bool has_disk = false)
      : random_(random),
        num_experts_(random.between(3, 9)),
        num_rows_(1 << random.between(0, 3)),
        top_k_(random.between(1, 3)),
        type_(static_cast<ValueType>(random.between(0, 2))),
        blocks_copies_(blocks_copies),
        twin_engine_(1, "portable"),
        alone_(twin_engine_) {
    const std::int64_t hidden = 8 * random.between(1, 8), num_layers = random.between(2, 4);
    for (std::int64_t l = 0; l < num_layers; ++l)
      layers_.push_back(make_layer(random, hidden, num_experts_));
    std::vector<RoutedLayer> routed;
    for (const Layer& layer : layers_) routed.push_back(layer.routed);
    if (has_disk) put_on_disk(routed);
    coordinator_ = std::make_unique<Coordinator>(
        routed, static_cast<int>(random.between(1, 2)), "portable");
    const std::int64_t box = coordinator_->add_mailbox(num_rows_, top_k_, type_);
    table_.assign(num_layers * num_experts_, 0);
    make_slots(slots_a_layer, routed, has_policy);
    twin_ = std::make_unique<TwinStream>(routed, coordinator_->mailbox(box), table_.data(),
                                         twin_engine_, static_cast<int>(random.between(0, 200)),
                                         static_cast<unsigned>(random.between(0, 1 << 20)));
  }
  ~Machine() {
    is_running_.store(false);
    coordinator_.reset();  // first, because its thread submits copies
    copying_.reset();
    disk_.reset();
    if (file_ != nullptr) std::fclose(file_);
  }

  Coordinator& coordinator() { return *coordinator_; }
  std::int64_t num_layers() const { return static_cast<std::int64_t>(layers_.size()); }
  std::int64_t num_hits() const { return num_hits_; }
  std::int64_t num_fetched() const { return num_fetched_; }  // those that the twin computed

  // Changes the policy's rule between steps, so that only some of them fetch.
  void change_rule() {
    if (policy_)
      policy_->set_rule(static_cast<Rule>(random_.between(0, 2)), random_.between(0, 1) == 1);
  }

  // Runs a step and compares it. Throws StepLost like the coordinator.
  bool run(double patience, std::int64_t stops_before = -1) {
    Step step = random_step();
    coordinator_->begin_step(0, kPatience);
    clear_entries();
    is_running_.store(true);
    {
      TwinStep stream(*twin_, calls(step), stops_before);
      for (int copies = 0; policy_ == nullptr && copies < 3; ++copies) copy_something();
      try {
        coordinator_->finish_step(patience);
      } catch (...) {
        is_running_.store(false);
        stream.join();
        throw;
      }
    }
    is_running_.store(false);
    for (const LayerRecord& record : coordinator_->records()) {
      num_fetched_ += static_cast<std::int64_t>(record.fetched.size());
      num_hits_ += std::count(record.is_hit.begin(), record.is_hit.end(), 1);
    }
    return coordinator_->records().size() == layers_.size() && is_right(step);
  }

  // Copies an expert at any time, into a free slot or in place of another expert, whose slot a
  // later layer may still read in this step.
  void copy_something() {
    take_arrivals();
    const auto layer = static_cast<std::int32_t>(random_.between(0, num_layers() - 1));
    const auto expert = static_cast<std::int32_t>(random_.between(0, num_experts_ - 1));
    if (resident_.state[layer * num_experts_ + expert] != kEmpty) return;
    std::int32_t victim = kNone;
    if (resident_.free[layer].empty()) {
      for (const std::int32_t member : resident_.members[layer])
        if (resident_.state[layer * num_experts_ + member] == kReady) victim = member;
      if (victim == kNone) return;
      resident_.remove(layer, victim);
    }
    const SlotCopy copy{layer, expert, resident_.insert(layer, expert), victim};
    copying_->submit({&copy, 1});
  }

 private:
  // The twin's own layers do not change, because it reads by address.
  void put_on_disk(std::vector<RoutedLayer>& routed) {
    const std::int64_t page = kDiskPage, num_layers = this->num_layers();
    std::int64_t stride = 0;
    for (const RoutedLayer& layer : routed)
      stride = std::max(stride, (layer.expert_bytes + page - 1) / page * page);
    std::vector<std::uint8_t> bytes(num_layers * num_experts_ * stride);
    for (std::int64_t i = 0; i < num_layers * num_experts_; ++i) {
      const RoutedLayer& layer = routed[i / num_experts_];
      std::memcpy(bytes.data() + i * stride, layer.expert(i % num_experts_), layer.expert_bytes);
    }
    file_ = std::tmpfile();
    if (file_ == nullptr || std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size() ||
        std::fflush(file_) != 0)
      throw std::runtime_error("a temporary file cannot be written");
    const std::int64_t num_slots = random_.between(0, num_experts_), num_transit = num_experts_;
    memory_.resize((num_layers * num_slots + num_transit + kNumHeld) * stride + page);
    const auto begin = reinterpret_cast<std::uintptr_t>(memory_.data());
    std::uint8_t* memory = memory_.data() + (page - static_cast<std::int64_t>(begin % page));
    std::vector<HostSlots::Layer> slots;
    for (std::int64_t l = 0; l < num_layers; ++l)
      slots.push_back({"/proc/self/fd/" + std::to_string(fileno(file_)), l * num_experts_ * stride,
                       stride, routed[l].expert_bytes, static_cast<std::int32_t>(num_experts_), {},
                       memory + l * num_slots * stride, num_slots, nullptr});
    disk_ = std::make_unique<HostSlots>(
        std::move(slots), HostSlots::Options{memory + num_layers * num_slots * stride, num_transit,
                                             stride, kNumHeld, 4, page, kPatience});
    for (std::int64_t l = 0; l < num_layers; ++l) {
      routed[l].source = disk_.get();
      routed[l].number = static_cast<std::int32_t>(l);
    }
  }

  void make_slots(std::int64_t each, const std::vector<RoutedLayer>& routed, bool has_policy) {
    resident_ = {num_layers(), num_experts_, std::vector<std::uint8_t>(table_.size()),
                 std::vector<std::int32_t>(table_.size(), -1), std::vector<Ids>(num_layers()),
                 std::vector<Ids>(num_layers())};
    std::vector<std::uint8_t*> addresses;
    for (std::int64_t slot = 0; slot < each * num_layers(); ++slot) {
      const Layer& layer = layers_[slot / each];
      slots_.emplace_back(layer.routed.expert_bytes);
      addresses.push_back(slots_.back().data());
      resident_.free[slot / each].push_back(static_cast<std::int32_t>(slot));
    }
    std::int64_t most = 0;
    for (const Layer& layer : layers_) most = std::max(most, layer.routed.expert_bytes);
    for (Ids* staging : {&resident_.staging, &resident_.free_ahead})
      for (std::int64_t more = random_.between(0, 3); more > 0; --more) {
        staging->push_back(static_cast<std::int32_t>(slots_.size()));
        slots_.emplace_back(most);
        addresses.push_back(slots_.back().data());
      }
    copying_ = std::make_unique<CopyingThread>(
        std::make_unique<HostCopyEngine>([this] { delay_copy(); }), routed, table_.data(),
        num_experts_, std::move(addresses));
    if (has_policy) {
      const auto start = std::make_shared<RuleStart>(5);
      for (std::int64_t l = 0; l < num_layers(); ++l)
        tables_.push_back(std::make_unique<NextUseTable>(
            NextUseTable::Options{static_cast<std::int32_t>(num_experts_),
                                  700,
                                  20000,
                                  {13107, 10486, 8389},
                                  0.06,
                                  2,
                                  4,
                                  5,
                                  2,
                                  64,
                                  {28, 7, start}}));
      const RegressionTables::Options options{static_cast<std::int32_t>(num_layers()),
                                              static_cast<std::int32_t>(num_experts_),
                                              700,
                                              16,
                                              0.08,
                                              0.125,
                                              64};
      const RegressionPredictor::Counts counts{std::vector<double>(16, 4),
                                               std::vector<double>(16, 2), 3, 3};
      const RegressionPredictor::Counts of_hints{std::vector<double>(9 * 16, 4),
                                                 std::vector<double>(9 * 16, 2), 3, 3};
      predictor_.emplace(
          options, RegressionPredictor::State{std::vector<Ids>(num_layers()), counts, of_hints});
      std::vector<NextUseTable*> tables;
      for (const auto& table : tables_) tables.push_back(table.get());
      policy_ = std::make_unique<StepPolicy>(
          Costs{std::vector<double>(65, 1e-3), std::vector<double>(65, 1e-4), 0.0, 1e-4, 1.05, 1.05,
                1e-5},
          StepPolicy::Limits{5, {2, 1e-4}}, tables, resident_, &*predictor_);
      change_rule();
    }
    coordinator_->set_decisions(
        std::make_unique<StepDecisions>(policy_.get(), *copying_));
  }

  // Called on the copying thread: delays it for a moment, or until the step has ended.
  void delay_copy() {
    if (blocks_copies_)
      while (is_running_.load()) sleep_us(100);
    sleep_us(static_cast<std::int64_t>(copy_noise_.fetch_add(37) % 200));
  }

  void take_arrivals() {
    std::vector<Arrival> arrivals;
    copying_->take_arrivals(arrivals);
    for (const Arrival& arrival : arrivals)
      resident_.state[arrival.layer * num_experts_ + arrival.expert] = kReady;
  }

  void clear_entries() {
    for (const std::int64_t key : copying_->take_cleared())
      __atomic_store_n(&table_[key], std::int64_t{0}, __ATOMIC_RELEASE);
  }

  Step random_step() {
    Step step{random_.between(0, num_rows_), {}, {}, {}, {}};
    const std::int64_t size = layers_.front().hidden;
    for (std::int64_t l = 0; l < num_layers(); ++l) {
      step.hidden.emplace_back(random_.normals(step.num_tokens * size), type_);
      step.weights.emplace_back(random_.normals(step.num_tokens * top_k_), ValueType::kFp32);
      step.index.emplace_back(step.num_tokens * top_k_);
      for (std::int64_t& e : step.index.back()) e = random_.between(-1, num_experts_);
      step.out.emplace_back(step.hidden.back().bytes.size());
    }
    return step;
  }

  std::vector<TwinCall> calls(Step& step) const {
    std::vector<TwinCall> found;
    for (std::int64_t l = 0; l < num_layers(); ++l)
      found.push_back({l, step.num_tokens, step.hidden[l].bytes.data(), step.index[l].data(),
                       ValueType::kFp32, step.weights[l].bytes.data(), step.out[l].data()});
    return found;
  }

  bool is_right(const Step& step) {
    for (std::int64_t l = 0; l < num_layers() && step.num_tokens > 0; ++l) {
      std::vector<std::uint8_t> wanted(step.out[l].size());
      alone_.run(layers_[l].routed,
                 {step.num_tokens, top_k_, type_, step.hidden[l].bytes.data(),
                  step.index[l].data(), ValueType::kFp32, step.weights[l].bytes.data(),
                  wanted.data()});
      if (wanted != step.out[l]) return false;
    }
    return true;
  }

  Random& random_;
  const std::int64_t num_experts_, num_rows_, top_k_;
  const ValueType type_;
  const bool blocks_copies_;
  std::vector<Layer> layers_;
  std::vector<std::int64_t> table_;
  std::vector<std::vector<std::uint8_t>> slots_;
  Resident resident_;
  std::vector<std::unique_ptr<NextUseTable>> tables_;
  std::optional<RegressionPredictor> predictor_;
  std::unique_ptr<StepPolicy> policy_;
  std::atomic<bool> is_running_{false};
  std::atomic<std::uint64_t> copy_noise_{0};
  std::vector<std::uint8_t> memory_;
  std::FILE* file_ = nullptr;
  std::unique_ptr<HostSlots> disk_;
  std::unique_ptr<CopyingThread> copying_;
  std::unique_ptr<Coordinator> coordinator_;
  ExpertEngine twin_engine_;
  RoutedExperts alone_;
  std::unique_ptr<TwinStream> twin_;
  std::int64_t num_hits_ = 0, num_fetched_ = 0;
};

bool steps_agree(Random& random, bool has_policy, bool blocks_copies, bool has_disk,
                 std::int64_t& num_fetched) {
  Machine machine(random, random.between(0, 3), has_policy, blocks_copies, has_disk);
  for (int i = 0; i < kSteps; ++i) {
    for (int copies = 0; !has_policy && copies < 3; ++copies) machine.copy_something();
    machine.change_rule();
    if (!machine.run(kPatience)) return false;
  }
  num_fetched += machine.num_fetched();
  // If copies end only after the step, the CPU has claimed every expert.
  return !blocks_copies || machine.num_fetched() == 0;
}

// A failure of the thread at one layer loses the step with one sentence, and the next step is
// right.
bool recovers(Random& random, const std::string& kind, bool has_policy) {
  Machine machine(random, 2, has_policy, false);
  std::atomic<bool> is_bad{false};
  const std::int64_t where = random.between(0, machine.num_layers() - 1);
  machine.coordinator().set_hook([&](std::int64_t layer) {
    if (layer != where || !is_bad.load()) return;
    if (kind == "dies") throw std::runtime_error("out of luck");
    sleep_us(kind == "stalls" ? 400'000 : 20'000);
  });
  if (!machine.run(kPatience)) return false;
  is_bad.store(kind != "stops");
  bool is_lost = false;
  try {
    if (!machine.run(kShortPatience, kind == "stops" ? where : -1)) return false;
  } catch (const StepLost& lost) {
    is_lost = true;
  }
  is_bad.store(false);
  for (int i = 0; i < 3; ++i)
    if (!machine.run(kPatience)) return false;
  return is_lost == (kind != "is slow");
}

}  // namespace

int main() {
  Random random(1919);
  std::int64_t num_fetched = 0;
  for (int round = 0; round < kMachines; ++round)
    if (!steps_agree(random, round % 2 == 0, round % 3 == 0, round % 4 < 2, num_fetched)) {
      std::printf("machine %d: a step differs\n", round);
      return 1;
    }
  for (const char* kind : {"dies", "stalls", "is slow", "stops"})
    for (const bool has_policy : {false, true})
      if (!recovers(random, kind, has_policy)) {
        std::printf("a thread that %s: the steps after it, or its message, differ\n", kind);
        return 1;
      }
  if (num_fetched < kSteps) {
    std::printf("%d experts were fetched in time\n", static_cast<int>(num_fetched));
    return 1;
  }
  std::printf("%d machines of %d captured steps agree, %d experts fetched in time\n", kMachines,
              kSteps, static_cast<int>(num_fetched));
  return 0;
}
