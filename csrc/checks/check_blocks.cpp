// Rearranges random bytes in every kind of block, and fields of bits, into packed matrices. Buffers
// are exactly as large as the calls say, so that the sanitizers find accesses outside. Rows in
// another order must give the same result.
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <vector>

#include "blocks.hpp"
#include "random.hpp"

namespace {

using tandem::BlockKind;
using tandem::Format;
using tandem::NumberType;
using tandem::Rearrangement;
using tandem::checks::Random;
using Bytes = std::vector<std::uint8_t>;
using Index = std::int64_t;

struct Case {
  Format format;
  BlockKind kind;
  Index table_bytes = 0;
};

constexpr Case kBlocks[] = {
    {Format::kInt4, BlockKind::kQ4_0},       {Format::kInt4Zero, BlockKind::kQ4_1},
    {Format::kInt5, BlockKind::kQ5_0},       {Format::kInt5Zero, BlockKind::kQ5_1},
    {Format::kInt8, BlockKind::kQ8_0},       {Format::kMxfp4, BlockKind::kMxfp4},
    {Format::kNvfp4, BlockKind::kNvfp4},     {Format::kIq4Nl, BlockKind::kIq4Nl},
    {Format::kInt8, BlockKind::kIq4Nl, 256}, {Format::kQ2K, BlockKind::kQ2K},
    {Format::kQ3K, BlockKind::kQ3K},         {Format::kQ6K, BlockKind::kQ3K, 256},
    {Format::kQ4K, BlockKind::kQ4K},         {Format::kQ5K, BlockKind::kQ4K},
    {Format::kQ5K, BlockKind::kQ5K},         {Format::kQ6K, BlockKind::kQ6K},
    {Format::kIq4Xs, BlockKind::kIq4Xs},     {Format::kIq2Xxs, BlockKind::kIq2Xxs},
    {Format::kIq2Xs, BlockKind::kIq2Xs},     {Format::kIq2S, BlockKind::kIq2S},
    {Format::kIq3Xxs, BlockKind::kIq3Xxs},   {Format::kIq3S, BlockKind::kIq3S},
    {Format::kIq1S, BlockKind::kIq1S},       {Format::kIq1M, BlockKind::kIq1M},
};

Bytes drawn(Random& random, Index count, Index most) {
  Bytes bytes(static_cast<std::size_t>(count));
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random.between(0, most));
  return bytes;
}

// A packed matrix with exactly the bytes that a call needs.
struct Packed {
  Bytes data, scales;

  Packed(Rearrangement& work, Index cols, Index group) {
    const Index blocks = (work.rows + 15) / 16;
    work.data_stride = tandem::code_bytes(work.format, cols);
    work.scale_stride = tandem::scale_bytes(work.format, cols, group);
    data.resize(static_cast<std::size_t>(blocks * work.data_stride));
    scales.resize(static_cast<std::size_t>(blocks * work.scale_stride));
    work.data = data.data();
    work.scales = scales.data();
  }
};

bool blocks_are_placed(Random& random, const Case& which) {
  const auto reader = tandem::block_reader(which.kind);
  const Index rows = random.between(1, 50), cols = random.between(1, 4) * reader.cols;
  const Index row_bytes = cols / reader.cols * reader.bytes;
  const Bytes source = drawn(random, rows * row_bytes, 100);  // factors that are finite
  const Bytes table = drawn(random, which.table_bytes, 3);
  std::vector<Index> order(static_cast<std::size_t>(rows));
  std::iota(order.begin(), order.end(), 0);
  Rearrangement work{};
  work.format = which.format;
  work.kind = which.kind;
  work.source = source.data();
  work.rows = rows;
  work.cols = cols;
  work.table = table.empty() ? nullptr : table.data();
  const Index own = tandem::encoding(which.format).group, group = own == 0 ? 32 : own;
  const Packed first(work, cols, group);
  if (!tandem::rearrange({&work, 1}, 2)) return false;
  std::reverse(order.begin(), order.end());
  Bytes turned;
  for (Index row = rows; row-- > 0;)
    turned.insert(turned.end(), source.begin() + row * row_bytes,
                  source.begin() + (row + 1) * row_bytes);
  work.source = turned.data();
  work.order = order.data();
  const Packed second(work, cols, group);
  return tandem::rearrange({&work, 1}, 2) && first.data == second.data &&
         first.scales == second.scales;
}

// Fields of `format`'s codes: one row per word, or eight rows that share words.
bool fields_are_placed(Random& random, Format format, Index group, bool is_shared) {
  const Index rows = is_shared ? 8 * random.between(1, 6) : random.between(1, 50);
  const Index cols = 32 * random.between(1, 9), width = std::max<Index>(32, group);
  const Index groups = (cols + group - 1) / group;
  const Bytes source = drawn(random, rows * cols * tandem::encoding(format).bits / 8, 100);
  const Bytes scales = drawn(random, rows * groups * 4, 100);
  Rearrangement work{};
  work.format = format;
  work.source = source.data();
  work.rows = rows;
  work.cols = cols;
  work.fields.row_stride = is_shared ? 4 * cols : cols * tandem::encoding(format).bits / 8;
  work.fields.word_stride = 4;
  work.fields.places = is_shared ? 0x73625140 : 0;
  work.fields.group = group;
  work.fields.repeats = 1;
  work.fields.scale_rows = format == Format::kFp8 ? 128 : 1;
  const bool has_bytes = format == Format::kMxfp4 || format == Format::kNvfp4;
  const Index size = has_bytes ? 1 : format == Format::kFp8 ? 4 : 2;
  const auto other = size == 4 ? NumberType::kFp32 : NumberType::kFp16;
  const auto type = has_bytes ? NumberType::kByte : other;
  work.fields.scales = {scales.data(), type, groups * size, size};
  work.fields.minima = work.fields.scales;
  const Packed packed(work, (cols + width - 1) / width * width, group);
  return tandem::rearrange({&work, 1}, 2);
}

}  // namespace

int main() {
  Random random(11);
  for (int round = 0; round < 10; ++round) {
    for (const Case& which : kBlocks)
      if (!blocks_are_placed(random, which)) {
        std::printf("kind %d: wrong in round %d\n", static_cast<int>(which.kind), round);
        return 1;
      }
    const bool is_well =
        fields_are_placed(random, Format::kInt4, 128, false) &&
        fields_are_placed(random, Format::kInt4Zero, 32, true) &&
        fields_are_placed(random, Format::kInt8, 64, false) &&
        fields_are_placed(random, Format::kFp8, 128, false) &&
        fields_are_placed(random, Format::kMxfp4, 32, false) &&
        fields_are_placed(random, Format::kNvfp4, 16, false);
    if (!is_well) {
      std::printf("fields: wrong in round %d\n", round);
      return 1;
    }
  }
  std::puts("rows of files: every kind is placed, and in any order");
  return 0;
}
