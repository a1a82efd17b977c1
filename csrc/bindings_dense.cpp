// The Python bindings of dense kernels, attention and sampling.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

#include "bindings_calls.hpp"
#include "disk/host_slots.hpp"
#include "sampling.hpp"
#include "sizes.hpp"

namespace nb = nanobind;

namespace tandem {
namespace {

constexpr std::size_t kMaxMatrices = 8;

DenseMatrix make_matrix(int number, std::int64_t group, std::int64_t rows, std::int64_t in_features,
                        std::int64_t cols, const Tensor& data, const MaybeTensor& scales,
                        const MaybeTensor& bias) {
  const Format format = require_format(number);
  require_columns(format, group, cols);
  require(rows > 0 && rows <= kMostSide && in_features > 0 && in_features <= cols,
          "1 to 2^28 rows, and as many inputs as columns or fewer");
  const std::int64_t blocks = blocks_of(rows), scale = scale_bytes(format, cols, group);
  require((scale > 0) == scales.has_value(), "scales if, and only if, the format has some");
  return {{format, blocks, cols, group, data.memory("data", blocks * code_bytes(format, cols)),
           scales ? scales->memory("scales", blocks * scale) : nullptr,
           dense_or_null<const float>(bias, "bias", blocks * kBlockRows)},
          rows,
          in_features};
}

void run_dense(DenseEngine& engine, const std::vector<const DenseMatrix*>& matrices,
               const Tensor& x, const std::vector<Tensor>& outputs) {
  require(matrices.size() <= kMaxMatrices, "up to 8 matrices");
  const DenseProduct product(matrices, x, outputs);
  const Turn turn(engine);
  engine.run({static_cast<std::int64_t>(matrices.size()), matrices.data(), product.num_tokens,
              product.in_features, product.type, product.input, product.outputs.data()});
}

void run_groups(DenseEngine& engine, const std::vector<const DenseMatrix*>& matrices,
                const Tensor& x, const Tensor& out) {
  const GroupsProduct product(matrices, x, out);
  const Turn turn(engine);
  engine.run({static_cast<std::int64_t>(matrices.size()), matrices.data(), product.num_tokens,
              product.in_features, product.type, product.input, product.outputs.data(),
              product.token_stride, product.group_stride, product.out_stride});
}

void read_rows(DenseEngine& engine, const DenseMatrix& matrix, const Tensor& numbers,
               const Tensor& out) {
  const RowsCall call = rows_call(matrix, numbers, out);
  const Turn turn(engine);
  engine.read(call);
}

// Bytes from a tensor's first value to the end of its last value.
std::int64_t span_of(const Tensor& x) {
  std::int64_t last = 0;
  for (int dim = 0; dim < x.dims(); ++dim) last += (x.size(dim) - 1) * x.stride(dim);
  return x.count() == 0 ? 0 : (last + 1) * x.element_bytes();
}

// Blocks of a packed matrix. There may be gaps between blocks, but not within them.
struct Blocks {
  std::uint8_t* at = nullptr;
  std::int64_t stride = 0, bytes = 0;

