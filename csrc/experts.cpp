#include "experts.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "cpu_features.hpp"

namespace tandem {
namespace {

// Enough chunks that others can take over if a thread is descheduled, but few enough that claiming
// them costs nothing.
constexpr std::int64_t kExpertTasksPerThread = 16;

#if defined(__x86_64__)
bool has_all(const std::vector<std::string>& found, std::initializer_list<const char*> wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const char* name) {
    return std::find(found.begin(), found.end(), name) != found.end();
  });
}
#endif

const Kernels& choose_kernels(const std::string& isa) {
  const std::vector<std::string> available = available_isas();
  const std::string name = isa.empty() ? available.front() : isa;
  if (std::find(available.begin(), available.end(), name) == available.end())
    throw std::invalid_argument(name);
#if defined(__x86_64__)
  if (name == "amx") return amx_kernels();
  if (name == "avx512") return avx512_kernels();
  if (name == "avxvnni") return avxvnni_kernels();
  if (name == "avx2") return avx2_kernels();
#endif
  return portable_kernels();
}

PackedMatrix matrix(const ProjectionLayout& projection, std::int64_t rows,
                    const std::uint8_t* expert) {
  return {static_cast<Format>(projection.format),
          (rows + kBlockRows - 1) / kBlockRows,
          projection.cols,
          projection.group,
          expert + projection.data,
          expert + projection.scales,
          projection.bias < 0 ? nullptr
                              : reinterpret_cast<const float*>(expert + projection.bias)};
}

std::int64_t up_rows(const ExpertLayout& layout) {
  return layout.inner_rows * (layout.is_gated ? 2 : 1);
}

// The first projection gives whole blocks, the second takes whole groups.
std::int64_t inner_stride(const ExpertLayout& layout) {
  return std::max(layout.inner_rows, layout.down.cols);
}

constexpr std::int64_t round_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// Inner columns per task: whole quantisation groups, and few enough that a long prompt's rows stay
// in the cache between projection and activation.
constexpr std::int64_t kMaxTaskColumns = 128;
// With few tokens a task takes more columns, because prefetching starts again in each task.
constexpr std::int64_t kFewTokens = 8;
constexpr std::int64_t kMaxTaskTokens = 256;
// Values of a token that are summed at a time.
constexpr std::int64_t kSumBlock = 64;
// Row blocks that a kernel multiplies together with many tokens.
constexpr std::int64_t kTaskBlocks = 4;

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  const CpuFeatures cpu = detect_cpu_features();
  if (has_all(cpu.instruction_sets, {"avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512_vnni",
                                 "avx512_bf16"})) {
    if (has_all(cpu.instruction_sets, {"amx_tile", "amx_int8", "amx_bf16"}) && have_tiles())
      names.emplace_back("amx");
    names.emplace_back("avx512");
  }
#if !defined(TANDEM_WITHOUT_AVX2)
  if (has_all(cpu.instruction_sets, {"avx2", "fma", "f16c"})) {
    if (has_all(cpu.instruction_sets, {"avx_vnni"})) names.emplace_back("avxvnni");
    names.emplace_back("avx2");
  }
#endif
#endif
  names.emplace_back("portable");
  return names;
}

void ExpertEngine::Rows::resize(const ProjectionLayout& projection, std::int64_t rows) {
  format = static_cast<Format>(projection.format);
  form = activation_form(format);
  cols = projection.cols;
  group = projection.group;
  stride = cols + kRowPadding;
  groups = form == ActivationForm::kInt8 ? cols / group : 0;
  const auto grow = [](auto& values, std::int64_t size) {
    values.resize(std::max<std::size_t>(values.size(), size));
  };
  switch (form) {
    case ActivationForm::kBf16: return grow(bf16, rows * stride);
    case ActivationForm::kFp32: return grow(fp32, rows * stride);
    case ActivationForm::kInt8:
      grow(quantized, rows * stride);
      grow(scales, rows * groups);
      grow(sums, rows * groups);
  }
}

