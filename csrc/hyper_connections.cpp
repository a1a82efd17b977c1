#include "hyper_connections.hpp"

#include <algorithm>
#include <cmath>

#include "cpu_features.hpp"

namespace tandem {
namespace {

// Values of a token that are summed by themselves before all sums are added. The parts are always
// the same, so a token's result does not depend on the number of threads or on other tokens.
constexpr std::int64_t kPart = 1024;
// Tokens that share a part of the matrix while it is in the cache.
constexpr std::int64_t kTokensTogether = 16;
// With fewer values, one thread is faster.
constexpr std::int64_t kParallelStreamValues = 1 << 15;

const HyperKernels& choose_hyper([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (has_avx512(isa)) return avx512_hyper();
  if (has_avx2(isa)) return avx2_hyper();
#endif
  return portable_hyper();
}

std::int64_t parts_of(std::int64_t count, std::int64_t each) { return (count + each - 1) / each; }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Divides each row (or column) of a matrix by its sum + eps: value i of line l is at l * step + i *
// stride.
void divide(float* matrix, std::int64_t n, std::int64_t step, std::int64_t stride, float eps) {
  for (std::int64_t line = 0; line < n; ++line) {
    float* values = matrix + line * step;
    float sum = eps;
    for (std::int64_t i = 0; i < n; ++i) sum += values[i * stride];
    const float factor = 1.0f / sum;
    for (std::int64_t i = 0; i < n; ++i) values[i * stride] *= factor;
  }
}

void make_mixture(const MixIn& call, float* mixture) {
  const std::int64_t n = call.num_streams;
  for (std::int64_t from = 0; from < n; ++from) {
    float* row = mixture + from * n;
    const float greatest = *std::max_element(row, row + n);
    float sum = 0;
    for (std::int64_t to = 0; to < n; ++to) sum += row[to] = std::exp(row[to] - greatest);
    for (std::int64_t to = 0; to < n; ++to) row[to] = row[to] / sum + call.eps;
  }
  divide(mixture, n, 1, n, call.eps);
  for (std::int64_t round = 1; round < call.num_rounds; ++round) {
    divide(mixture, n, n, 1, call.eps);
    divide(mixture, n, 1, n, call.eps);
  }
}

}  // namespace

HyperEngine::HyperEngine(ThreadPool& pool, const std::string& isa)
    : kernels_(choose_hyper(isa)), pool_(pool) {}

void HyperEngine::run(const MixIn& call) {
  const std::int64_t blocks = parts_of(call.num_tokens, kTokensTogether);
  const std::int64_t parts = parts_of(call.num_values(), kPart), each = call.num_rows() + 1;
  sums_.resize(call.num_tokens * parts * each);
  const auto multiply = [&](std::int64_t block, std::int64_t part) {
    const std::int64_t token = block * kTokensTogether, value = part * kPart;
    kernels_.multiply(call, token, std::min(kTokensTogether, call.num_tokens - token), value,
                      std::min(kPart, call.num_values() - value),
                      sums_.data() + (token * parts + part) * each, parts * each);
  };
  const auto finish_block = [&](std::int64_t block) {
    const std::int64_t end = std::min((block + 1) * kTokensTogether, call.num_tokens);
    for (std::int64_t t = block * kTokensTogether; t < end; ++t) finish(call, t);
  };
  const auto whole = [&](std::int64_t block) {
    for (std::int64_t part = 0; part < parts; ++part) multiply(block, part);
    finish_block(block);
  };
  if (blocks >= pool_.num_threads()) return pool_.run(blocks, whole);
  if (call.num_tokens * call.num_values() * call.num_rows() < kParallelStreamValues) {
    for (std::int64_t block = 0; block < blocks; ++block) whole(block);
    return;
  }
  pool_.run(blocks * parts, [&](std::int64_t i) { multiply(i / parts, i % parts); });
  for (std::int64_t block = 0; block < blocks; ++block) finish_block(block);
}

// Computes the weights from a token's sums, and the layer's input from its streams.
void HyperEngine::finish(const MixIn& call, std::int64_t token) {
  const std::int64_t n = call.num_streams, rows = call.num_rows();
  const std::int64_t parts = parts_of(call.num_values(), kPart);
  const float* sums = sums_.data() + token * parts * (rows + 1);
  float y[kMostStreams * (kMostStreams + 2) + 1] = {};
  for (std::int64_t part = 0; part < parts; ++part)
    for (std::int64_t r = 0; r <= rows; ++r) y[r] += sums[part * (rows + 1) + r];
  const float mean = y[rows] / static_cast<float>(call.num_values());
  const float factor = 1.0f / std::sqrt(mean + call.norm_eps);
  const std::int64_t mixed = rows - call.num_mixed();
  for (std::int64_t r = 0; r < rows; ++r) {
    const int kind = r < n ? 0 : r < mixed ? 1 : 1 + call.has_outputs;
    y[r] = y[r] * factor * call.scales[kind] + call.base[r];
  }
  for (std::int64_t r = 0; r < n; ++r) y[r] = sigmoid(y[r]) + call.eps;
  for (std::int64_t r = n; r < mixed; ++r) y[r] = call.output_factor * sigmoid(y[r]) + call.output_eps;
  if (call.num_mixed() > 0) make_mixture(call, y + mixed);
  std::copy(y + n, y + rows, call.weights + token * call.num_weights());
  kernels_.collapse(call, token, y);
}

void HyperEngine::run(const MixOut& call) {
  const std::int64_t values = call.num_streams * call.dim;
  if (call.num_tokens * values < kParallelStreamValues)
    return kernels_.mix_out(call, 0, call.num_tokens);
  const std::int64_t each =
      std::max<std::int64_t>(1, kParallelStreamValues / std::max<std::int64_t>(1, values));
  pool_.run(parts_of(call.num_tokens, each), [&](std::int64_t i) {
    kernels_.mix_out(call, i * each, std::min(each, call.num_tokens - i * each));
  });
}

}  // namespace tandem
