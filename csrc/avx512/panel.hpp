// What many tokens are multiplied with: some columns of four row blocks, ready for the multiplier.
// Integers and bf16 are read where they lie. They stay in the second-level cache, from where a tile
// loads as fast as it multiplies, and codes of four bits are taken apart beside the products. FP8
// and fp16 are decoded once into memory that stays in that cache as well.
#pragma once

#include <algorithm>
#include <vector>

#include "weights.hpp"

namespace tandem {
namespace {

constexpr int kPanelBlocks = 4;

// What one register of the panel holds of each row.
template <Format F>
constexpr std::int64_t kStepColumns = is_integer(F)         ? kLineColumns<F>
                                      : F == Format::kFp16 ? 1
                                                           : 2;

// Whole groups; up to 32 KB of each block.
constexpr std::int64_t kDecodedSteps = 512;
template <Format F>
constexpr std::int64_t kPanelColumns = is_integer(F) ? 2048 : kDecodedSteps * kStepColumns<F>;

// The groups that come here.
constexpr std::int64_t kTileGroup = 128;

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

// Row blocks first .. first + count - 1 of a matrix, count <= kPanelBlocks.
struct Blocks {
  std::int64_t first;
  int count;
};

// Registers want their memory aligned; what a thread once needed it keeps.
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
  // One register per block and step of columns. Blocks that the matrix has not are those of
  // another: whoever stores results leaves them out.
  const std::uint8_t* codes[kPanelBlocks];

  // 16 rows each.
  const float* scales(std::int64_t group, int block) const { return scales_ + at(group, block); }
  const float* minima(std::int64_t group, int block) const { return minima_ + at(group, block); }

  template <Format F>
  void fill(const PackedMatrix& m, Blocks blocks, Columns columns) {
    for (int b = 0; b < kPanelBlocks; ++b) {
      const std::int64_t block = blocks.first + std::min(b, blocks.count - 1);
      codes[b] = codes_at(m, block, columns.begin);
      if constexpr (F == Format::kFp8 || F == Format::kFp16)
        codes[b] = decoded<F>(codes[b], b, columns.count());
    }
    if constexpr (F != Format::kBf16 && F != Format::kFp16) fill_scales<F>(m, blocks, columns);
  }

 private:
  static std::int64_t at(std::int64_t group, int block) {
    return (group * kPanelBlocks + block) * kBlockRows;
  }

  template <Format F>
  const std::uint8_t* decoded(const std::uint8_t* data, int block, std::int64_t columns) {
    constexpr std::int64_t kBlockBytes = kDecodedSteps * 64;
    std::uint8_t* start = code_memory_.of(kPanelBlocks * kDecodedSteps) + block * kBlockBytes;
    const auto put = [&](std::int64_t step, __m512i codes) TANDEM_INLINED {
      _mm512_store_si512(start + step * 64, codes);
    };
    if constexpr (F == Format::kFp8) {
      const E4m3Decoder decoder;
      for (std::int64_t k = 0; k < columns; k += 4, data += 64) {
        __m512i w[2];
        decoder.decode(data, w);
        each<2>([&](auto i) TANDEM_INLINED { put(k / 2 + i, w[i]); });
      }
    } else {
      for (std::int64_t k = 0; k < columns; k += 2, data += 64) {
        const __m512i w = _mm512_loadu_si512(data);  // 16 pairs of two columns
        put(k, _mm512_castps_si512(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(w))));
        const __m256i odd = _mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16));
        put(k + 1, _mm512_castps_si512(_mm512_cvtph_ps(odd)));
      }
    }
    return start;
  }

  template <Format F>
  void fill_scales(const PackedMatrix& m, Blocks blocks, Columns columns) {
    constexpr std::int64_t kGroups = kPanelColumns<F> / kTileGroup;
    float* scales = scale_memory_.of(kPanelBlocks * kGroups);
    float* minima = minimum_memory_.of(kPanelBlocks * kGroups);
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

// A region of memory that is fetched into the cache piece by piece: `num_rows` runs of `bytes`.
class Region {
 public:
  Region(const std::uint8_t* start, std::int64_t stride, std::int64_t bytes, int num_rows,
         std::int64_t pieces)
      : at_(start), stride_(stride), bytes_(bytes), left_(num_rows * bytes),
        piece_(left_ / pieces + 64) {}

  TANDEM_INLINE void fetch_piece() {
    for (const std::int64_t stop = std::max<std::int64_t>(0, left_ - piece_); left_ > stop;
         left_ -= 64) {
      _mm_prefetch(reinterpret_cast<const char*>(at_ + done_), _MM_HINT_T1);
      done_ += 64;
      if (done_ >= bytes_) {
        done_ = 0;
        at_ += stride_;
      }
    }
  }

 private:
  const std::uint8_t* at_;
  std::int64_t stride_, bytes_, left_, piece_, done_ = 0;
};

// What the next panel is made of, fetched while this one is multiplied: the first tile would else
// wait for memory. In small pieces: more at once would keep the tile's own loads waiting.
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
