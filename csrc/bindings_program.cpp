// What Python sees of programs: a recorded step's operations, added one by one, run as one call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "program.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

void add_norm(Program& program, std::int64_t num_rows, std::int64_t cols, float eps,
              bool rounds_first, bool is_bf16, std::uintptr_t input, std::int64_t input_stride,
              std::uintptr_t weight, std::int64_t weight_rows, int gate_kind, std::uintptr_t gate,
              std::int64_t gate_stride, std::uintptr_t out) {
  program.add(RmsNorm{num_rows, cols, eps, rounds_first, value_type(is_bf16),
                      pointer<const void>(input), input_stride, pointer<const float>(weight),
                      weight_rows, static_cast<GateKind>(gate_kind), pointer<const void>(gate),
                      gate_stride, pointer<void>(out)});
}

void add_rotary(Program& program, std::int64_t num_tokens, std::int64_t num_heads,
                std::int64_t dim, std::int64_t rotated, bool is_bf16, std::uintptr_t input,
                std::int64_t token_stride, std::int64_t head_stride, std::uintptr_t cos,
                std::uintptr_t sin, std::uintptr_t out) {
  program.add(Rotary{num_tokens, num_heads, dim, rotated, value_type(is_bf16),
                     pointer<const void>(input), token_stride, head_stride,
                     pointer<const void>(cos), pointer<const void>(sin), pointer<void>(out)});
}

void add_rotary_pairs(Program& program, std::int64_t num_tokens, std::int64_t num_heads,
                      std::int64_t dim, bool is_bf16, std::uintptr_t input,
                      std::int64_t token_stride, std::int64_t head_stride, std::uintptr_t turns,
                      std::uintptr_t out) {
  program.add(RotaryPairs{num_tokens, num_heads, dim, value_type(is_bf16),
                          pointer<const void>(input), token_stride, head_stride,
                          pointer<const float>(turns), pointer<void>(out)});
}

void add_choice(Program& program, std::int64_t num_tokens, std::int64_t num_experts,
                std::int64_t top_k, bool is_normalised, float scale, bool is_bf16,
                std::uintptr_t logits, bool weights_are_bf16, std::uintptr_t weights,
                std::uintptr_t index) {
  program.add(Choice{num_tokens, num_experts, top_k, is_normalised, scale, value_type(is_bf16),
                     pointer<const void>(logits), value_type(weights_are_bf16),
                     pointer<void>(weights), pointer<std::int64_t>(index)});
}

void add_ranked_choice(Program& program, std::int64_t num_tokens, std::int64_t num_experts,
                       std::int64_t top_k, std::int64_t groups, std::int64_t kept_groups,
                       std::int64_t best_of_group, bool is_normalised, float epsilon, float scale,
                       bool scores_are_bf16, std::uintptr_t scores, std::uintptr_t ranks,
                       bool weights_are_bf16, std::uintptr_t weights, std::uintptr_t index) {
  if (groups < 1 || num_experts % groups != 0 || best_of_group > num_experts / groups ||
      top_k > kept_groups * (num_experts / groups))
    throw std::invalid_argument("expected groups of equal size with enough experts");
  program.add(RankedChoice{num_tokens, num_experts, top_k, groups, kept_groups, best_of_group,
                           is_normalised, epsilon, scale, value_type(scores_are_bf16),
                           pointer<const void>(scores), pointer<const float>(ranks),
                           value_type(weights_are_bf16), pointer<void>(weights),
                           pointer<std::int64_t>(index)});
}

void add_dense(Program& program, const std::vector<const DenseMatrix*>& matrices,
               std::int64_t num_tokens, std::int64_t in_features, bool is_bf16,
               std::uintptr_t input, const std::vector<std::uintptr_t>& outputs) {
  if (matrices.size() != outputs.size())
    throw std::invalid_argument("expected as many outputs as matrices");
  std::vector<void*> out;
  for (const std::uintptr_t address : outputs) out.push_back(pointer<void>(address));
  program.add(Program::Dense{matrices, out, num_tokens, in_features, value_type(is_bf16),
                             pointer<const void>(input)});
}

