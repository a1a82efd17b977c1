// The operand for many tokens: some columns of a tile's row blocks. Codes of eight bits and bf16
// are read in place, all others are decoded once. Integers are split into parts that stay in the
// first-level cache; floats into parts for the second level, from where a tile loads as fast as it
// multiplies.
#pragma once

#include <algorithm>
#include <vector>

#include "weights.hpp"

namespace tandem {
namespace {

constexpr int kMostBlocks = 4;  // per panel

// Columns per row in one register of the panel.
template <Format F>
constexpr std::int64_t kStepColumns = is_integer(F) ? 4 : F == Format::kFp16 ? 1 : 2;

// Whole groups, in 8 KB per block for integers, 32 KB for floats.
template <Format F>
constexpr std::int64_t kPanelSteps = is_integer(F) ? 128 : 512;
template <Format F>
constexpr std::int64_t kPanelColumns = kPanelSteps<F> * kStepColumns<F>;

// Whether the panel is a decoded copy, not the matrix itself.
template <Format F>
constexpr bool kIsDecoded = F == Format::kFp8 || F == Format::kFp16 || kBits<F> < 8;

// Columns after which a tile prefetches a piece of the next panel.
constexpr std::int64_t kPieceColumns = 128;

struct Columns {
  std::int64_t begin, end;

  std::int64_t count() const { return end - begin; }
};

inline const std::uint8_t* codes_at(const PackedMatrix& m, std::int64_t block,
                                    std::int64_t column) {
  return m.data + code_bytes(m.format, block * m.cols + column);
}

inline std::int64_t groups(const PackedMatrix& m, std::int64_t columns) {
  return m.group == 0 ? 0 : columns / m.group;
}

// Row blocks first .. first + count - 1 of a matrix, count <= kMostBlocks.
struct Blocks {
  std::int64_t first;
  int count;
};

// Aligned memory for registers. A thread keeps it for later calls.
template <typename Value>
class Lines {
 public:
  Value* of(std::int64_t lines) {
    if (static_cast<std::int64_t>(memory_.size()) < lines) memory_.resize(lines);
    return memory_.data()->values;
  }

 private:
  struct alignas(64) Line {
    Value values[64 / sizeof(Value)];
  };
  std::vector<Line> memory_;
};

class Panel {
 public:
  // One register per block and step of columns. Blocks beyond the matrix repeat another block;
  // their results are not stored.
  const std::uint8_t* codes[kMostBlocks];

  // 16 rows each.
  const float* scales(std::int64_t group, int block) const { return scales_ + at(group, block); }
  const float* minima(std::int64_t group, int block) const { return minima_ + at(group, block); }

  // Fills the panel for tiles of B blocks.
  template <Format F, int B>
  void fill(const PackedMatrix& m, Blocks blocks, Columns columns) {
    for (int b = 0; b < B; ++b) {
      const std::int64_t block = blocks.first + std::min(b, blocks.count - 1);
      codes[b] = codes_at(m, block, columns.begin);
      if constexpr (kIsDecoded<F>) codes[b] = decoded<F>(codes[b], b, columns.count());
    }
    if constexpr (F != Format::kBf16 && F != Format::kFp16) fill_scales<F>(m, blocks, columns);
  }

 private:
  static std::int64_t at(std::int64_t group, int block) {
    return (group * kMostBlocks + block) * kBlockRows;
  }

