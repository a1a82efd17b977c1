#include "experts.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "cpu_features.hpp"

namespace tandem {
namespace {

// Enough chunks that a thread which the system takes away for a while is worked around, few enough
// that claiming them costs nothing.
constexpr std::int64_t kTasksPerThread = 16;

bool has_all(const std::vector<std::string>& found, std::initializer_list<const char*> wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const char* name) {
    return std::find(found.begin(), found.end(), name) != found.end();
  });
}

const Kernels& choose(const std::string& isa) {
  const std::vector<std::string> available = available_isas();
  const std::string name = isa.empty() ? available.front() : isa;
  if (std::find(available.begin(), available.end(), name) == available.end())
    throw std::invalid_argument(name);
#if defined(__x86_64__)
  if (name == "avx512") return avx512_kernels();
  if (name == "avxvnni") return avxvnni_kernels();
  if (name == "avx2") return avx2_kernels();
#endif
  return portable_kernels();
}

PackedMatrix matrix(const ExpertLayout& layout, const std::uint8_t* expert, bool is_up) {
  const std::int64_t rows = is_up ? layout.inner_rows * (layout.is_gated ? 2 : 1)
                                  : layout.hidden_size;
  const std::int64_t bias = is_up ? layout.up_bias : layout.down_bias;
  return {static_cast<Format>(layout.format),
          (rows + kBlockRows - 1) / kBlockRows,
          is_up ? layout.hidden_cols : layout.inner_cols,
          layout.group,
          expert + (is_up ? layout.up_data : layout.down_data),
          expert + (is_up ? layout.up_scales : layout.down_scales),
          bias < 0 ? nullptr : reinterpret_cast<const float*>(expert + bias)};
}

// Whole blocks come out of the first projection, whole groups go into the second.
std::int64_t inner_stride(const ExpertLayout& layout) {
  return std::max(layout.inner_rows, layout.inner_cols);
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  const CpuFeatures cpu = detect_cpu_features();
  if (has_all(cpu.instruction_sets, {"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"}))
    names.emplace_back("avx512");
  if (has_all(cpu.instruction_sets, {"avx2", "fma", "f16c"})) {
    if (has_all(cpu.instruction_sets, {"avx_vnni"})) names.emplace_back("avxvnni");
    names.emplace_back("avx2");
  }
#endif
  names.emplace_back("portable");
  return names;
}

void ExpertEngine::Rows::resize(Format format, std::int64_t rows, std::int64_t new_cols,
                                std::int64_t group) {
  form = activation_form(format);
  cols = new_cols;
  groups = form == ActivationForm::kInt8 ? cols / group : 0;
  const auto grow = [](auto& values, std::int64_t size) {
    values.resize(std::max<std::size_t>(values.size(), size));
  };
  switch (form) {
    case ActivationForm::kBf16: return grow(bf16, rows * cols);
    case ActivationForm::kFp32: return grow(fp32, rows * cols);
    case ActivationForm::kInt8:
      grow(quantized, rows * cols);
      grow(scales, rows * groups);
      grow(sums, rows * groups);
  }
}

void ExpertEngine::Rows::copy(std::int64_t to, const Rows& source, std::int64_t from) {
  const auto copy_row = [&](const auto& values, auto& target, std::int64_t count) {
    std::copy_n(values.data() + from * count, count, target.data() + to * count);
  };
  switch (form) {
    case ActivationForm::kBf16: return copy_row(source.bf16, bf16, cols);
    case ActivationForm::kFp32: return copy_row(source.fp32, fp32, cols);
    case ActivationForm::kInt8:
      copy_row(source.quantized, quantized, cols);
      copy_row(source.scales, scales, groups);
      copy_row(source.sums, sums, groups);
  }
}

Activations ExpertEngine::Rows::view(std::int64_t row, bool is_repeated) const {
  Activations view{};
  view.stride = is_repeated ? 0 : cols;
  switch (form) {
    case ActivationForm::kBf16: view.bf16 = bf16.data() + row * cols; break;
    case ActivationForm::kFp32: view.fp32 = fp32.data() + row * cols; break;
    case ActivationForm::kInt8:
      view.quantized = quantized.data() + row * cols;
      view.scales = scales.data() + row * groups;
      view.sums = sums.data() + row * groups;
      view.group_stride = is_repeated ? 0 : groups;
  }
  return view;
}

ExpertEngine::ExpertEngine(int num_threads, const std::string& isa)
    : kernels_(&choose(isa)), pool_(num_threads) {}

void ExpertEngine::run(const ExpertLayout& layout, const ActivationSpec& activation,
                       const ExpertCall& call) {
  const std::int64_t num_rows = call.row_begin[call.num_experts];
  if (num_rows == 0) return;
  const std::int64_t up_rows = layout.inner_rows * (layout.is_gated ? 2 : 1);
  up_.resize(std::max<std::size_t>(up_.size(), num_rows * up_rows));
  inner_values_.resize(std::max<std::size_t>(inner_values_.size(), num_rows * inner_stride(layout)));
  inner_.resize(static_cast<Format>(layout.format), num_rows, layout.inner_cols, layout.group);
  prepare_tokens(layout, call);
  project_up(layout, call);
  activate_rows(layout, activation, num_rows);
  project_down(layout, call);
}

