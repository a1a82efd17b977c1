#include "coordinator/twin_stream.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "coordinator/words.hpp"

namespace tandem {
namespace {

constexpr int kSpins = 100;
constexpr double kLongestLook = 0.1;  // seconds between two looks at a word

std::int64_t most_experts(const std::vector<RoutedLayer>& layers) {
  std::int64_t most = 0;
  for (const RoutedLayer& layer : layers) most = std::max(most, layer.num_experts);
  return most;
}

}  // namespace

TwinStream::TwinStream(std::vector<RoutedLayer> layers, const Mailbox& box,
                       const std::int64_t* addresses, ExpertEngine& engine, int most_delay,
                       unsigned seed)
    : layers_(std::move(layers)),
      box_(box),
      addresses_(addresses),
      row_of_table_(most_experts(layers_)),
      engine_(engine),
      hits_(engine),
      most_delay_(most_delay),
      random_(seed),
      used_(box.layout().pairs()),
      fetched_(box.layout().pairs()),
      rows_(box.layout().pairs() * box.layout().hidden_size),
      weights_(box.layout().pairs()),
      sums_(box.layout().num_rows * box.layout().hidden_size),
      row_of_(box.layout().pairs()),
      times_(layers_.size()) {}

void TwinStream::be_late() {
  if (most_delay_ <= 0 || random_() % 2 == 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % most_delay_));
}

void TwinStream::run(const TwinCall& call) {
  const RoutedLayer& layer = layers_[call.layer];
  for (const double end = steady_seconds() + dense_seconds_; steady_seconds() < end;) pause();
  be_late();
  publish(call);
  be_late();
  times_[call.layer].rung = steady_seconds();
  store_release(box_.doorbell(call.layer), 1u);
  be_late();
  publish_guess(call.layer);
  hits_.run(layer.layout, layer.activation,
            {call.num_tokens, box_.layout().top_k, used_.data(), box_.layout().type, call.hidden,
             rows_.data()});
  be_late();
  wait(call.layer);
  times_[call.layer].went_on = steady_seconds();
  be_late();
  add_fetched(call);
  be_late();
  combine(call);
}

void TwinStream::publish(const TwinCall& call) {
  const MailboxLayout& layout = box_.layout();
  const std::int64_t num_experts = layers_[call.layer].num_experts;
  const std::int64_t active = call.num_tokens * layout.top_k;
  const std::int64_t* table = addresses_ + call.layer * row_of_table_;
  std::int32_t *choice = box_.choice(call.layer), *is_hit = box_.is_hit(call.layer);
  bool has_misses = false;
  if (active > 0) engine_.load(call.weights, call.weight_type, active, weights_.data());
  std::fill(weights_.begin() + active, weights_.end(), 0.0f);
  std::copy(weights_.begin(), weights_.end(), box_.weights(call.layer));
  for (std::int64_t i = 0; i < layout.pairs(); ++i) {
    const std::int64_t expert = i < active ? call.index[i] : -1;
    const bool is_padding = expert < 0 || expert >= num_experts;
    // Read once, so that hits and misses follow from the same value.
    const std::int64_t address = is_padding ? 0 : load_acquire(table + expert);
    used_[i] = reinterpret_cast<const std::uint8_t*>(address);
    choice[i] = is_padding ? -1 : static_cast<std::int32_t>(expert);
    is_hit[i] = is_padding || address != 0;
    row_of_[i] = is_padding ? -1 : static_cast<std::int32_t>(i);
    has_misses |= is_hit[i] == 0;
  }
  if (has_misses)
    std::memcpy(box_.hidden(), call.hidden,
                call.num_tokens * layout.hidden_size * value_bytes(layout.type));
  store_release(box_.done(call.layer), has_misses ? 0u : 1u);
}

void TwinStream::publish_guess(std::int64_t layer) {
  if (static_cast<std::size_t>(layer) >= guesses_.size()) return;
  const std::vector<std::int32_t>& guess = guesses_[layer];
  std::copy_n(guess.begin(), std::min<std::size_t>(guess.size(), box_.layout().pairs()),
              box_.guess(layer));
  store_release(box_.guessed(layer), 1u);
  be_late();
}

void TwinStream::wait(std::int64_t layer) {
  double waited = 0.0, last = steady_seconds();
  for (int spin = 0; load_acquire(box_.done(layer)) != 1; ++spin) {
    if (spin < kSpins) {
      pause();
      continue;
    }
    std::this_thread::yield();
    const double now = steady_seconds();
    // A longer time means that the whole process was stopped.
    waited += std::min(now - last, kLongestLook);
    last = now;
    if (patience_ > 0.0 && waited > patience_)
      throw StepLost("MoE layer " + std::to_string(layer) + " was not answered in time");
  }
  if (patience_ > 0.0 && load_acquire(box_.error(layer)) != 0)
    throw StepLost("MoE layer " + std::to_string(layer) +
                   " was answered with an error: the answering thread has ended");
}

// The second launch: computes the misses that the host has copied; nothing if there are no misses.
void TwinStream::add_fetched(const TwinCall& call) {
  const RoutedLayer& layer = layers_[call.layer];
  const MailboxLayout& layout = box_.layout();
  fetched_.assign(layout.pairs(), nullptr);
  if (!box_.has_misses(call.layer)) return;
  for (std::int64_t i = 0; i < layout.pairs(); ++i)
    fetched_[i] = reinterpret_cast<const std::uint8_t*>(box_.fetched(call.layer)[i]);
  hits_.run(layer.layout, layer.activation,
            {call.num_tokens, layout.top_k, fetched_.data(), layout.type, call.hidden,
             rows_.data()});
}

void TwinStream::combine(const TwinCall& call) {
  if (call.num_tokens == 0) return;
  const MailboxLayout& layout = box_.layout();
  const std::int64_t size = layout.hidden_size;
  const std::int32_t* is_hit = box_.is_hit(call.layer);
  for (std::int64_t i = 0; i < call.num_tokens * layout.top_k; ++i)
    if (is_hit[i] == 0 && fetched_[i] == nullptr)
      std::copy_n(box_.results() + i * size, size, rows_.data() + i * size);
  engine_.add_rows({call.num_tokens, layout.top_k, size, rows_.data(), row_of_.data(),
                    weights_.data(), sums_.data()});
  engine_.store(sums_.data(), call.num_tokens * size, layout.type, call.out);
}

TwinStep::TwinStep(TwinStream& stream, std::vector<TwinCall> calls, std::int64_t stops_before)
    : thread_([&stream, calls = std::move(calls), stops_before] {
        for (const TwinCall& call : calls) {
          if (call.layer == stops_before) return;
          stream.run(call);
        }
      }) {}

}  // namespace tandem