void add_groups(Program& program, const std::vector<const DenseMatrix*>& matrices,
                std::int64_t num_tokens, std::int64_t in_features, bool is_bf16,
                std::uintptr_t input, std::int64_t token_stride, std::int64_t group_stride,
                std::uintptr_t out) {
  program.add(Program::Dense{matrices, grouped_outputs(matrices, is_bf16, out), num_tokens,
                             in_features, value_type(is_bf16), pointer<const void>(input),
                             token_stride, group_stride, grouped_stride(matrices)});
}

void add_rows(Program& program, const DenseMatrix& matrix, std::int64_t cols, std::int64_t count,
              std::uintptr_t numbers, bool is_bf16, std::uintptr_t out) {
  program.add(RowsCall{&matrix, cols, count, pointer<const std::int64_t>(numbers),
                       value_type(is_bf16), pointer<void>(out)});
}

void add_attention(Program& program, const AttentionCall& layer, bool is_bf16,
                   std::int64_t num_tokens, std::uintptr_t rows, std::uintptr_t positions,
                   std::uintptr_t query, std::int64_t query_token, std::int64_t query_head,
                   std::uintptr_t key, std::int64_t key_token, std::int64_t key_head,
                   std::uintptr_t value, std::int64_t value_token, std::int64_t value_head,
                   std::uintptr_t selected, std::int64_t num_selected, std::uintptr_t out) {
  AttentionCall step = layer;
  step.type = value_type(is_bf16);
  step.num_tokens = num_tokens;
  step.rows = pointer<const std::int64_t>(rows);
  step.positions = pointer<const std::int64_t>(positions);
  step.query = {pointer<const void>(query), query_token, query_head};
  step.new_key = {pointer<const void>(key), key_token, key_head};
  step.new_value = {pointer<const void>(value), value_token, value_head};
  step.selected = pointer<const std::int32_t>(selected);
  step.num_selected = num_selected;
  step.out = pointer<void>(out);
  program.add(Program::Attention{&layer, step});
}

std::int64_t add_experts(Program& program, const RoutedLayer& layer, std::int64_t num_tokens,
                         std::int64_t top_k, int type, std::uintptr_t hidden,
                         std::uintptr_t index, int weight_type, std::uintptr_t weights,
                         std::uintptr_t out) {
  return program.add(layer, {num_tokens, top_k, token_type(type), pointer<const void>(hidden),
                             pointer<const std::int64_t>(index), token_type(weight_type),
                             pointer<const void>(weights), pointer<void>(out)});
}

StateTokens state_tokens(std::int64_t count, std::uintptr_t slots, std::uintptr_t positions,
                         bool have_drafts) {
  return {count, pointer<const std::int64_t>(slots), pointer<const std::int64_t>(positions),
          have_drafts};
}

void add_convolution(Program& program, const ShortConvolution& layer, std::int64_t num_tokens,
                     std::uintptr_t slots, std::uintptr_t positions, bool have_drafts, bool is_bf16,
                     std::uintptr_t input, std::int64_t token_stride, std::uintptr_t out) {
  ShortConvolution call = layer;
  call.tokens = state_tokens(num_tokens, slots, positions, have_drafts);
  call.type = value_type(is_bf16);
  call.input = pointer<const void>(input);
  call.token_stride = token_stride;
  call.out = pointer<void>(out);
  program.add(call);
}

// A tensor (tokens, heads, dim): its address and two strides.
using Heads = std::tuple<std::uintptr_t, std::int64_t, std::int64_t>;

HeadView head_view(const Heads& heads) {
  const auto& [data, token_stride, head_stride] = heads;
  return {pointer<const void>(data), token_stride, head_stride};
}

