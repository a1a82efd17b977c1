#include "recurrent.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu_features.hpp"

namespace tandem {
namespace {

// Tokens that are prepared together. Their queries and keys stay in a core's cache.
constexpr std::int64_t kPreparedTokens = 128;
constexpr std::int64_t kTaskChannels = 512;
// With fewer values, as in decode steps, one thread is faster.
constexpr std::int64_t kParallelStateValues = 1 << 16;

const RecurrentKernels& recurrent_kernels([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (has_avx512(isa)) return avx512_recurrent();
  if (has_avx2(isa)) return avx2_recurrent();
#endif
  return portable_recurrent();
}

float* room(std::vector<float>& values, std::int64_t size) {
  if (static_cast<std::int64_t>(values.size()) < size) values.resize(size);
  return values.data();
}

}  // namespace

RecurrentEngine::RecurrentEngine(ThreadPool& pool, const std::string& isa)
    : kernels_(recurrent_kernels(isa)), pool_(pool) {}

void RecurrentEngine::cut_into_segments(const StateTokens& tokens, std::int64_t first,
                                        std::int64_t count, const DraftLog& log) {
  segments_.clear();
  for (std::int64_t t = first; t < first + count; ++t) {
    const std::int64_t slot = tokens.slots[t];
    if (slot < 0 || slot >= log.num_slots)
      throw std::invalid_argument("a state's slot is " + std::to_string(slot) + ", expected 0 to " +
                                  std::to_string(log.num_slots - 1));
    if (t > first && slot == tokens.slots[t - 1]) {
      ++segments_.back().count;
    } else {
      const bool is_beginning = tokens.positions[t] == 0;
      segments_.push_back({t, 1, slot, is_beginning, is_beginning ? 0 : log.kept[slot], 1});
    }
  }
  const std::int64_t most = tokens.have_drafts ? 1 + kMostDrafted : INT64_MAX;
  for (const StateSegment& segment : segments_)
    if (segment.num_again < 0 || segment.num_again > kMostDrafted || segment.count > most)
      throw std::invalid_argument("a slot has " + std::to_string(segment.num_again) +
                                  " logged drafts and " + std::to_string(segment.count) +
                                  " new tokens, expected at most 7 drafts");
  if (tokens.have_drafts) return;
  for (StateSegment& segment : segments_) segment.num_certain = segment.count;
}

// The logged tokens have been repeated.
void RecurrentEngine::settle(const DraftLog& log) {
  for (const StateSegment& segment : segments_) log.kept[segment.slot] = 0;
}

void RecurrentEngine::run(const ShortConvolution& call) {
  cut_into_segments(call.tokens, 0, call.tokens.count, call.log);
  const std::int64_t parts = (call.channels + kTaskChannels - 1) / kTaskChannels;
  const auto count = static_cast<std::int64_t>(segments_.size()) * parts;
  const auto task = [&](std::int64_t i) {
    const std::int64_t first = i % parts * kTaskChannels;
    kernels_.convolve(call, segments_[i / parts], first,
                      std::min(kTaskChannels, call.channels - first));
  };
  if (call.tokens.count * call.channels >= kParallelStateValues) {
    pool_.run(count, task);
  } else {
    for (std::int64_t i = 0; i < count; ++i) task(i);
  }
  settle(call.log);
}

PreparedTokens RecurrentEngine::prepare(const Recurrence& call, std::int64_t first,
                                        std::int64_t count) {
  const std::int64_t keys = count * call.num_key_heads * call.key_dim;
  const std::int64_t heads = count * call.num_heads;
  const bool is_by_key = call.decay_kind == DecayKind::kByKey;
  const PreparedTokens to{first, room(query_, keys), room(key_, keys),
                          room(kept_, is_by_key ? heads * call.key_dim : heads),
                          room(kept_key_, is_by_key ? heads * call.key_dim : 0)};
  const auto task = [&](std::int64_t t) { kernels_.prepare(call, to, t); };
  if (keys >= kParallelStateValues) {
    pool_.run(count, task);
  } else {
    for (std::int64_t t = 0; t < count; ++t) task(t);
  }
  return to;
}

void RecurrentEngine::run(const Recurrence& call) {
  for (std::int64_t first = 0; first < call.tokens.count; first += kPreparedTokens) {
    const std::int64_t count = std::min(kPreparedTokens, call.tokens.count - first);
    cut_into_segments(call.tokens, first, count, call.log);
    const PreparedTokens prepared = prepare(call, first, count);
    const std::int64_t blocks = call.blocks();
    const auto heads = static_cast<std::int64_t>(segments_.size()) * call.num_heads;
    // A task is a head, or each of its blocks if there are few heads.
    const std::int64_t together = heads >= 4 * pool_.num_threads() ? blocks : 1;
    const std::int64_t parts = (blocks + together - 1) / together;
    pool_.run(heads * parts, [&](std::int64_t i) {
      const std::int64_t head = i / parts % call.num_heads, begin = i % parts * together;
      const StateSegment& segment = segments_[i / parts / call.num_heads];
      kernels_.recur(call, prepared, segment, head, begin, std::min(begin + together, blocks));
    });
    note_drafts(call, prepared);
    settle(call.log);
  }
}

// Called after all heads have read the previous log.
void RecurrentEngine::note_drafts(const Recurrence& call, const PreparedTokens& prepared) {
  const std::int64_t size = LoggedToken(call).size;
  for (const StateSegment& segment : segments_)
    for (std::int64_t i = segment.num_certain; i < segment.count; ++i)
      kernels_.note(call, prepared, segment.first + i,
                    call.log.values +
                        (segment.slot * kMostDrafted + i - segment.num_certain) * size);
}

}  // namespace tandem
