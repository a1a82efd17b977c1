// All experts of a layer that the CPU computes, in one call: first projection, activation, second
// projection.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "lines.hpp"
#include "packed.hpp"
#include "thread_pool.hpp"
#include "values.hpp"

namespace tandem {

// One of an expert's two matrices. Offsets of its parts are in bytes from the expert's begin; -1:
// no bias.
struct ProjectionLayout {
  int format;
  std::int64_t group;
  std::int64_t cols;  // padded to whole groups
  std::int64_t data, scales, bias;
};

// The layout of one packed expert in memory.
struct ExpertLayout {
  ProjectionLayout up, down;
  std::int64_t hidden_size;
  std::int64_t inner_rows;  // intermediate size padded to blocks
  bool is_gated;
};

// The work of one call. Rows are (token, expert) pairs, sorted by expert: expert e has rows
// row_begin[e] .. row_begin[e + 1] - 1, and row i belongs to token row_token[i].
struct ExpertCall {
  std::int64_t num_experts;
  std::int64_t num_tokens;
  const std::uint8_t* const* experts;
  const std::int32_t* row_begin;
  const std::int32_t* row_token;
  const float* hidden;  // (num_tokens, hidden_size)
  float* out;  // (num_rows, hidden_size)
  const std::int32_t* out_begin = nullptr;  // by expert: its first row in `out`; null: row_begin
  bool are_converted = false;  // whether the engine's previous call had the same tokens and layout
};

// Sums rows by token: token t is the sum over k of weights[t][k] times row row_of[t * top_k + k],
// in this order; -1 is padding and adds nothing.
struct RowSum {
  std::int64_t num_tokens, top_k, size;
  const float* rows;
  const std::int32_t* row_of;
  const float* weights;
  float* out;  // (num_tokens, size)
};

// Keeps threads and scratch memory between calls. One call at a time.
class ExpertEngine {
 public:
  // `isa`: "amx", "avx512", "avxvnni", "avx2", "portable", or "" for the best one of this
  // processor. Throws std::invalid_argument if the processor does not have it.
  ExpertEngine(int num_threads, const std::string& isa);

  const char* isa() const { return kernels_->name; }
  int num_threads() const { return pool_.num_threads(); }

  // For code that shares the threads with the experts, never at the same time.
  const Kernels& kernels() const { return *kernels_; }
  ThreadPool& pool() { return pool_; }
  std::mutex& busy() { return pool_.busy(); }

  void run(const ExpertLayout& layout, const ActivationSpec& activation, const ExpertCall& call);

  // The two halves of `run`. Between them the workers compute while the caller does other work.
  // Everything in the call must live until `finish` has returned.
  void start(const ExpertLayout& layout, const ActivationSpec& activation, const ExpertCall& call);
  void finish() { pool_.finish(); }

  // Computes a single projection: the first (blocks of 16 gate and 16 up values alternate), or the
  // second from rows of inner_rows values. `call.hidden` and `call.out` are its inputs and outputs
  // in fp32.
  void project(const ExpertLayout& layout, bool is_up, const ExpertCall& call);

  // Converts a model's tensors to fp32 and back, like load_values and store_values, but faster.
  void load(const void* from, ValueType type, std::int64_t count, float* to) const;
  void store(const float* from, std::int64_t count, ValueType type, void* to) const;

  // Converts some rows of a tensor, each of `size` contiguous values, to fp32.
  void load_rows(const void* from, ValueType type, std::int64_t size,
                 const std::vector<std::int32_t>& rows, float* to);

  // The result has the same bits wherever the rows were computed, because products and additions
  // are rounded separately.
  void add_rows(const RowSum& sum);

  // Wakes the threads shortly before `run`; they spin for some microseconds.
  void wake() { pool_.wake(); }

  // The machine's ceilings with these threads, for timing: bytes read of `data`, operations done.
  std::int64_t read_all(const std::uint8_t* data, std::int64_t bytes);
  std::int64_t multiply(int bits, std::int64_t count_per_thread);

 private:
  // Rows of activations in the kernels' form: int8 with scales and sums, bf16, or fp32.
  struct Rows {
    std::vector<std::int8_t> quantized;
    std::vector<float> scales;
    std::vector<std::int32_t> sums;
    LineVector<std::uint16_t> bf16;
    std::vector<float> fp32;
    Format format = Format::kInt8;
    ActivationForm form = ActivationForm::kInt8;
    std::int64_t cols = 0, group = 0, stride = 0, groups = 0;

    // Makes room for the inputs of a projection.
    void resize(const ProjectionLayout& projection, std::int64_t rows);
    void copy(std::int64_t to, const Rows& source, std::int64_t from);
    Activations view(std::int64_t row, bool is_repeated) const;
  };
  // For the first projection: inner columns begin..end-1; for the second: row blocks.
  struct Task {
    std::int64_t expert, begin, end;
  };

  // The job that the threads share; a thread does one task at a time.
  struct Job {
    ExpertEngine* engine;
    ExpertLayout layout;
    ActivationSpec activation;
    ExpertCall call;

    void operator()(std::int64_t i) const;
  };

  void convert(const float* values, std::int64_t count, Rows& rows, std::int64_t row,
               std::int64_t begin) const;
  void prepare_tokens(const ProjectionLayout& projection, const ExpertCall& call,
                      std::int64_t size);
  Activations token_rows(const ExpertCall& call, std::int64_t first) const;
  void plan_tasks(const ExpertLayout& layout, const ExpertCall& call);
  void add_tasks(const ExpertCall& call, std::int64_t size, std::int64_t unit,
                 std::int64_t most = INT64_MAX);
  void project_up(const ExpertLayout& layout, const ActivationSpec& spec, const ExpertCall& call,
                  const Task& task);
  void project_down(const ExpertLayout& layout, const ExpertCall& call, const Task& task);

  const Kernels* kernels_;
  ThreadPool pool_;
  Rows tokens_, gathered_, inner_;
  Job job_{};
  std::vector<Task> tasks_;  // first projections, then second ones
  std::int64_t num_up_tasks_ = 0;
  // By expert: unfinished tasks of its first projection.
  std::unique_ptr<std::atomic<std::int64_t>[]> up_left_;
  std::int64_t num_up_left_ = 0;
};

// Names of the instruction sets that this processor supports, best first.
std::vector<std::string> available_isas();

}  // namespace tandem
