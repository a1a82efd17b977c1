#include "sizes.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <variant>

namespace tandem {
namespace {

using Index = std::int64_t;

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

void require(bool is_met, const std::string& name, Index found, const std::string& expected) {
  if (!is_met) refuse(name + " is " + std::to_string(found) + ", expected " + expected);
}

void require_side(const char* name, Index size) {
  require(size > 0 && size <= kMostSide, name, size, "1 to 2^28");
}

// Requires that `at` .. `at + needed - 1` is within `bytes` bytes.
void require_part(const char* name, Index at, Index needed, Index bytes) {
  if (at < 0 || needed > bytes || at > bytes - needed)
    refuse(std::string(name) + " has " + std::to_string(bytes) + " bytes, expected " +
           std::to_string(needed) + " from byte " + std::to_string(at) + " on");
}

// Requires room for `count` parts of `part` bytes, `stride` apart.
void require_parts(const char* name, Index count, Index stride, Index part, Index bytes) {
  if (count <= 1) return require_part(name, 0, count * part, bytes);
  require(stride >= 0 && stride <= bytes / (count - 1), std::string("the stride of ") + name, stride,
          "0 to " + std::to_string(bytes / (count - 1)));
  require_part(name, (count - 1) * stride, part, bytes);
}

void require_projection(const char* name, const ProjectionLayout& projection, Index rows,
                        Index inputs, Index expert_bytes) {
  const Format format = require_format(projection.format);
  require_columns(format, projection.group, projection.cols);
  require(projection.cols >= inputs, std::string("the columns of ") + name, projection.cols,
          "at least its inputs, " + std::to_string(inputs));
  for (const Index at : {projection.data, projection.scales, std::max<Index>(projection.bias, 0)})
    require(at % 4 == 0, std::string("the offset of a part of ") + name, at, "a multiple of 4");
  const Index blocks = blocks_of(rows);
  require_part(name, projection.data, blocks * code_bytes(format, projection.cols), expert_bytes);
  const Index scales = blocks * scale_bytes(format, projection.cols, projection.group);
  require_part(name, projection.scales, scales, expert_bytes);  // also if there are none
  if (projection.bias >= 0) require_part(name, projection.bias, blocks * kBlockRows * 4, expert_bytes);
}

Index bytes_of(ScaleKind kind) {
  return kind == ScaleKind::kFp16 ? 2 : kind == ScaleKind::kFp32OfBlock ? 4 : 1;
}

// Whether a format can store what this kind of block is read as.
bool can_hold(Format format, const BlockReader& reader) {
  const Encoding& e = encoding(format);
  if (const auto* lines = std::get_if<ReadBlock<Lines>>(&reader.read); lines != nullptr)
    return is_grid(format) && reader.bytes == 2 * (e.grid->factor.width == 0) + 4 * e.grid->words;
  if (std::holds_alternative<ReadBlock<Super>>(reader.read))
    return has_supers(format) && !is_grid(format);
  if (std::holds_alternative<ReadBlock<Sixteens>>(reader.read))
    return e.scale == ScaleKind::kE4m3OfRow;
  return (e.scale == ScaleKind::kFp16 || e.scale == ScaleKind::kE8m0) &&
         (e.group == 0 || e.group == kStripCols);
}

void require_numbers(const char* name, const Rearrangement& work, const Numbers& numbers,
                     Index bytes) {
  const Fields& f = work.fields;
  const Index size = numbers.type == NumberType::kByte   ? 1
                     : numbers.type == NumberType::kFp32 ? 4
                                                         : 2;
  const ScaleKind kind = encoding(work.format).scale;
  require((size == 1) == (bytes_of(kind) == 1), std::string("the type of ") + name, size,
          "a type of the format's scales");
  const Index num_scales = kind == ScaleKind::kFp32OfBlock ? 1 : kBlockRows;
  Index last_row = 0;  // of those that blocks read
  for (const Index block : {Index{0}, blocks_of(work.rows) - 1}) {
    const Index first = block * kBlockRows;
    last_row =
        std::max(last_row, first / f.scale_rows + std::min(num_scales, work.rows - first) - 1);
  }
  // Blocks in the middle read all scales, the last one perhaps only a few.
  if (work.rows > kBlockRows)
    last_row =
        std::max(last_row, (blocks_of(work.rows) - 2) * kBlockRows / f.scale_rows + num_scales - 1);
  const Index last_group = ((work.cols + f.group - 1) / f.group - 1) / f.repeats;
  require_parts(name, last_group + 1, numbers.group_stride, size, bytes);
  require_parts(name, last_row + 1, numbers.row_stride, last_group * numbers.group_stride + size,
                bytes);
}

void require_fields(const Rearrangement& work, const RearrangementBytes& bytes) {
  const Fields& f = work.fields;
  const Encoding& e = encoding(work.format);
  require((e.bits == 4 || e.bits == 8) && !has_supers(work.format), "the format",
          static_cast<Index>(work.format), "one of whole nibbles or bytes without super-blocks");
  require(work.order == nullptr && work.table == nullptr,
          "the number of tables and orders for fields", 1, "0");
  require(work.cols % (32 / e.bits) == 0, "columns", work.cols,
          "a multiple of " + std::to_string(32 / e.bits));
  require(f.repeats > 0 && f.scale_rows > 0, "repeats or rows of a scale",
          std::min(f.repeats, f.scale_rows), "at least 1");
  if (f.places != 0) {
    require(e.bits == 4 && (f.places & 0x88888888u) == 0 && work.rows % 8 == 0, "places", f.places,
            "eight of 0 to 7 for eight rows of 4 bits");
    require_parts("source", work.cols, f.word_stride, 4, bytes.source);
    require_parts("source", work.rows / 8, f.row_stride, (work.cols - 1) * f.word_stride + 4,
                  bytes.source);
  } else {
    const Index words = work.cols * e.bits / 32;
    require_parts("source", words, f.word_stride, 4, bytes.source);
    require_parts("source", work.rows, f.row_stride, (words - 1) * f.word_stride + 4, bytes.source);
  }
  require_numbers("scales", work, f.scales, bytes.field_scales);
  if (e.has_minima) require_numbers("minima", work, f.minima, bytes.field_minima);
}

void require_blocks(const Rearrangement& work, const RearrangementBytes& bytes) {
  const BlockReader reader = block_reader(work.kind);
  require(reader.bytes > 0, "the kind of blocks", static_cast<Index>(work.kind), "a known one");
  require(can_hold(work.format, reader), "the format", static_cast<Index>(work.format),
          "one that can hold such blocks");
  require(work.cols % reader.cols == 0, "columns", work.cols,
          "whole blocks of " + std::to_string(reader.cols));
  const Index row_bytes = work.cols / reader.cols * reader.bytes;
  Index rows = work.rows;
  if (work.order != nullptr) {
    require_part("order", 0, work.rows * 8, bytes.order);
    const auto [least, most] = std::minmax_element(work.order, work.order + work.rows);
    require(*least >= 0 && *most <= kMostSide, "a row of order", *least < 0 ? *least : *most,
            "0 to 2^28");
    rows = *most + 1;
  }
  require_part("source", 0, rows * row_bytes, bytes.source);
  const bool has_lines = std::holds_alternative<ReadBlock<Lines>>(reader.read);
  require(!has_lines || work.table == nullptr, "the number of tables for lines", 1, "0");
  if (work.table != nullptr) require_part("table", 0, 256, bytes.table);
}

}  // namespace

Format require_format(std::int64_t number) {
  require(number >= 0 && number < kNumFormats, "the format", number,
          "0 to " + std::to_string(kNumFormats - 1));
  return static_cast<Format>(number);
}

void require_columns(Format format, std::int64_t group, std::int64_t cols) {
  const Encoding& e = encoding(format);
  require_side("columns", cols);
  if (e.scale == ScaleKind::kNone) {
    require(group == 0, "the group", group, "0");
  } else if (e.group != 0) {
    require(group == e.group, "the group", group, std::to_string(e.group));
  } else {
    require(group > 0 && group % kStripCols == 0, "the group", group, "a multiple of 32");
  }
  const Index unit = has_supers(format) ? kSuperCols : group == 0 ? 8 : std::max(group, kStripCols);
  require(cols % unit == 0, "columns", cols, "a multiple of " + std::to_string(unit));
}

void require_layout(const ExpertLayout& layout, std::int64_t expert_bytes) {
  require_side("the hidden size", layout.hidden_size);
  require_side("inner rows", layout.inner_rows);
  require(expert_bytes % 4 == 0, "an expert's bytes", expert_bytes, "a multiple of 4");
  require(layout.inner_rows % kBlockRows == 0, "inner rows", layout.inner_rows, "whole blocks of 16");
  const Index up_rows = layout.inner_rows * (layout.is_gated ? 2 : 1);
  require_projection("the first matrix", layout.up, up_rows, layout.hidden_size, expert_bytes);
  require_projection("the second matrix", layout.down, layout.hidden_size, 1, expert_bytes);
  // The first projection gives whole blocks; the second may skip only padding.
  require(layout.down.cols > layout.inner_rows - kBlockRows, "the columns of the second matrix",
          layout.down.cols, "more than " + std::to_string(layout.inner_rows - kBlockRows));
}

void require_room(const Rearrangement& work, const RearrangementBytes& bytes) {
  require_format(static_cast<Index>(work.format));
  require_side("rows", work.rows);
  require_side("columns", work.cols);
  const bool is_fields = work.kind == BlockKind::kFields;
  const Encoding& e = encoding(work.format);
  const Index own = e.group == 0 ? kStripCols : e.group;
  const Index group = is_fields ? work.fields.group : own;
  require(group > 0 && group <= kMostSide, "the group", group, "1 to 2^28");
  const Index unit = std::max(kStripCols, group);
  const Index cols = is_fields ? (work.cols + unit - 1) / unit * unit : work.cols;
  is_fields ? require_fields(work, bytes) : require_blocks(work, bytes);
  require_columns(work.format, group, cols);
  const Index blocks = blocks_of(work.rows);
  require_parts("data", blocks, work.data_stride, code_bytes(work.format, cols), bytes.data);
  const Index scales = scale_bytes(work.format, cols, group);
  if (scales > 0) require_parts("scales", blocks, work.scale_stride, scales, bytes.scales);
  if (work.factor != nullptr) require_part("the factor", 0, 4, bytes.factor);
}

void require_room(const QuantizeCall& call, const QuantizeBytes& bytes) {
  require_format(static_cast<Index>(call.format));
  require_side("rows", call.rows);
  require_side("columns", call.cols);
  require_columns(call.format, call.group, call.padded_cols);
  const Encoding& e = encoding(call.format);
  constexpr Index kWidestGroup = 128;
  const bool is_rounded = call.format != Format::kNvfp4 && e.table != kIq1Table;
  require(is_rounded && call.group <= kWidestGroup, "the format", static_cast<Index>(call.format),
          "one that weights can be rounded to");
  require(call.padded_cols >= call.cols, "padded columns", call.padded_cols,
          "at least " + std::to_string(call.cols));
  const Index size = call.type == SourceType::kFp32 ? 4 : 2;
  // In values.
  require_parts("source", call.cols, call.col_stride, 1, bytes.source / size);
  require_parts("source", call.rows, call.row_stride, (call.cols - 1) * call.col_stride + 1,
                bytes.source / size);
  if (call.importance != nullptr)
    require_part("importance", 0, call.padded_cols * 4, bytes.importance);
  const Index blocks = blocks_of(call.rows);
  require_parts("data", blocks, call.data_stride, code_bytes(call.format, call.padded_cols),
                bytes.data);
  const Index scales = scale_bytes(call.format, call.padded_cols, call.group);
  const auto at = static_cast<Index>(reinterpret_cast<std::uintptr_t>(call.scales) % 2);
  require(call.scale_stride % 2 == 0 && at == 0, "the stride of scales", call.scale_stride,
          "a multiple of 2, and an even address");  // they are written as halves
  if (scales > 0) require_parts("scales", blocks, call.scale_stride, scales, bytes.scales);
}

}  // namespace tandem
