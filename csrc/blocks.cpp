#include "blocks.hpp"

#include <algorithm>
#include <type_traits>
#include <variant>

#include "pieces.hpp"

namespace tandem {
namespace {

std::int64_t source_row_bytes(const Rearrangement& work) {
  const BlockReader reader = block_reader(work.kind);
  return work.cols / reader.cols * reader.bytes;
}

// Writes 16 rows, one `Row` of columns at a time; returns false if a scale is not finite.
template <class Row>
bool rearrange_rows(const Rearrangement& work, std::int64_t block, std::int64_t block_bytes,
                    ReadBlock<Row> read) {
  const Encoding& e = encoding(work.format);
  Row rows[kBlockRows];
  const std::int64_t cols = Row::kCols, steps = work.cols / cols;
  const std::int64_t group = e.group == 0 ? cols : e.group;
  std::uint8_t* data = work.data + block * work.data_stride;
  std::uint8_t* scales = work.scales + block * work.scale_stride;
  std::int64_t step_bytes = scale_bytes(work.format, cols, group);
  bool is_whole = true;
  if (e.scale == ScaleKind::kE4m3OfRow) {
    is_whole = write_factors(work, block, scales);
    scales += kRowFactorBytes;
    step_bytes -= kRowFactorBytes;
  }
  for (std::int64_t s = 0; s < steps; ++s) {
    for (std::int64_t r = 0; r < kBlockRows; ++r) {
      const std::int64_t row = block * kBlockRows + r;
      if (row >= work.rows) {
        rows[r] = padding<Row>(e);
        continue;
      }
      const std::int64_t from = work.order ? work.order[row] : row;
      read(work.source + (from * steps + s) * block_bytes, rows[r]);
      if constexpr (!std::is_same_v<Row, Lines>)
        if (work.table != nullptr)
          for (std::uint8_t& code : rows[r].codes) code = work.table[code];
      is_whole &= are_finite(rows[r], e);
    }
    write_codes(rows, e, data + s * code_bytes(work.format, cols));
    write_scales(rows, e, scales + s * step_bytes);
  }
  return is_whole;
}

bool rearrange_block(const Rearrangement& work, std::int64_t block) {
  if (work.kind == BlockKind::kFields) return rearrange_fields(work, block);
  const BlockReader reader = block_reader(work.kind);
  return std::visit(
      [&](auto read) { return rearrange_rows(work, block, reader.bytes, read); }, reader.read);
}

// The extent of all rows of a source.
Extent whole_source(const Rearrangement& work) {
  const Fields& f = work.fields;
  if (work.kind != BlockKind::kFields) return {work.source, work.rows * source_row_bytes(work)};
  const std::int64_t per_word = 32 / encoding(work.format).bits;
  const std::int64_t rows = f.places == 0 ? work.rows : work.rows / per_word;
  const std::int64_t words = f.places == 0 ? (work.cols + per_word - 1) / per_word : work.cols;
  return {work.source, (rows - 1) * f.row_stride + (words - 1) * f.word_stride + 4};
}

// The extent of a piece's rows; if they are not consecutive, that of all rows.
Extent source_of(const Piece<Rearrangement>& piece) {
  const Rearrangement& work = *piece.call;
  const bool is_fields = work.kind == BlockKind::kFields;
  const std::int64_t row_bytes = is_fields ? work.fields.row_stride : source_row_bytes(work);
  if (work.order != nullptr || (is_fields && work.fields.word_stride != 4))
    return whole_source(work);
  const std::int64_t first = piece.first * kBlockRows;
  const std::int64_t count = std::min(work.rows - first, piece.count * kBlockRows);
  return {work.source + first * row_bytes, count * row_bytes};
}

}  // namespace

bool rearrange(std::span<const Rearrangement> works, int num_threads) {
  return do_pieces(works, num_threads, source_of, rearrange_block);
}

}  // namespace tandem