  template <Format F>
  const std::uint8_t* decoded(const std::uint8_t* data, int block, std::int64_t columns) {
    constexpr std::int64_t kBlockBytes = kPanelSteps<F> * 64;
    std::uint8_t* start = code_memory_.of(kMostBlocks * kPanelSteps<F>) + block * kBlockBytes;
    const auto put = [&](std::int64_t step, __m512i codes) TANDEM_INLINED {
      _mm512_store_si512(start + step * 64, codes);
    };
    if constexpr (is_integer(F)) {
      for (std::int64_t k = 0; k < columns; k += kStripCols, data += kStripBytes<F>)
        each<kFoursOfStrip>([&](auto j) TANDEM_INLINED {
          put(k / 4 + j, codes_of<Bytes64, F, decltype(j)::value>(data));
        });
    } else if constexpr (F == Format::kFp8) {
      const E4m3Decoder decoder;
      for (std::int64_t k = 0; k < columns; k += 4, data += 64) {
        __m512i w[2];
        decoder.decode(data, w);
        each<2>([&](auto i) TANDEM_INLINED { put(k / 2 + i, w[i]); });
      }
    } else {
      for (std::int64_t k = 0; k < columns; k += 2, data += 64) {
        const __m512i w = _mm512_loadu_si512(data);  // pairs of columns of 16 rows
        put(k, _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(w))));
        const __m256i odd = _mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16));
        put(k + 1, _mm512_castps_si512(_mm512_cvtph_ps(odd)));
      }
    }
    return start;
  }

  template <Format F>
  void fill_scales(const PackedMatrix& m, Blocks blocks, Columns columns) {
    const std::int64_t num_groups = groups(m, kPanelColumns<F>);
    float* scales = scale_memory_.of(kMostBlocks * num_groups);
    float* minima = minimum_memory_.of(kMostBlocks * num_groups);
    for (int b = 0; b < blocks.count; ++b) {
      const std::int64_t first = (blocks.first + b) * groups(m, m.cols) + groups(m, columns.begin);
      for (std::int64_t g = 0; g < groups(m, columns.count()); ++g) {
        _mm512_store_ps(scales + at(g, b), load_scales<F>(m, blocks.first + b, first + g));
        if constexpr (kHasMinima<F>)
          _mm512_store_ps(minima + at(g, b), load_minima<F>(m, blocks.first + b, first + g));
      }
    }
    scales_ = scales;
    minima_ = minima;
  }

  Lines<std::uint8_t> code_memory_;
  Lines<float> scale_memory_, minimum_memory_;
  const float* scales_ = nullptr;
  const float* minima_ = nullptr;
};

// A region that is prefetched in pieces: `num_rows` runs of `bytes`.
class Region {
 public:
  Region(const std::uint8_t* start, std::int64_t stride, std::int64_t bytes, int num_rows,
         std::int64_t pieces)
      : at_(start), stride_(stride), row_lines_((bytes + 63) / 64), left_in_row_(row_lines_),
        rows_(bytes > 0 ? num_rows : 0), piece_(row_lines_ * num_rows / pieces + 1) {}

  // A piece ends at the end of its run.
  TANDEM_INLINE void fetch_piece() {
    if (rows_ == 0) return;
    const std::int64_t count = std::min(piece_, left_in_row_);
    const std::uint8_t* at = at_ + (row_lines_ - left_in_row_) * 64;
    for (std::int64_t i = 0; i < count; ++i)
      _mm_prefetch(reinterpret_cast<const char*>(at + i * 64), _MM_HINT_T1);
    left_in_row_ -= count;
    if (left_in_row_ > 0) return;
    at_ += stride_;
    left_in_row_ = row_lines_;
    --rows_;
  }

 private:
  const std::uint8_t* at_;
  std::int64_t stride_, row_lines_, left_in_row_, rows_, piece_;
};

// Prefetches the next panel's source while this one is multiplied, so that the first tile need not
// wait for memory. Pieces are small, because larger ones would delay the tile's own loads.
class Ahead {
 public:
  template <Format F>
  static Ahead of(const PackedMatrix& m, Blocks blocks, Columns columns, std::int64_t pieces) {
    const std::int64_t first = blocks.first * groups(m, m.cols) + groups(m, columns.begin);
    return {Region(codes_at(m, blocks.first, columns.begin), code_bytes(F, m.cols),
                   code_bytes(F, columns.count()), blocks.count, pieces),
            Region(m.scales + scale_bytes(F, first * m.group, m.group), scale_bytes(F, m.cols, m.group),
                   scale_bytes(F, columns.count(), m.group), blocks.count, pieces)};
  }

  TANDEM_INLINE void fetch_piece() {
    codes_.fetch_piece();
    scales_.fetch_piece();
  }

 private:
  Ahead(Region codes, Region scales) : codes_(codes), scales_(scales) {}

  Region codes_, scales_;
};

}  // namespace
}  // namespace tandem