void ExpertEngine::Rows::copy(std::int64_t to, const Rows& source, std::int64_t from) {
  const auto copy_row = [&](const auto& values, auto& target, std::int64_t count) {
    std::copy_n(values.data() + from * count, count, target.data() + to * count);
  };
  switch (form) {
    case ActivationForm::kBf16: return copy_row(source.bf16, bf16, stride);
    case ActivationForm::kFp32: return copy_row(source.fp32, fp32, stride);
    case ActivationForm::kInt8:
      copy_row(source.quantized, quantized, stride);
      copy_row(source.scales, scales, groups);
      copy_row(source.sums, sums, groups);
  }
}

Activations ExpertEngine::Rows::view(std::int64_t row, bool is_repeated) const {
  Activations view{};
  view.stride = is_repeated ? 0 : stride;
  switch (form) {
    case ActivationForm::kBf16: view.bf16 = bf16.data() + row * stride; break;
    case ActivationForm::kFp32: view.fp32 = fp32.data() + row * stride; break;
    case ActivationForm::kInt8:
      view.quantized = quantized.data() + row * stride;
      view.scales = scales.data() + row * groups;
      view.sums = sums.data() + row * groups;
      view.group_stride = is_repeated ? 0 : groups;
  }
  return view;
}

ExpertEngine::ExpertEngine(int num_threads, const std::string& isa)
    : kernels_(&choose_kernels(isa)), pool_(num_threads) {}

void ExpertEngine::run(const ExpertLayout& layout, const ActivationSpec& activation,
                       const ExpertCall& call) {
  start(layout, activation, call);
  finish();
}

void ExpertEngine::start(const ExpertLayout& layout, const ActivationSpec& activation,
                         const ExpertCall& call) {
  const std::int64_t num_rows = call.row_begin[call.num_experts];
  tasks_.clear();
  if (num_rows > 0) {
    inner_.resize(layout.down, num_rows);
    prepare_tokens(layout.up, call, layout.hidden_size);
    plan_tasks(layout, call);
  }
  job_ = {this, layout, activation, call};
  pool_.start(static_cast<std::int64_t>(tasks_.size()), job_);
}

void ExpertEngine::Job::operator()(std::int64_t i) const {
  const Task& task = engine->tasks_[i];
  std::atomic<std::int64_t>& up_left = engine->up_left_[task.expert];
  if (i < engine->num_up_tasks_) {
    engine->project_up(layout, activation, call, task);
    up_left.fetch_sub(1, std::memory_order_release);
  } else {
    wait_until_zero(up_left);
    engine->project_down(layout, call, task);
  }
}

void ExpertEngine::project(const ExpertLayout& layout, bool is_up, const ExpertCall& call) {
  const std::int64_t rows = is_up ? up_rows(layout) : layout.hidden_size;
  const ProjectionLayout& projection = is_up ? layout.up : layout.down;
  prepare_tokens(projection, call, is_up ? layout.hidden_size : layout.inner_rows);
  tasks_.clear();
  add_tasks(call, round_up(rows, kBlockRows) / kBlockRows, kTaskBlocks);
  pool_.run(static_cast<std::int64_t>(tasks_.size()), [&](std::int64_t i) {
    const Task& task = tasks_[i];
    const std::int64_t first = call.row_begin[task.expert];
    kernels_->matmul(matrix(projection, rows, call.experts[task.expert]), task.begin, task.end,
                     token_rows(call, first), call.row_begin[task.expert + 1] - first, rows,
                     call.out + first * rows, rows);
  });
}

void ExpertEngine::load(const void* from, ValueType type, std::int64_t count, float* to) const {
  if (type == ValueType::kFp16)
    return kernels_->from_fp16(static_cast<const std::uint16_t*>(from), count, to);
  load_values(from, type, count, to);
}

void ExpertEngine::store(const float* from, std::int64_t count, ValueType type, void* to) const {
  if (type == ValueType::kFp16)
    return kernels_->to_fp16(from, count, static_cast<std::uint16_t*>(to));
  store_values(from, count, type, to);
}

void ExpertEngine::load_rows(const void* from, ValueType type, std::int64_t size,
                             const std::vector<std::int32_t>& rows, float* to) {
  pool_.run(static_cast<std::int64_t>(rows.size()), [&](std::int64_t i) {
    load(value_at(from, type, rows[i] * size), type, size, to + i * size);
  });
}