std::int64_t ExpertEngine::read_all(const std::uint8_t* data, std::int64_t bytes) {
  constexpr std::int64_t kChunk = 1 << 20;
  const std::int64_t chunks = bytes / kChunk;
  std::atomic<std::uint64_t> checksum{0};
  pool_.run(chunks, [&](std::int64_t i) { checksum += kernels_->read(data + i * kChunk, kChunk); });
  return chunks * kChunk;
}

std::int64_t ExpertEngine::multiply(bool is_int8, std::int64_t count_per_thread) {
  std::atomic<std::int64_t> operations{0};
  pool_.run(4 * pool_.num_threads(), [&](std::int64_t) {
    const auto multiply = is_int8 ? kernels_->multiply_int8 : kernels_->multiply_bf16;
    operations += multiply(count_per_thread / 4);
  });
  return operations;
}

void ExpertEngine::convert(const ExpertLayout& layout, const float* row, std::int64_t index,
                           Rows& rows) const {
  switch (rows.form) {
    case ActivationForm::kBf16:
      return kernels_->to_bf16(row, rows.cols, rows.bf16.data() + index * rows.cols);
    case ActivationForm::kFp32:
      std::copy_n(row, rows.cols, rows.fp32.data() + index * rows.cols);
      return;
    case ActivationForm::kInt8:
      kernels_->quantize(row, rows.cols, layout.group,
                         sum_factor(static_cast<Format>(layout.format)),
                         rows.quantized.data() + index * rows.cols,
                         rows.scales.data() + index * rows.groups,
                         rows.sums.data() + index * rows.groups);
  }
}

// A token's activations are converted once, however many experts want them, and then laid out row
// by row. A single token is not copied: all its experts read the same row.
void ExpertEngine::prepare_tokens(const ExpertLayout& layout, const ExpertCall& call) {
  const auto format = static_cast<Format>(layout.format);
  const std::int64_t num_rows = call.row_begin[call.num_experts];
  tokens_.resize(format, call.num_tokens, layout.hidden_cols, layout.group);
  pool_.run(call.num_tokens, [&](std::int64_t t) {
    const float* row = call.hidden + t * layout.hidden_size;
    if (layout.hidden_cols == layout.hidden_size) return convert(layout, row, t, tokens_);
    std::vector<float> padded(layout.hidden_cols, 0.0f);
    std::copy_n(row, layout.hidden_size, padded.data());
    convert(layout, padded.data(), t, tokens_);
  });
  if (call.num_tokens == 1) return;
  gathered_.resize(format, num_rows, layout.hidden_cols, layout.group);
  pool_.run(num_rows, [&](std::int64_t i) { gathered_.copy(i, tokens_, call.row_token[i]); });
}

void ExpertEngine::plan_tasks(const ExpertCall& call, std::int64_t blocks) {
  std::int64_t active = 0;
  for (std::int64_t e = 0; e < call.num_experts; ++e) active += call.row_begin[e + 1] > call.row_begin[e];
  const std::int64_t wanted = kTasksPerThread * pool_.num_threads();
  const std::int64_t chunk = std::max<std::int64_t>(1, active * blocks / wanted);
  tasks_.clear();
  for (std::int64_t e = 0; e < call.num_experts; ++e) {
    if (call.row_begin[e + 1] == call.row_begin[e]) continue;
    for (std::int64_t b = 0; b < blocks; b += chunk)
      tasks_.push_back({e, b, std::min(b + chunk, blocks)});
  }
}

void ExpertEngine::project_up(const ExpertLayout& layout, const ExpertCall& call) {
  const std::int64_t rows = layout.inner_rows * (layout.is_gated ? 2 : 1);
  const bool is_single = call.num_tokens == 1;
  plan_tasks(call, rows / kBlockRows);
  pool_.run(static_cast<std::int64_t>(tasks_.size()), [&](std::int64_t i) {
    const Task& task = tasks_[i];
    const std::int64_t first = call.row_begin[task.expert];
    const Activations x = is_single ? tokens_.view(0, true) : gathered_.view(first, false);
    kernels_->matmul(matrix(layout, call.experts[task.expert], true), task.begin, task.end, x,
                     call.row_begin[task.expert + 1] - first, rows, up_.data() + first * rows, rows);
  });
}

void ExpertEngine::activate_rows(const ExpertLayout& layout, const ActivationSpec& spec,
                                 std::int64_t num_rows) {
  const std::int64_t rows = layout.inner_rows * (layout.is_gated ? 2 : 1);
  pool_.run(num_rows, [&](std::int64_t i) {
    float* inner = inner_values_.data() + i * inner_stride(layout);
    kernels_->activate(spec, up_.data() + i * rows, layout.inner_rows, inner);
    std::fill(inner + layout.inner_rows, inner + inner_stride(layout), 0.0f);
    convert(layout, inner, i, inner_);
  });
}

void ExpertEngine::project_down(const ExpertLayout& layout, const ExpertCall& call) {
  plan_tasks(call, (layout.hidden_size + kBlockRows - 1) / kBlockRows);
  pool_.run(static_cast<std::int64_t>(tasks_.size()), [&](std::int64_t i) {
    const Task& task = tasks_[i];
    const std::int64_t first = call.row_begin[task.expert];
    kernels_->matmul(matrix(layout, call.experts[task.expert], false), task.begin, task.end,
                     inner_.view(first, false), call.row_begin[task.expert + 1] - first,
                     layout.hidden_size, call.out + first * layout.hidden_size, layout.hidden_size);
  });
}

}  // namespace tandem
