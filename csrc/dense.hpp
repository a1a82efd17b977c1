// Packed dense matrices times a model's activations: several matrices with one input, or with one
// each.
#pragma once

#include <cstdint>
#include <vector>

#include "experts.hpp"
#include "values.hpp"

namespace tandem {

struct DenseMatrix {
  PackedMatrix packed;
  std::int64_t rows;  // without padding
  std::int64_t in_features = 0;  // columns without padding
};

// `num_tokens` inputs of `in_features` values; output m is (num_tokens, matrices[m]->rows). All
// matrices have the same format, group and columns, so that the input is converted once.
struct DenseCall {
  std::int64_t num_matrices;
  const DenseMatrix* const* matrices;
  std::int64_t num_tokens;
  std::int64_t in_features;
  ValueType type;  // of input and outputs
  const void* input;
  void* const* outputs;
  // Strides in values: between tokens' inputs, between matrices' inputs (0: the same input), and
  // between tokens' results; 0: contiguous.
  std::int64_t token_stride = 0, matrix_stride = 0, out_stride = 0;

  std::int64_t input_rows() const { return (matrix_stride ? num_matrices : 1) * num_tokens; }
};

// Reads rows of a matrix by number, as embeddings do: (count, cols) values. A number outside gives
// NaN.
struct RowsCall {
  const DenseMatrix* matrix;
  std::int64_t cols;  // without padding
  std::int64_t count;
  const std::int64_t* numbers;
  ValueType type;
  void* out;
};

// Uses the threads and kernels of an expert engine, which must outlive it and be idle.
class DenseEngine {
 public:
  explicit DenseEngine(ExpertEngine& engine) : kernels_(engine.kernels()), pool_(engine.pool()) {}

  void run(const DenseCall& call);
  void read(const RowsCall& call) const;
  std::mutex& busy() { return pool_.busy(); }

 private:
  struct Task {
    std::int64_t matrix, begin, end, first_token, num_tokens;
  };

  void convert_input(const DenseCall& call);
  void plan_tasks(const DenseCall& call);
  void multiply(const DenseCall& call, const Task& task) const;
  Activations activations(const PackedMatrix& matrix, std::int64_t row) const;

  const Kernels& kernels_;
  ThreadPool& pool_;
  std::vector<std::int8_t> quantized_;
  std::vector<float> scales_;
  std::vector<std::int32_t> sums_;
  LineVector<std::uint16_t> bf16_;
  std::vector<float> fp32_;
  std::vector<Task> tasks_;
};

}  // namespace tandem
