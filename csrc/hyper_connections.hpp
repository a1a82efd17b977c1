// Hyper-connections: a token has several residual streams. A layer's input is a weighted sum of
// them. Its output is added to each, and the streams are mixed. The weights come from a small
// product with all streams' values, in fp32. Those of the mixture are made doubly stochastic
// (Sinkhorn and Knopp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "thread_pool.hpp"
#include "values.hpp"

namespace tandem {

constexpr std::int64_t kMostStreams = 16;
constexpr std::int64_t kMostRounds = 1024;

// y = matrix * x / sqrt(mean(x^2) + norm_eps), where x is all values of a token's streams. The
// first `num_streams` rows give the weights of the streams: sigmoid(scale * y + base) + eps. The
// next rows, if `has_outputs`, give the weights of the layer's output: output_factor *
// sigmoid(..) + output_eps. The others give the mixture, from each stream (rows) to each:
// softmax(..) + eps, then columns divided by their sum + eps, then `num_rounds` - 1 times rows and
// columns.
struct MixIn {
  std::int64_t num_tokens, num_streams, dim;
  bool has_outputs;
  std::int64_t num_rounds;  // 0: no mixture
  float norm_eps, eps, output_factor, output_eps;
  ValueType type;           // of streams and out
  const void* streams;      // (tokens, streams, dim)
  ValueType matrix_type;
  const void* matrix;  // (rows, streams * dim)
  const float* base;  // (rows)
  const float* scales;  // of streams, outputs and mixture, those that exist
  void* out;  // (tokens, dim)
  float* weights;  // (tokens, rows - streams): of the output, then of the mixture

  std::int64_t num_values() const { return num_streams * dim; }
  std::int64_t num_mixed() const { return num_rounds > 0 ? num_streams * num_streams : 0; }
  std::int64_t num_weights() const { return (has_outputs ? num_streams : 0) + num_mixed(); }
  std::int64_t num_rows() const { return num_streams + num_weights(); }
};

// out[to] = weights[to] * y + sum over streams of mixture[from, to] * streams[from]. In bf16,
// weights, product, sum and result are rounded.
struct MixOut {
  std::int64_t num_tokens, num_streams, dim;
  ValueType type;
  const void* y;         // (tokens, dim)
  const float* weights;  // (tokens, streams + streams^2), as `MixIn` writes them
  const void* streams;   // (tokens, streams, dim)
  void* out;             // (tokens, streams, dim)
};

// The functions of one instruction set.
struct HyperKernels {
  // For some values of some tokens, adds their products with each row of the matrix, and then with
  // themselves. Token t's sums are at sums + t * stride.
  void (*multiply)(const MixIn& call, std::int64_t first_token, std::int64_t num_tokens,
                   std::int64_t first_value, std::int64_t num_values, float* sums,
                   std::int64_t stride);
  // Writes the weighted sum of a token's streams.
  void (*collapse)(const MixIn& call, std::int64_t token, const float* weights);
  void (*mix_out)(const MixOut& call, std::int64_t first_token, std::int64_t num_tokens);
};

const HyperKernels& portable_hyper();
#if defined(__x86_64__)
const HyperKernels& avx2_hyper();
const HyperKernels& avx512_hyper();
#endif

class HyperEngine {
 public:
  // `isa` names the kernels as in ExpertEngine::isa.
  HyperEngine(ThreadPool& pool, const std::string& isa);

  void run(const MixIn& call);
  void run(const MixOut& call);

 private:
  void finish(const MixIn& call, std::int64_t token);

  const HyperKernels& kernels_;
  ThreadPool& pool_;
  std::vector<float> sums_;  // (tokens, parts of the values, rows + 1)
};

}  // namespace tandem