void ExpertEngine::add_rows(const RowSum& sum) {
  pool_.run(sum.num_tokens, [&](std::int64_t t) {
    // Column block by column block through all rows. Half of the rows are in another core's cache
    // and arrive sooner side by side than one after the other.
    for (std::int64_t begin = 0; begin < sum.size; begin += kSumBlock) {
      const std::int64_t count = std::min(kSumBlock, sum.size - begin);
      float total[kSumBlock] = {};
      for (std::int64_t k = t * sum.top_k; k < (t + 1) * sum.top_k; ++k) {
        if (sum.row_of[k] < 0) continue;
        const float* row = sum.rows + sum.row_of[k] * sum.size + begin;
        const float weight = sum.weights[k];
        for (std::int64_t i = 0; i < count; ++i) total[i] += weight * row[i];
      }
      std::copy_n(total, count, sum.out + t * sum.size + begin);
    }
  });
}

std::int64_t ExpertEngine::read_all(const std::uint8_t* data, std::int64_t bytes) {
  constexpr std::int64_t kChunk = 1 << 20;
  const std::int64_t chunks = bytes / kChunk;
  std::atomic<std::uint64_t> checksum{0};
  pool_.run(chunks, [&](std::int64_t i) { checksum += kernels_->read(data + i * kChunk, kChunk); });
  return chunks * kChunk;
}

std::int64_t ExpertEngine::multiply(int bits, std::int64_t count_per_thread) {
  const auto multiply = bits == 4   ? kernels_->multiply_int4
                        : bits == 8 ? kernels_->multiply_int8
                                    : kernels_->multiply_bf16;
  std::atomic<std::int64_t> operations{0};
  pool_.run(4 * pool_.num_threads(), [&](std::int64_t) {
    operations += multiply(count_per_thread / 4);
  });
  return operations;
}

// Converts `count` values of a row from column `begin` on, in whole groups.
void ExpertEngine::convert(const float* values, std::int64_t count, Rows& rows, std::int64_t row,
                           std::int64_t begin) const {
  const std::int64_t at = row * rows.stride + begin;
  switch (rows.form) {
    case ActivationForm::kFp32:
      std::copy_n(values, count, rows.fp32.data() + at);
      return;
    case ActivationForm::kBf16:
      kernels_->to_bf16(values, count, rows.bf16.data() + at);
      return;
    case ActivationForm::kInt8: {
      const std::int64_t group = row * rows.groups + begin / rows.group;
      kernels_->quantize(values, count, rows.group, rows.format,
                         rows.quantized.data() + at, rows.scales.data() + group,
                         rows.sums.data() + group);
    }
  }
}

// Converts a token's activations once for all experts, and then copies them row by row. A single
// token is not copied: all its experts read the same row.
void ExpertEngine::prepare_tokens(const ProjectionLayout& projection, const ExpertCall& call,
                                  std::int64_t size) {
  const std::int64_t num_rows = call.row_begin[call.num_experts], cols = projection.cols;
  tokens_.resize(projection, call.num_tokens);
  const std::int64_t unconverted = call.are_converted ? 0 : call.num_tokens;
  pool_.run(unconverted, [&](std::int64_t t) {
    const float* row = call.hidden + t * size;
    if (cols <= size) return convert(row, cols, tokens_, t, 0);
    std::vector<float> padded(cols, 0.0f);
    std::copy_n(row, size, padded.data());
    convert(padded.data(), cols, tokens_, t, 0);
  });
  if (call.num_tokens == 1) return;
  gathered_.resize(projection, num_rows);
  pool_.run(num_rows, [&](std::int64_t i) { gathered_.copy(i, tokens_, call.row_token[i]); });
}

Activations ExpertEngine::token_rows(const ExpertCall& call, std::int64_t first) const {
  return call.num_tokens == 1 ? tokens_.view(0, true) : gathered_.view(first, false);
}

