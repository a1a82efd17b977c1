// Compares hyper-connections of random sizes on every instruction set with their definition in
// double precision. Buffers are exactly as large as the calls say. Built with sanitizers.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "experts.hpp"
#include "hyper_connections.hpp"
#include "random.hpp"
#include "random_layers.hpp"

namespace {

using tandem::ValueType;
using tandem::checks::Random;
using tandem::checks::Values;
using Index = std::int64_t;

constexpr int kRounds = 80;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

std::vector<float> read(const Values& values, ValueType type) {
  std::vector<float> numbers(values.numbers.size());
  if (numbers.empty()) return numbers;
  tandem::load_values(values.bytes.data(), type, static_cast<Index>(numbers.size()), numbers.data());
  return numbers;
}

bool is_near(const std::vector<float>& actual, const std::vector<double>& wanted, ValueType type) {
  const double limit = type == ValueType::kFp32 ? 1e-4 : 3e-2;
  for (std::size_t i = 0; i < wanted.size(); ++i)
    if (!(std::fabs(actual[i] - wanted[i]) <= limit * std::max(1.0, std::fabs(wanted[i]))))
      return false;
  return true;
}

// Rows of a matrix times a token's values after dividing these by their root mean square.
std::vector<double> logits(const tandem::MixIn& call, const Values& streams, const Values& matrix,
                           Index token) {
  const Index values = call.num_values();
  const float* x = streams.numbers.data() + token * values;
  double squares = 0;
  for (Index k = 0; k < values; ++k) squares += double{x[k]} * x[k];
  const double factor = 1 / std::sqrt(squares / static_cast<double>(values) + call.norm_eps);
  std::vector<double> found(call.num_rows());
  for (Index r = 0; r < call.num_rows(); ++r) {
    for (Index k = 0; k < values; ++k) found[r] += double{matrix.numbers[r * values + k]} * x[k];
    const bool is_output = call.has_outputs && r < 2 * call.num_streams;
    const int kind = r < call.num_streams ? 0 : is_output ? 1 : 1 + call.has_outputs;
    found[r] = found[r] * factor * call.scales[kind] + call.base[r];
  }
  return found;
}

void divide(std::vector<double>& mixture, Index n, bool are_rows, double eps) {
  for (Index a = 0; a < n; ++a) {
    const auto at = [&](Index b) -> double& { return mixture[are_rows ? a * n + b : b * n + a]; };
    double sum = eps;
    for (Index b = 0; b < n; ++b) sum += at(b);
    for (Index b = 0; b < n; ++b) at(b) /= sum;
  }
}

std::vector<double> mixture_of(const tandem::MixIn& call, const double* logits) {
  const Index n = call.num_streams;
  std::vector<double> found(n * n);
  for (Index a = 0; a < n; ++a) {
    double sum = 0;
    for (Index b = 0; b < n; ++b) sum += std::exp(logits[a * n + b]);
    for (Index b = 0; b < n; ++b) found[a * n + b] = std::exp(logits[a * n + b]) / sum + call.eps;
  }
  divide(found, n, false, call.eps);
  for (Index round = 1; round < call.num_rounds; ++round) {
    divide(found, n, true, call.eps);
    divide(found, n, false, call.eps);
  }
  return found;
}

// Checks the way in, and also the way out if there is a mixture.
bool agrees(Random& random, const std::string& isa) {
  const auto type = static_cast<ValueType>(random.between(0, 1));
  const auto matrix_type = static_cast<ValueType>(random.between(0, 1));
  tandem::MixIn call{};
  call.num_tokens = random.between(0, 1) ? random.between(0, 5) : random.between(0, 60);
  call.num_streams = random.between(0, 3) ? random.between(1, 5) : tandem::kMostStreams;
  call.dim = random.between(0, 3) ? random.between(1, 90) : random.between(250, 700);
  call.has_outputs = random.between(0, 3) > 0;
  call.num_rounds = call.has_outputs && random.between(0, 2) ? random.between(1, 20) : 0;
  call.norm_eps = 1e-5f;
  call.eps = 1e-3f;
  call.output_factor = 2;
  call.output_eps = 1e-2f;
  call.type = type;
  call.matrix_type = matrix_type;
  const Index n = call.num_streams, rows = call.num_rows();
  const float size = 1 / std::sqrt(static_cast<float>(call.num_values()));
  const Values streams(random.normals(call.num_tokens * call.num_values()), type);
  const Values matrix(random.normals(rows * call.num_values(), size), matrix_type);
  const std::vector<float> base = random.normals(rows), scales{1.0f, 0.5f, 2.0f};
  Values out(std::vector<float>(call.num_tokens * call.dim), type);
  Values weights(std::vector<float>(call.num_tokens * call.num_weights()), ValueType::kFp32);
  call.streams = streams.bytes.data();
  call.matrix = matrix.bytes.data();
  call.base = base.data();
  call.scales = scales.data();
  call.out = out.bytes.data();
  call.weights = reinterpret_cast<float*>(weights.bytes.data());
  tandem::ExpertEngine threads(static_cast<int>(random.between(1, 3)), isa);
  tandem::HyperEngine engine(threads.pool(), isa);
  engine.run(call);
  std::vector<double> wanted(out.numbers.size()), wanted_weights;
  for (Index t = 0; t < call.num_tokens; ++t) {
    const std::vector<double> y = logits(call, streams, matrix, t);
    for (Index s = 0; s < n; ++s)
      for (Index d = 0; d < call.dim; ++d)
        wanted[t * call.dim + d] += (sigmoid(y[s]) + call.eps) * streams.numbers[(t * n + s) * call.dim + d];
    for (Index s = 0; call.has_outputs && s < n; ++s)
      wanted_weights.push_back(call.output_factor * sigmoid(y[n + s]) + call.output_eps);
    if (call.num_rounds == 0) continue;
    for (const double weight : mixture_of(call, y.data() + 2 * n)) wanted_weights.push_back(weight);
  }
  const std::vector<float> into = read(out, type), own = read(weights, ValueType::kFp32);
  if (!is_near(into, wanted, type) || !is_near(own, wanted_weights, ValueType::kFp32)) return false;
  if (call.num_rounds == 0) return true;
  Values mixed(std::vector<float>(streams.numbers.size()), type);
  engine.run(tandem::MixOut{call.num_tokens, n, call.dim, type, out.bytes.data(), call.weights,
                            streams.bytes.data(), mixed.bytes.data()});
  std::vector<double> expected;
  for (Index t = 0; t < call.num_tokens; ++t) {
    const float* of_token = own.data() + t * n * (n + 1);
    for (Index to = 0; to < n; ++to)
      for (Index d = 0; d < call.dim; ++d) {
        double sum = double{of_token[to]} * into[t * call.dim + d];
        for (Index from = 0; from < n; ++from)
          sum += double{of_token[n + from * n + to]} * streams.numbers[(t * n + from) * call.dim + d];
        expected.push_back(sum);
      }
  }
  return is_near(read(mixed, type), expected, type);
}

}  // namespace

int main() {
  Random random(8642);
  for (int round = 0; round < kRounds; ++round)
    for (const std::string& isa : tandem::available_isas())
      if (!agrees(random, isa)) {
        std::printf("round %d: hyper-connections differ with %s\n", round, isa.c_str());
        return 1;
      }
  std::printf("hyper-connections of %d random sizes equal their definition\n", kRounds);
  return 0;
}
