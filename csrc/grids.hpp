// Formats whose codes are lines of a grid: llama.cpp's IQ1, IQ2 and IQ3. Their packed matrices keep
// the words of the file's blocks, interleaved for the 16 rows of a block.
#pragma once

#include <cstdint>

namespace tandem {

// Numbers in a row's words of 256 columns. The i-th number begins at bit
// base + i / 4 * fours + i % 4 * step; no number is split between two words.
struct BitField {
  int base = 0, fours = 0, step = 0, width = 0;

  constexpr int at(int i) const { return base + i / 4 * fours + i % 4 * step; }
};

// Signs of eight columns: one for all; seven, and an eighth that makes the number of minus signs
// even; or eight.
enum class Signs { kOne = 1, kEven = 7, kEight = 8 };

// The layout of a row's words: fields by line, by eight columns, and by group.
struct Grid {
  const std::uint16_t* lines;  // 16 / line_cols bits per number, see Encoding::table
  int index_bits;  // of a line's number
  int line_cols;  // 4 or 8
  int words;  // per 256 columns
  BitField low, high;  // of a line's number: the low eight bits, and the bits above
  BitField signs;
  BitField scales;  // a scale is twice the number plus one
  BitField factor = {};  // IQ1_M's: four parts of a half, lowest first

  constexpr Signs sign_kind() const { return static_cast<Signs>(signs.width); }
  constexpr int line_bits() const { return 16 / line_cols; }
};

extern const std::uint16_t kIq1Lines[2048], kIq2XxsLines[256], kIq2XsLines[512], kIq2SLines[1024],
    kIq3XxsLines[256], kIq3SLines[512];

constexpr Grid kIq1S{kIq1Lines,       11, 8, 12, {0, 32, 8, 8}, {256, 16, 3, 3}, {271, 16, 0, 1},
                     {268, 64, 16, 3}};
constexpr Grid kIq1M{
    kIq1Lines,       11, 8, 14, {0, 32, 8, 8}, {256, 16, 4, 3}, {259, 16, 4, 1}, {384, 16, 3, 3},
    {396, 64, 16, 4}};
constexpr Grid kIq2Xxs{kIq2XxsLines, 8, 8, 16, {0, 64, 8, 8}, {}, {32, 64, 7, 7}, {60, 256, 64, 4}};
constexpr Grid kIq2Xs{kIq2XsLines,    9, 8, 18, {0, 64, 16, 8}, {8, 64, 16, 1}, {9, 64, 16, 7},
                      {512, 16, 4, 4}};
constexpr Grid kIq2S{kIq2SLines,     10, 8, 20, {0, 32, 8, 8}, {512, 8, 2, 2}, {256, 32, 8, 8},
                     {576, 16, 4, 4}};
constexpr Grid kIq3Xxs{kIq3XxsLines,     8, 4, 24, {0, 32, 8, 8}, {}, {512, 32, 7, 7},
                       {540, 128, 32, 4}};
constexpr Grid kIq3S{kIq3SLines,     9, 4, 27, {0, 32, 8, 8}, {512, 4, 1, 1}, {576, 32, 8, 8},
                     {832, 16, 4, 4}};

}  // namespace tandem