  Blocks() = default;
  Blocks(const Tensor& x, const char* name, std::int64_t count)
      : at(static_cast<std::uint8_t*>(x.data(name, true))),
        stride(x.stride(0) * x.element_bytes()),
        bytes(span_of(x)) {
    std::int64_t inner = 1;
    for (int dim = x.dims() - 1; dim > 0 && inner > 0; inner *= x.size(dim--))
      if (x.size(dim) > 1 && x.stride(dim) != inner) x.refuse(name, "contiguous blocks");
    if (x.size(0) != count || x.element() == Element::kOther)
      x.refuse(name, std::to_string(count) + " blocks of codes or scales");
  }
};

// One tuple per matrix: format, group, padded columns, weight, importance or None, blocks of codes,
// blocks of scales or None.
using Rounding = std::tuple<int, std::int64_t, std::int64_t, Tensor, MaybeTensor, Tensor, MaybeTensor>;

QuantizeCall quantize_call(const Rounding& rounding, bool has_search) {
  const auto& [format, group, cols, weight, importance, words, scales] = rounding;
  weight.require_dims("weight", 2);
  const ValueType type = weight.token_type("weight");
  const std::int64_t blocks = blocks_of(weight.size(0));
  const Blocks data(words, "data", blocks);
  const Blocks shared = scales ? Blocks(*scales, "scales", blocks) : Blocks();
  const QuantizeCall call{require_format(format), group, has_search, weight.size(0), weight.size(1),
                          cols, static_cast<SourceType>(type), weight.data("weight"),
                          weight.stride(0), weight.stride(1),
                          dense_or_null<const float>(importance, "importance", cols),
                          data.at, data.stride, shared.at, shared.stride};
  require_room(call, {span_of(weight), 4 * cols, data.bytes, shared.bytes});
  return call;
}

bool quantize_matrices(const std::string& isa, int num_threads, bool has_search,
                       const std::vector<Rounding>& roundings) {
  std::vector<QuantizeCall> calls;
  for (const Rounding& rounding : roundings) calls.push_back(quantize_call(rounding, has_search));
  const nb::gil_scoped_release release;
  return quantize(calls, isa, num_threads);
}

// (rows, groups) numbers, in the form of Fields.
Numbers numbers_of(const Tensor& x, const char* name) {
  x.require_dims(name, 2);
  const std::int64_t size = x.element_bytes();
  const NumberType type = size == 1 ? NumberType::kByte
                          : x.token_type(name) == ValueType::kFp16 ? NumberType::kFp16
                          : x.token_type(name) == ValueType::kBf16 ? NumberType::kBf16
                                                                   : NumberType::kFp32;
  return {static_cast<const std::uint8_t*>(x.data(name)), type, x.stride(0) * size,
          x.stride(1) * size};
}

// The destination of rows: format, rows, columns, codes, scales, and a factor or None.
using PackedPlace = std::tuple<int, std::int64_t, std::int64_t, Tensor, Tensor, MaybeTensor>;
// Rows of blocks: their kind, their bytes, an order or None, and a table or None.
using BlockRows = std::tuple<int, Tensor, MaybeTensor, MaybeTensor>;
// Rows of fields: words, places, flip, group, repeats, rows per scale, scales, minima or None.
using FieldRows = std::tuple<Tensor, std::int64_t, int, std::int64_t, std::int64_t, std::int64_t,
                             Tensor, MaybeTensor>;

Rearrangement placed(const PackedPlace& place, RearrangementBytes& bytes) {
  const auto& [format, rows, cols, codes, scales, factor] = place;
  require(rows > 0 && rows <= kMostSide, "1 to 2^28 rows");
  const Blocks data(codes, "data", blocks_of(rows)), shared(scales, "scales", blocks_of(rows));
  Rearrangement work{};
  work.format = require_format(format);
  work.rows = rows;
  work.cols = cols;
  work.data = data.at;
  work.data_stride = data.stride;
  work.scales = shared.at;
  work.scale_stride = shared.stride;
  work.factor = dense_or_null<const float>(factor, "factor", 1);
  bytes = {0, 0, data.bytes, shared.bytes, 0, 4, 0, 0};
  return work;
}

Rearrangement blocks_work(const PackedPlace& place, const BlockRows& source) {
  const auto& [kind, rows, order, table] = source;
  RearrangementBytes bytes{};
  Rearrangement work = placed(place, bytes);
  work.kind = static_cast<BlockKind>(kind);
  require(work.kind != BlockKind::kFields, "a kind of blocks other than fields");
  bytes.source = rows.count();
  bytes.order = 8 * work.rows;
  bytes.table = table ? table->count() : 0;
  work.source = rows.dense<const std::uint8_t>("rows", bytes.source);
  work.order = dense_or_null<const std::int64_t>(order, "order", work.rows);
  work.table = dense_or_null<const std::uint8_t>(table, "table", bytes.table);
  require_room(work, bytes);
  return work;
}

Rearrangement fields_work(const PackedPlace& place, const FieldRows& source) {
  const auto& [words, places, flip, group, repeats, scale_rows, scales, minima] = source;
  RearrangementBytes bytes{};
  Rearrangement work = placed(place, bytes);
  const std::int64_t size = words.element_bytes();
  words.require_dims("words", 2);
  if (size != 4 && (size != 1 || (words.size(1) > 1 && words.stride(1) != 1)))
    words.refuse("words", "32-bit words or contiguous bytes");
  bytes.source = span_of(words);
  work.source = static_cast<const std::uint8_t*>(words.data("words"));
  work.fields = {words.stride(0) * size, size == 4 ? words.stride(1) * size : 4,
                 static_cast<std::uint32_t>(places), static_cast<std::uint8_t>(flip), group, repeats,
                 scale_rows, numbers_of(scales, "scales"),
                 minima ? numbers_of(*minima, "minima") : Numbers{}};
  bytes.field_scales = span_of(scales);
  bytes.field_minima = minima ? span_of(*minima) : 0;
  require_room(work, bytes);
  return work;
}

// The lines of a format's grid; empty if it has no grid.
std::vector<std::uint16_t> lines_of_grid(int format) {
  const Grid* grid = encoding(require_format(format)).grid;
  if (grid == nullptr) return {};
  return {grid->lines, grid->lines + (std::size_t{1} << grid->index_bits)};
}

using BlockPlacing = std::pair<PackedPlace, BlockRows>;
using FieldPlacing = std::pair<PackedPlace, FieldRows>;

bool rearrange_rows(int num_threads, const std::vector<BlockPlacing>& blocks,
                    const std::vector<FieldPlacing>& fields) {
  std::vector<Rearrangement> works;
  for (const auto& [place, source] : blocks) works.push_back(blocks_work(place, source));
  for (const auto& [place, source] : fields) works.push_back(fields_work(place, source));
  const nb::gil_scoped_release release;
  return rearrange(works, num_threads);
}

void init_attention(AttentionCall* self, int cache_type, std::int64_t num_heads,
                    std::int64_t num_kv_heads, std::int64_t key_dim, std::int64_t value_dim,
                    float scale, float softcap, std::int64_t window, const MaybeTensor& sinks,
                    bool is_joint) {
  require(cache_type >= 0 && cache_type <= static_cast<int>(KvType::kInt8), "a KV cache type");
  constexpr std::int64_t kMost = 1 << 20;
  require(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0 && key_dim > 0 &&
              value_dim > 0 && num_heads <= kMost && key_dim <= kMost && value_dim <= kMost,
          "as many heads for each KV head, and 1 to 2^20 of them and of their values");
  require(!is_joint || (num_kv_heads == 1 && key_dim == value_dim),
          "keys of one head where they are values, too");
  AttentionCall call{};
  call.is_joint = is_joint;
  call.layout = {static_cast<KvType>(cache_type), key_dim, value_dim};
  call.num_heads = num_heads;
  call.num_kv_heads = num_kv_heads;
  call.scale = scale;
  call.softcap = softcap;
  call.window = window;
  call.sinks = dense_or_null<const float>(sinks, "sinks", num_heads);
  call.num_rows = 0;
  new (self) AttentionCall(call);
}

// Keys and values are (slots, KV heads, blocks, bytes of a block) uint8, in whole chunks. A block
// of joint keys is 16 keys one after the other, and blocks of values have no bytes.
void set_cache(AttentionCall& call, const Tensor& keys, const Tensor& values) {
  const std::int64_t slots = keys.size(0), blocks = keys.size(2);
  const std::int64_t count = slots * call.num_kv_heads * blocks;
  keys.require_dims("keys", 4);
  require(blocks % (kKvChunk / kKvBlock) == 0, "whole chunks of 64 positions");
  call.keys = keys.memory("keys", count * call.key_block_bytes(), true);
  call.values = values.memory("values", count * call.value_block_bytes(), true);
  call.capacity_blocks = blocks;
  call.num_rows = slots;
}

// Keys are (slots, keys, bytes of a key) uint8, one for every `ratio` tokens; each is also its
// value.
void set_compressed(AttentionCall& call, const Tensor& keys, std::int64_t ratio) {
  keys.require_dims("keys", 3);
  require(ratio >= 1 && call.is_joint, "joint keys, and at least one token per compressed key");
  const std::int64_t slots = keys.size(0), capacity = keys.size(1);
  call.compressed = {};
  call.compressed.keys = keys.memory("keys", slots * capacity * call.layout.joint_bytes(), true);
  call.compressed.num_rows = slots;
  call.compressed.capacity = capacity;
  call.compressed.ratio = ratio;
}

// `counts` (slots,) int64: how many of a slot's first positions tokens see besides their window.
void set_always_seen(AttentionCall& call, const Tensor& counts) {
  require(!call.is_joint, "a layer without joint keys");
  call.num_always_seen = counts.count();
  call.always_seen = counts.dense<const std::int64_t>("counts", call.num_always_seen);
}

// Positions are selected in blocks of `block`; `by_head`: each KV head selects for itself.
void set_selection(AttentionCall& call, std::int64_t block, bool by_head) {
  require(block >= 1 && block <= std::int64_t{1} << 30, "1 to 2^30 positions in a block");
  call.selected_block = block;
  call.selected_heads = by_head ? call.num_kv_heads : 1;
}

// Tokens see only their own chunk of this many positions.
void set_chunk(AttentionCall& call, std::int64_t chunk) {
  require(chunk >= 1, "at least one position per chunk");
  call.chunk = chunk;
}

// Profiles (dim, extent and a margin on both sides) of a bias by distance, see `DistanceBias`.
void set_bias(AttentionCall& call, const Tensor& profiles) {
  require(!call.is_joint, "a layer without joint keys");
  profiles.require_dims("profiles", 2);
  call.bias = {{}, nullptr, profiles.size(0), profiles.size(1) - 2 * DistanceBias::kMargin};
  require(call.bias.dim > 0 && call.bias.extent > 0, "at least one distance between the margins");
  call.bias.profiles = profiles.dense<const float>("profiles", call.bias.dim * call.bias.width());
}

void bind_attention(nb::module_& m) {
  // The part of a call that stays the same from step to step, by layer.
  nb::class_<AttentionCall>(m, "AttentionLayer")
      .def("__init__", &init_attention)
      .def_prop_ro("key_block_bytes",
                   [](const AttentionCall& call) { return call.key_block_bytes(); })
      .def_prop_ro("value_block_bytes",
                   [](const AttentionCall& call) { return call.value_block_bytes(); })
      .def("set_cache", &set_cache)
      .def_prop_ro("joint_key_bytes",
                   [](const AttentionCall& call) { return call.layout.joint_bytes(); })
      .def("set_compressed", &set_compressed)
      .def("set_always_seen", &set_always_seen)
      .def("set_selection", &set_selection)
      .def("set_chunk", &set_chunk)
      .def("set_bias", &set_bias);
  nb::class_<AttentionEngine>(m, "AttentionEngine")
      .def("__init__",
           [](AttentionEngine* self, ExpertEngine& engine) {
             new (self) AttentionEngine(engine.pool(), engine.isa());
           },
           nb::keep_alive<1, 2>())
      .def("append",
           [](AttentionEngine& engine, const AttentionCall& layer, const Tensor& slots,
              const Tensor& positions, const Tensor& key, const Tensor& value,
              const MaybeTensor& compressed) {
             AttentionCall call = layer;
             take_new(call, slots, positions, key, value, compressed);
             engine.append(call);
           },
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none() = nb::none())
      .def("attend", [](AttentionEngine& engine, const AttentionCall& layer, const Tensor& slots,
                        const Tensor& positions, const Tensor& query, const MaybeTensor& selected,
                        const Tensor& out, const MaybeTensor& bias_states,
                        const MaybeTensor& sinks) {
        AttentionCall call = layer;
        take_query(call, slots, positions, query, selected, bias_states, sinks, out);
        const Turn turn(engine);
        engine.run(call);
      }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
         nb::arg().none() = nb::none(), nb::arg().none() = nb::none());
}

// `experts` is (experts, bytes of an expert), possibly with gaps between experts. If `slots` is
// given, experts are read from the disk into them; their layer's number there is `number`.
void init_routed(RoutedLayer* self, const ExpertLayout& layout, int activation, float alpha,
                 float limit, float offset, const Tensor& experts, HostSlots* slots,
                 std::int32_t number) {
  const auto* first =
      static_cast<const std::uint8_t*>(experts.strided("experts", Element::kByte, {-1, -1}));
  const std::int64_t bytes = experts.size(1), stride = experts.stride(0);
  if (experts.stride(1) != 1 || (experts.size(0) > 1 && stride < bytes))
    experts.refuse("experts", "contiguous experts that do not overlap");
  require(slots == nullptr || slots->has(number, experts.size(0)), "a layer of these slots");
  require_layout(layout, bytes);
  new (self) RoutedLayer{layout, activation_spec(layout, activation, alpha, limit, offset),
                         experts.size(0), first, bytes, stride, slots, number};
}

void bind_routed(nb::module_& m) {
  nb::class_<RoutedLayer>(m, "RoutedLayer").def("__init__", &init_routed, nb::arg(), nb::arg(), nb::arg(),
                                           nb::arg(), nb::arg(), nb::arg(),
                                           nb::arg().none() = nb::none(), nb::arg() = 0,
                                           nb::keep_alive<1, 8>());
  nb::class_<RoutedExperts>(m, "RoutedExperts")
      .def(nb::init<ExpertEngine&>(), nb::keep_alive<1, 2>())
      .def("run", [](RoutedExperts& self, const RoutedLayer& layer, const Tensor& hidden,
                     const Tensor& index, const Tensor& weights, const Tensor& out) {
        const RoutedCall call = routed_call(layer, hidden, index, weights, out);
        const Turn turn(self);
        return self.run(layer, call);
      });
}

struct RuledSampler {
  TokenSampler sampler;
  SamplingRule rule;
};

// Returns a field of a Python rule; None becomes `neutral`.
template <typename T>
T rule_field(nb::handle rule, const char* name, T neutral) {
  const nb::object value = rule.attr(name);
  return value.is_none() ? neutral : nb::cast<T>(value);
}

// Reads a tandem.generate.sampling.SamplingRule.
SamplingRule sampling_rule(nb::handle rule) {
  return {
      .repetition_penalty = rule_field(rule, "repetition_penalty", 1.0F),
      .temperature = rule_field(rule, "temperature", 0.0F),
      .top_k = rule_field<std::int64_t>(rule, "top_k", 0),
      .top_p = rule_field(rule, "top_p", 1.0F),
      .min_p = rule_field(rule, "min_p", 0.0F),
  };
}

void bind_sampling(nb::module_& m) {
  nb::class_<RuledSampler>(m, "TokenSampler")
      .def(
          "__init__",
          [](RuledSampler* self, const std::string& isa, nb::handle rule) {
            new (self) RuledSampler{TokenSampler(isa), sampling_rule(rule)};
          },
          nb::arg("isa"), nb::arg("rule"))
      .def("choose", [](const RuledSampler& self, const Tensor& logits, const MaybeTensor& seen,
                        double uniform) {
        const std::int64_t vocabulary = logits.count(), num_seen = seen ? seen->count() : 0;
        const ValueType type = logits.value_type("logits");
        const auto* ids = dense_or_null<const std::int64_t>(seen, "seen", num_seen);
        require(vocabulary > 0, "at least one score");
        const TokenScores scores{type, logits.values("logits", type, vocabulary), vocabulary, ids,
                                 num_seen};
        const nb::gil_scoped_release release;
        return self.sampler.choose(self.rule, scores, uniform);
      });
}

}  // namespace

void bind_dense(nb::module_& m) {
  m.def("quantize", &quantize_matrices);
  m.def("block_bytes", [](int kind) { return block_reader(static_cast<BlockKind>(kind)).bytes; });
  m.def("block_cols", [](int kind) { return block_reader(static_cast<BlockKind>(kind)).cols; });
  m.def("grid_lines", &lines_of_grid);
  m.def("rearrange_rows", &rearrange_rows);
  nb::class_<DenseMatrix>(m, "DenseMatrix");
  m.def("make_dense_matrix", &make_matrix);
  nb::class_<DenseEngine>(m, "DenseEngine")
      .def(nb::init<ExpertEngine&>(), nb::keep_alive<1, 2>())
      .def("run", &run_dense)
      .def("run_groups", &run_groups)
      .def("read", &read_rows);
  bind_attention(m);
  bind_routed(m);
  bind_sampling(m);
}

}  // namespace tandem