// Splits 0..size-1 of every active expert into tasks of whole units.
void ExpertEngine::add_tasks(const ExpertCall& call, std::int64_t size, std::int64_t unit,
                             std::int64_t most) {
  std::int64_t active = 0;
  for (std::int64_t e = 0; e < call.num_experts; ++e)
    active += call.row_begin[e + 1] > call.row_begin[e];
  const std::int64_t wanted = kExpertTasksPerThread * pool_.num_threads();
  const std::int64_t even = std::max<std::int64_t>(1, active * size / wanted);
  const std::int64_t largest = std::min(even, std::max(unit, most));
  const std::int64_t parts = (size + largest - 1) / largest;
  const std::int64_t chunk = round_up((size + parts - 1) / parts, unit);
  for (std::int64_t e = 0; e < call.num_experts; ++e) {
    if (call.row_begin[e + 1] == call.row_begin[e]) continue;
    for (std::int64_t begin = 0; begin < size; begin += chunk)
      tasks_.push_back({e, begin, std::min(begin + chunk, size)});
  }
}

// Tasks of all first projections come before those of all second ones. They are claimed in this
// order, so what a second projection waits for is done or in progress.
void ExpertEngine::plan_tasks(const ExpertLayout& layout, const ExpertCall& call) {
  tasks_.clear();
  add_tasks(call, layout.inner_rows, std::max<std::int64_t>(layout.down.group, 32),
            call.num_tokens > kFewTokens ? kMaxTaskColumns : layout.inner_rows);
  num_up_tasks_ = static_cast<std::int64_t>(tasks_.size());
  if (num_up_left_ < call.num_experts) {
    num_up_left_ = call.num_experts;
    up_left_ = std::make_unique<std::atomic<std::int64_t>[]>(num_up_left_);
  }
  for (std::int64_t e = 0; e < call.num_experts; ++e)
    up_left_[e].store(0, std::memory_order_relaxed);
  for (const Task& task : tasks_) up_left_[task.expert].fetch_add(1, std::memory_order_relaxed);
  add_tasks(call, round_up(layout.hidden_size, kBlockRows) / kBlockRows, kTaskBlocks);
}

// Inner columns begin..end-1 of an expert's tokens: projects, activates, and converts them for the
// second projection while they are in the cache.
void ExpertEngine::project_up(const ExpertLayout& layout, const ActivationSpec& spec,
                              const ExpertCall& call, const Task& task) {
  thread_local std::vector<float> up;
  thread_local std::vector<float> inner;
  const std::int64_t per_column = layout.is_gated ? 2 : 1;
  const std::int64_t stride = (task.end - task.begin) * per_column;
  const bool is_last = task.end == layout.inner_rows;
  const std::int64_t cols = (is_last ? layout.down.cols : task.end) - task.begin;
  if (cols <= 0) return;
  up.resize(std::max<std::size_t>(up.size(), kMaxTaskTokens * stride));
  inner.resize(std::max<std::size_t>(inner.size(), inner_stride(layout)));
  const std::int64_t begin_row = task.begin * per_column;
  const std::int64_t last = call.row_begin[task.expert + 1];
  for (std::int64_t row = call.row_begin[task.expert]; row < last; row += kMaxTaskTokens) {
    const std::int64_t count = std::min(kMaxTaskTokens, last - row);
    kernels_->matmul(matrix(layout.up, up_rows(layout), call.experts[task.expert]),
                     begin_row / kBlockRows, task.end * per_column / kBlockRows,
                     token_rows(call, row), count, up_rows(layout), up.data() - begin_row, stride);
    for (std::int64_t t = 0; t < count; ++t) {
      kernels_->activate(spec, up.data() + t * stride, task.end - task.begin, inner.data());
      if (cols > task.end - task.begin)
        std::fill(inner.begin() + (task.end - task.begin), inner.begin() + cols, 0.0f);
      convert(inner.data(), cols, inner_, row + t, task.begin);
    }
  }
}

void ExpertEngine::project_down(const ExpertLayout& layout, const ExpertCall& call,
                                const Task& task) {
  const std::int64_t first = call.row_begin[task.expert];
  const std::int64_t out_row = call.out_begin == nullptr ? first : call.out_begin[task.expert];
  kernels_->matmul(matrix(layout.down, layout.hidden_size, call.experts[task.expert]), task.begin,
                   task.end, inner_.view(first, false), call.row_begin[task.expert + 1] - first,
                   layout.hidden_size, call.out + out_row * layout.hidden_size,
                   layout.hidden_size);
}

}  // namespace tandem
