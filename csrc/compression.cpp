#include "compression.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace tandem {
namespace {

constexpr std::int64_t kTaskChannels = 64;
// With fewer values, one thread is faster.
constexpr std::int64_t kParallelWork = 1 << 14;

float* kept_at(const WindowCompression& call, std::int64_t slot, std::int64_t position) {
  return call.states + (slot * call.num_kept + position % call.num_kept) * 2 * call.width();
}

// Stores some channels of each series of a token.
void keep(const WindowCompression& call, std::int64_t t, std::int64_t first, std::int64_t count) {
  const std::int64_t position = call.tokens.positions[t], width = call.width();
  float* values = kept_at(call, call.tokens.slots[t], position);
  float* gates = values + width;
  const float* bias = call.bias + position % call.ratio * width;
  for (std::int64_t at = first; at < width; at += call.dim) {
    load_values(value_at(call.values, call.type, t * call.value_stride + at), call.type, count,
                values + at);
    load_values(value_at(call.gates, call.type, t * call.gate_stride + at), call.type, count,
                gates + at);
    for (std::int64_t c = at; c < at + count; ++c) gates[c] += bias[c];
  }
}

// Computes some channels of the key of the window that ends with a token.
void compress(const WindowCompression& call, std::int64_t t, std::int64_t first,
              std::int64_t count) {
  const std::int64_t slot = call.tokens.slots[t], end = call.tokens.positions[t] + 1;
  const std::int64_t begin = std::max<std::int64_t>(0, end - call.span());
  float greatest[kTaskChannels], sum[kTaskChannels] = {}, weighted[kTaskChannels] = {};
  std::fill_n(greatest, count, -INFINITY);
  const auto of = [&](std::int64_t position) {
    const std::int64_t series = call.num_series - 1 - (end - 1 - position) / call.ratio;
    return kept_at(call, slot, position) + series * call.dim + first;
  };
  for (std::int64_t p = begin; p < end; ++p) {
    const float* gates = of(p) + call.width();
    for (std::int64_t c = 0; c < count; ++c) greatest[c] = std::max(greatest[c], gates[c]);
  }
  for (std::int64_t p = begin; p < end; ++p) {
    const float* values = of(p);
    const float* gates = values + call.width();
    for (std::int64_t c = 0; c < count; ++c) {
      const float weight = std::exp(gates[c] - greatest[c]);
      sum[c] += weight;
      weighted[c] += weight * values[c];
    }
  }
  for (std::int64_t c = 0; c < count; ++c) weighted[c] /= sum[c];
  store_values(weighted, count, call.type, value_at(call.out, call.type, t * call.dim + first));
}

std::int64_t work_of(const WindowCompression& call) {
  std::int64_t work = call.tokens.count * call.width();
  for (std::int64_t t = 0; t < call.tokens.count; ++t)
    if (call.ends_window(call.tokens.positions[t])) work += call.span() * call.dim;
  return work;
}

}  // namespace

void CompressionEngine::run(const WindowCompression& call) {
  for (std::int64_t t = 0; t < call.tokens.count; ++t) {
    const std::int64_t slot = call.tokens.slots[t], position = call.tokens.positions[t];
    if (slot < 0 || slot >= call.num_slots || position < 0)
      throw std::invalid_argument("a token is at position " + std::to_string(position) +
                                  " of slot " + std::to_string(slot) + ", expected slot 0 to " +
                                  std::to_string(call.num_slots - 1));
  }
  const std::int64_t parts = (call.dim + kTaskChannels - 1) / kTaskChannels;
  const auto task = [&](std::int64_t part) {
    const std::int64_t first = part * kTaskChannels;
    const std::int64_t count = std::min(kTaskChannels, call.dim - first);
    constexpr float kZeros[kTaskChannels] = {};
    for (std::int64_t t = 0; t < call.tokens.count; ++t) {
      keep(call, t, first, count);
      if (call.ends_window(call.tokens.positions[t])) {
        compress(call, t, first, count);
      } else {
        store_values(kZeros, count, call.type,
                     value_at(call.out, call.type, t * call.dim + first));
      }
    }
  };
  if (work_of(call) >= kParallelWork) return pool_.run(parts, task);
  for (std::int64_t part = 0; part < parts; ++part) task(part);
}

}  // namespace tandem