void add_recurrence(Program& program, const Recurrence& layer, std::int64_t num_tokens,
                    std::uintptr_t slots, std::uintptr_t positions, bool have_drafts, bool is_bf16,
                    const Heads& query, const Heads& key, const Heads& value,
                    std::uintptr_t decay, bool rate_is_bf16, std::uintptr_t rate,
                    std::uintptr_t out) {
  Recurrence call = layer;
  call.tokens = state_tokens(num_tokens, slots, positions, have_drafts);
  call.type = value_type(is_bf16);
  call.query = head_view(query);
  call.key = head_view(key);
  call.value = head_view(value);
  call.decay = pointer<const float>(decay);
  call.rate_type = value_type(rate_is_bf16);
  call.rate = pointer<const void>(rate);
  call.out = pointer<void>(out);
  program.add(call);
}

template <class Layer>
void keep_drafts(Layer& layer, std::uintptr_t kept, std::uintptr_t values) {
  layer.log = {pointer<std::int64_t>(kept), pointer<float>(values)};
}

void bind_recurrent(nb::module_& m) {
  // What stays the same from step to step, by layer.
  nb::class_<ShortConvolution>(m, "ShortConvolution")
      .def("__init__", [](ShortConvolution* self, std::int64_t channels, std::int64_t width,
                          std::uintptr_t weight, std::uintptr_t bias, bool has_silu,
                          std::uintptr_t states) {
        new (self) ShortConvolution{};
        self->channels = channels;
        self->width = width;
        self->weight = pointer<const float>(weight);
        self->bias = pointer<const float>(bias);
        self->has_silu = has_silu;
        self->states = pointer<float>(states);
      })
      .def("keep_drafts", &keep_drafts<ShortConvolution>);
  nb::class_<Recurrence>(m, "Recurrence")
      .def("__init__", [](Recurrence* self, std::int64_t num_heads, std::int64_t num_key_heads,
                          std::int64_t key_dim, std::int64_t value_dim, int decay_kind,
                          bool is_delta, bool is_normalised, float scale, std::uintptr_t factor,
                          std::uintptr_t skip, std::uintptr_t states) {
        new (self) Recurrence{};
        self->num_heads = num_heads;
        self->num_key_heads = num_key_heads;
        self->key_dim = key_dim;
        self->value_dim = value_dim;
        self->decay_kind = static_cast<DecayKind>(decay_kind);
        self->is_delta = is_delta;
        self->is_normalised = is_normalised;
        self->scale = scale;
        self->factor = pointer<const float>(factor);
        self->skip = pointer<const float>(skip);
        self->states = pointer<float>(states);
      })
      .def_prop_ro("logged_values", [](const Recurrence& self) { return LoggedToken(self).size; })
      .def("keep_drafts", &keep_drafts<Recurrence>);
  nb::class_<RecurrentEngine>(m, "RecurrentEngine")
      .def("__init__",
           [](RecurrentEngine* self, ExpertEngine& engine) {
             new (self) RecurrentEngine(engine.pool(), engine.isa());
           },
           nb::keep_alive<1, 2>());
}

}  // namespace

void bind_program(nb::module_& m) {
  bind_recurrent(m);
  bind_index_keys(m);
  // Matrices, layers and tensors are kept alive by the caller.
  auto program = nb::class_<Program>(m, "Program");
  bind_tensor_ops(program);
  program
      .def(nb::init<ExpertEngine&, DenseEngine&, AttentionEngine&, RoutedExperts&,
                    RecurrentEngine&>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def("add_norm", &add_norm)
      .def("add_rotary", &add_rotary)
      .def("add_rotary_pairs", &add_rotary_pairs)
      .def("add_choice", &add_choice)
      .def("add_ranked_choice", &add_ranked_choice)
      .def("add_dense", &add_dense)
      .def("add_groups", &add_groups)
      .def("add_rows", &add_rows, nb::keep_alive<1, 2>())
      .def("add_convolution", &add_convolution)
      .def("add_recurrence", &add_recurrence)
      .def("add_attention", &add_attention, nb::keep_alive<1, 2>())
      .def("add_experts", &add_experts)
      .def("num_active", &Program::num_active)
      .def("run", [](Program& program) {
        const Turn turn(program);
        program.run();
      });
}

}  // namespace tandem
