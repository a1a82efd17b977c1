#include "dense.hpp"

#include <algorithm>
#include <limits>

namespace tandem {
namespace {

constexpr std::int64_t kDenseTasksPerThread = 8;
// Tokens per task. Their int8 activations and fp32 results stay in a core's cache.
constexpr std::int64_t kTaskTokens = 128;
constexpr std::int64_t kMaxTaskBlocks = 8;
// In a decode step the next job follows within some tens of microseconds. It is announced, so that
// the threads do not fall asleep meanwhile.
constexpr std::int64_t kStepTokens = 64;

template <typename Values>
void grow(Values& values, std::int64_t size) {
  if (static_cast<std::int64_t>(values.size()) < size) values.resize(size);
}

}  // namespace

void DenseEngine::run(const DenseCall& call) {
  if (call.num_tokens == 0 || call.num_matrices == 0) return;
  convert_input(call);
  plan_tasks(call);
  pool_.run(static_cast<std::int64_t>(tasks_.size()),
            [&](std::int64_t i) { multiply(call, tasks_[i]); });
  if (call.num_tokens <= kStepTokens) pool_.wake();
}

void DenseEngine::convert_input(const DenseCall& call) {
  const PackedMatrix& matrix = call.matrices[0]->packed;
  const ActivationForm form = activation_form(matrix.format);
  const std::int64_t cols = matrix.cols, width = cols + kRowPadding, rows = call.input_rows();
  const std::int64_t groups = form == ActivationForm::kInt8 ? cols / matrix.group : 0;
  const std::int64_t stride = call.token_stride ? call.token_stride : call.in_features;
  grow(fp32_, rows * width);
  if (form == ActivationForm::kBf16) grow(bf16_, rows * width);
  if (form == ActivationForm::kInt8) {
    grow(quantized_, rows * width);
    grow(scales_, rows * groups);
    grow(sums_, rows * groups);
  }
  pool_.run(rows, [&](std::int64_t r) {
    float* row = fp32_.data() + r * width;
    const std::int64_t at = r / call.num_tokens * call.matrix_stride + r % call.num_tokens * stride;
    load_values(value_at(call.input, call.type, at), call.type, call.in_features, row);
    std::fill(row + call.in_features, row + cols, 0.0f);
    if (form == ActivationForm::kBf16) kernels_.to_bf16(row, cols, bf16_.data() + r * width);
    if (form == ActivationForm::kInt8)
      kernels_.quantize(row, cols, matrix.group, matrix.format,
                        quantized_.data() + r * width, scales_.data() + r * groups,
                        sums_.data() + r * groups);
  });
}

void DenseEngine::plan_tasks(const DenseCall& call) {
  std::int64_t blocks = 0;
  for (std::int64_t m = 0; m < call.num_matrices; ++m) blocks += call.matrices[m]->packed.blocks;
  const std::int64_t slices = (call.num_tokens + kTaskTokens - 1) / kTaskTokens;
  const std::int64_t wanted = kDenseTasksPerThread * pool_.num_threads();
  std::int64_t chunk = std::max<std::int64_t>(1, blocks * slices / wanted);
  if (call.num_tokens > 1) chunk = std::min(chunk, kMaxTaskBlocks);
  tasks_.clear();
  for (std::int64_t m = 0; m < call.num_matrices; ++m) {
    const std::int64_t all = call.matrices[m]->packed.blocks;
    for (std::int64_t t = 0; t < call.num_tokens; t += kTaskTokens)
      for (std::int64_t b = 0; b < all; b += chunk)
        tasks_.push_back({m, b, std::min(b + chunk, all), t,
                          std::min(kTaskTokens, call.num_tokens - t)});
  }
}

Activations DenseEngine::activations(const PackedMatrix& matrix, std::int64_t row) const {
  Activations x{};
  x.stride = matrix.cols + kRowPadding;
  switch (activation_form(matrix.format)) {
    case ActivationForm::kBf16: x.bf16 = bf16_.data() + row * x.stride; break;
    case ActivationForm::kFp32: x.fp32 = fp32_.data() + row * x.stride; break;
    case ActivationForm::kInt8: {
      const std::int64_t groups = matrix.cols / matrix.group;
      x.quantized = quantized_.data() + row * x.stride;
      x.scales = scales_.data() + row * groups;
      x.sums = sums_.data() + row * groups;
      x.group_stride = groups;
    }
  }
  return x;
}

void DenseEngine::multiply(const DenseCall& call, const Task& task) const {
  const DenseMatrix& matrix = *call.matrices[task.matrix];
  const std::int64_t own = call.matrix_stride ? task.matrix * call.num_tokens : 0;
  const std::int64_t stride = call.out_stride ? call.out_stride : matrix.rows;
  const Activations x = activations(matrix.packed, own + task.first_token);
  const std::int64_t first = task.begin * kBlockRows;
  const std::int64_t rows = std::min(task.end * kBlockRows, matrix.rows) - first;
  void* out = value_at(call.outputs[task.matrix], call.type, task.first_token * stride);
  if (call.type == ValueType::kFp32) {
    kernels_.matmul(matrix.packed, task.begin, task.end, x, task.num_tokens, matrix.rows,
                    static_cast<float*>(out), stride);
    return;
  }
  thread_local std::vector<float> results;  // (tokens of the task, its rows)
  grow(results, task.num_tokens * rows);
  kernels_.matmul(matrix.packed, task.begin, task.end, x, task.num_tokens, matrix.rows,
                  results.data() - first, rows);
  auto* bits = static_cast<std::uint16_t*>(out) + first;
  const std::int64_t whole = rows / 8 * 8;  // to_bf16 takes multiples of 8
  for (std::int64_t t = 0; t < task.num_tokens; ++t) {
    const float* row = results.data() + t * rows;
    std::uint16_t* to = bits + t * stride;
    kernels_.to_bf16(row, whole, to);
    for (std::int64_t r = whole; r < rows; ++r) to[r] = float_to_bf16(row[r]);
  }
}

void DenseEngine::read(const RowsCall& call) const {
  if (call.count == 0) return;
  pool_.run(call.count, [&](std::int64_t i) {
    thread_local std::vector<float> values;
    grow(values, call.cols);
    const std::int64_t row = call.numbers[i];
    if (row >= 0 && row < call.matrix->rows)
      read_row(call.matrix->packed, row, call.cols, values.data());
    else
      std::fill_n(values.data(), call.cols, std::numeric_limits<float>::quiet_NaN());
    store_values(values.data(), call.cols, call.type, value_at(call.out, call.type, i * call.cols));
  });
}

}  // namespace tandem
