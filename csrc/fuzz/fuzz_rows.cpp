// Rows of files with arbitrary bytes and sizes. Those that csrc/sizes.hpp accepts are rearranged
// into packed matrices, in memory of exactly the stated size; weights are quantised, too.
#include <stdexcept>

#include "blocks.hpp"
#include "input.hpp"
#include "quantize.hpp"
#include "sizes.hpp"

namespace {

using namespace tandem;
using fuzz::bounded;
using fuzz::Input;
using Memory = std::unique_ptr<std::uint8_t[]>;
using Index = std::int64_t;

struct Case {
  Format format;
  BlockKind kind;
};

constexpr Case kCases[] = {
    {Format::kInt4, BlockKind::kQ4_0},     {Format::kInt4Zero, BlockKind::kQ4_1},
    {Format::kInt5, BlockKind::kQ5_0},     {Format::kInt5Zero, BlockKind::kQ5_1},
    {Format::kInt8, BlockKind::kQ8_0},     {Format::kMxfp4, BlockKind::kMxfp4},
    {Format::kNvfp4, BlockKind::kNvfp4},   {Format::kIq4Nl, BlockKind::kIq4Nl},
    {Format::kQ2K, BlockKind::kQ2K},       {Format::kQ3K, BlockKind::kQ3K},
    {Format::kQ4K, BlockKind::kQ4K},       {Format::kQ5K, BlockKind::kQ5K},
    {Format::kQ6K, BlockKind::kQ6K},       {Format::kIq4Xs, BlockKind::kIq4Xs},
    {Format::kIq2Xxs, BlockKind::kIq2Xxs}, {Format::kIq2Xs, BlockKind::kIq2Xs},
    {Format::kIq2S, BlockKind::kIq2S},     {Format::kIq3Xxs, BlockKind::kIq3Xxs},
    {Format::kIq3S, BlockKind::kIq3S},     {Format::kIq1S, BlockKind::kIq1S},
    {Format::kIq1M, BlockKind::kIq1M},     {Format::kInt8, BlockKind::kFields},
    {Format::kInt4, BlockKind::kFields},   {Format::kInt4Zero, BlockKind::kFields},
    {Format::kFp8, BlockKind::kFields},    {Format::kMxfp4, BlockKind::kFields},
    {Format::kNvfp4, BlockKind::kFields},
};

Index group_of(Input& input, Format format) {
  const Index own = encoding(format).group;
  return input.about(encoding(format).scale == ScaleKind::kNone ? 0 : own ? own : 32 << input.below(3));
}

Fields fields_of(Input& input, Format format, Index cols) {
  const Index bits = encoding(format).bits, group = group_of(input, format);
  const bool is_shared = bits == 4 && input.below(3) == 0;
  Fields f{};
  f.word_stride = input.about(4);
  f.row_stride = input.about(bounded(cols) * (is_shared ? 32 : bits) / 8);
  f.places = static_cast<std::uint32_t>(is_shared ? input.about(0x73625140) : 0);
  f.flip = input.byte();
  f.group = group;
  f.repeats = input.about(1 + input.below(2));
  f.scale_rows = input.about(format == Format::kFp8 ? 128 : 1);
  const bool has_bytes = format == Format::kMxfp4 || format == Format::kNvfp4;
  const Index type = input.about(has_bytes ? 3 : format == Format::kFp8 ? 2 : input.below(3));
  f.scales.type = static_cast<NumberType>(type & 3);
  const Index size = f.scales.type == NumberType::kByte ? 1 : f.scales.type == NumberType::kFp32 ? 4 : 2;
  f.scales.group_stride = input.about(size);
  const bool is_sane = group > 0 && group < 1 << 20 && cols > 0 && cols < 1 << 20;
  f.scales.row_stride = input.about(size * (is_sane ? (cols + group - 1) / group : 1));
  return f;
}

// The size of a part of a call, or about that.
Index some_bytes(Input& input, Index count, Index stride) {
  const Index right = stride > 0 && count > 0 && count < fuzz::kMostBytes / stride ? count * stride : 64;
  return bounded(input.about(right));
}

void place(Input& input) {
  const Case which = kCases[input.byte() % std::size(kCases)];
  Rearrangement work{};
  work.kind = input.below(16) ? which.kind : static_cast<BlockKind>(input.below(48));
  work.format = input.below(16) ? which.format : static_cast<Format>(input.below(64));
  const BlockReader reader = block_reader(work.kind);
  const bool is_known = static_cast<int>(work.format) < kNumFormats;
  const Format format = is_known ? work.format : which.format;
  work.rows = input.about(1 + input.below(40));
  work.cols = input.about((1 + input.below(4)) * (reader.bytes > 0 ? reader.cols : 32));
  if (work.kind == BlockKind::kFields) work.fields = fields_of(input, format, work.cols);
  const Index own = encoding(format).group ? encoding(format).group : 32;
  const Index group = work.kind == BlockKind::kFields ? work.fields.group : own;
  const bool is_sane = work.cols > 0 && work.cols < 1 << 20 && group > 0 && group < 1 << 20;
  const Index unit = is_sane ? std::max<Index>(32, group) : 32;
  const Index cols = is_sane ? (work.cols + unit - 1) / unit * unit : 32;
  work.data_stride = input.about(code_bytes(format, cols));
  work.scale_stride = input.about(is_sane ? scale_bytes(format, cols, group) : 64);
  const bool has_table = input.below(2) == 0;
  const Index row_bytes = work.kind == BlockKind::kFields ? work.fields.row_stride
                          : is_sane ? work.cols / reader.cols * reader.bytes : 64;
  RearrangementBytes bytes{};
  bytes.source = some_bytes(input, work.rows, row_bytes);
  bytes.data = some_bytes(input, blocks_of(bounded(work.rows)), work.data_stride);
  bytes.scales = some_bytes(input, blocks_of(bounded(work.rows)), work.scale_stride);
  bytes.table = bounded(has_table ? input.about(256) : 0);
  bytes.factor = 4;
  bytes.field_scales = some_bytes(input, work.rows, work.fields.scales.row_stride);
  const Memory data = input.memory(bytes.data), scales = input.memory(bytes.scales);
  const Memory table = input.memory(bytes.table), factor = input.memory(4);
  const Memory numbers = input.memory(bytes.field_scales), source = input.memory(bytes.source);
  work.data = data.get();
  work.scales = scales.get();
  work.table = has_table && work.kind != BlockKind::kFields ? table.get() : nullptr;
  for (Index i = 0; i < bytes.table; ++i) table[i] &= 63;
  work.factor = input.below(2) ? reinterpret_cast<const float*>(factor.get()) : nullptr;
  work.fields.scales.at = numbers.get();
  work.fields.minima = work.fields.scales;
  bytes.field_minima = bytes.field_scales;
  work.source = source.get();
  std::unique_ptr<Index[]> order;
  if (work.kind != BlockKind::kFields && input.below(4) == 0 && work.rows > 0 && work.rows < 1000) {
    order = std::make_unique<Index[]>(static_cast<std::size_t>(work.rows));
    for (Index row = 0; row < work.rows; ++row) order[row] = input.about(input.below(work.rows));
    work.order = order.get();
    bytes.order = 8 * work.rows;
  }
  require_room(work, bytes);
  rearrange({&work, 1}, 1);
}

void round_weights(Input& input) {
  constexpr Format kRounded[] = {Format::kBf16, Format::kFp16, Format::kInt8, Format::kInt4,
                                 Format::kInt4Zero, Format::kMxfp4, Format::kFp8};
  QuantizeCall call{};
  call.format = static_cast<Format>(input.about(static_cast<Index>(kRounded[input.below(7)])));
  const bool is_known = static_cast<int>(call.format) >= 0 && static_cast<int>(call.format) < kNumFormats;
  const Format format = is_known ? call.format : Format::kInt8;
  call.group = group_of(input, format);
  call.has_search = input.below(2);
  call.rows = input.about(1 + input.below(40));
  call.cols = input.about(1 + input.below(200));
  const Index unit = call.group > 0 && call.group < 1 << 20 ? std::max<Index>(32, call.group) : 8;
  const bool is_sane = call.cols > 0 && call.cols < 1 << 20;
  call.padded_cols = input.about(is_sane ? (call.cols + unit - 1) / unit * unit : 32);
  call.type = static_cast<SourceType>(input.below(3));
  const bool is_transposed = input.below(4) == 0;
  call.row_stride = input.about(is_transposed ? 1 : call.cols);
  call.col_stride = input.about(is_transposed ? call.rows : 1);
  const bool is_wide = call.padded_cols > 0 && call.padded_cols < 1 << 20;
  const Index wide = is_wide ? call.padded_cols : 32, group = call.group > 0 ? call.group : 32;
  call.data_stride = input.about(code_bytes(format, wide));
  call.scale_stride = input.about(scale_bytes(format, wide, group));
  QuantizeBytes bytes{};
  const Index size = call.type == SourceType::kFp32 ? 4 : 2;
  bytes.source = some_bytes(input, call.rows, is_sane ? call.cols * size : 64);
  bytes.importance = bounded(input.about(4 * wide));
  bytes.data = some_bytes(input, blocks_of(bounded(call.rows)), call.data_stride);
  bytes.scales = some_bytes(input, blocks_of(bounded(call.rows)), call.scale_stride);
  const Memory source = input.memory(bytes.source), importance = input.memory(bytes.importance);
  const Memory data = input.memory(bytes.data), scales = input.memory(bytes.scales);
  if (input.below(4))  // mostly finite numbers, because others end the work
    for (Index i = 0; i < bytes.source; ++i) source[i] &= 0x3F;
  call.source = source.get();
  call.importance = input.below(2) ? reinterpret_cast<const float*>(importance.get()) : nullptr;
  call.data = data.get();
  call.scales = scales.get();
  require_room(call, bytes);
  constexpr const char* kIsas[] = {"portable", "avx2", "avx512"};
  const std::vector<std::string> here = available_isas();
  const std::string isa = kIsas[input.below(3)];
  quantize({&call, 1}, std::find(here.begin(), here.end(), isa) == here.end() ? "portable" : isa, 1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  try {
    input.below(4) ? place(input) : round_weights(input);
  } catch (const std::invalid_argument&) {  // refused
  }
  return 0;
}
