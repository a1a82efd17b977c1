// One block of 16 rows in the registers of one instruction set; included after quantize_values.inl.
// A lane is a row: sums run along the columns, and a register holds one dword of codes per row.

// A group, for a part of a block's rows.
struct Group {
  const Vector* tile;
  std::int64_t size;
  const float* importance;  // (size,) or null
  Vector low, high;

  // The value of the largest magnitude, with its sign.
  Vector peak() const { return high > -low ? high : low; }
  Vector weighed(Vector x, std::int64_t c) const { return importance ? x * importance[c] : x; }
};

// Returns false if a weight is not finite.
bool find_extremes(Group& group) {
  Vector low = group.tile[0], high = low;
  Integers largest{};
  for (std::int64_t c = 0; c < group.size; ++c) {
    const Vector x = group.tile[c];
    const Integers size = bits_of(x) & 0x7FFFFFFF;
    low = smaller(x, low);
    high = larger(x, high);
    largest = size > largest ? size : largest;
  }
  group.low = low;
  group.high = high;
  return !any(largest >= kInfinity);
}

// Writes codes of 8 or 16 bits into the dwords of a part's rows, column by column; `out` is the
// part's position in the first dword.
template <int kBits, typename CodeOf>
inline void write_codes(std::uint8_t* out, std::int64_t count, const CodeOf& code_of) {
  constexpr int kColumns = 32 / kBits;
  for (std::int64_t c = 0; c < count; c += kColumns, out += 4 * kBlockRows) {
    Integers word{};
    for (int i = 0; i < kColumns; ++i) word |= code_of(c + i) << (kBits * i);
    std::memcpy(out, &word, sizeof word);
  }
}

// The same for 2 to 6 bits: strips of 32 columns, each in planes of 4, 2 and 1 bits, lowest first.
// The columns of a byte in a plane are four apart.
template <int kBits, typename CodeOf>
inline void write_planes(std::uint8_t* out, std::int64_t count, const CodeOf& code_of) {
  for (std::int64_t c = 0; c < count; c += kStripCols) {
    Integers codes[kStripCols];
    for (int i = 0; i < kStripCols; ++i) codes[i] = code_of(c + i);
    int first = 0;
    for (const int width : {4, 2, 1}) {
      if (!(kBits & width)) continue;
      for (int begin = 0; begin < kStripCols; begin += 32 / width, out += 4 * kBlockRows) {
        Integers word{};
        for (int i = 0; i < 32 / width; ++i)
          word |= ((codes[begin + i] >> first) & ((1 << width) - 1)) << (8 * (i % 4) + i / 4 * width);
        std::memcpy(out, &word, sizeof word);
      }
      first += width;
    }
  }
}

constexpr int kPeaks = 8;

struct SymmetricRule {
  float peaks[kPeaks];  // candidates of the code to which a group's peak is scaled
  float low, high;
};

constexpr SymmetricRule symmetric_rule(int bits) {
  switch (bits) {
    case 3: return {{3.0f, -3.6f, -4.0f, -4.5f, -4.8f, -5.2f, -6.0f, -7.0f}, -4.0f, 3.0f};
    case 4: return {{7.0f, -7.6f, -8.0f, -8.4f, -9.0f, -10.0f, -11.5f, 8.0f}, -8.0f, 7.0f};
    case 5: return {{15.0f, -15.5f, -16.0f, -16.8f, -17.6f, -19.0f, -21.0f, 16.0f}, -16.0f, 15.0f};
    case 6: return {{31.0f, -31.5f, -32.0f, -33.0f, -34.5f, -36.5f, -39.0f, 32.0f}, -32.0f, 31.0f};
    default:
      return {{127.0f, 126.0f, 125.0f, 124.0f, 122.0f, 120.0f, 117.0f, 113.0f}, -127.0f, 127.0f};
  }
}

// Sums that say how well scales fit their codes.
template <bool kIsWeighed, int kCount>
inline void sum_codes(const Group& group, const SymmetricRule& rule, const Vector (&inverses)[kCount],
                      Vector (&along)[kCount], Vector (&square)[kCount]) {
  for (std::int64_t c = 0; c < group.size; ++c) {
    const Vector x = group.tile[c];
    for (int i = 0; i < kCount; ++i) {
      const Vector code = whole(x * inverses[i], rule.low, rule.high);
      const Vector weighed = kIsWeighed ? code * group.importance[c] : code;
      along[i] += weighed * x;
      square[i] += weighed * code;
    }
  }
}

// The refitted scale with the least error; the reason is in tandem/kernels/formats/scale_search.py.
template <bool kIsWeighed>
Vector search_symmetric(const Group& group, const SymmetricRule& rule) {
  Vector inverses[kPeaks], along[kPeaks] = {}, square[kPeaks] = {};
  const Vector peak = group.peak();
  for (int i = 0; i < kPeaks; ++i) inverses[i] = inverse(to_half(peak / rule.peaks[i]));
  sum_codes<kIsWeighed>(group, rule, inverses, along, square);
  Vector best{}, least{};
  for (int i = 0; i < kPeaks; ++i) {
    const Vector scale = to_half(along[i] * inverse(square[i]));
    const Vector error = scale * (scale * square[i] - 2.0f * along[i]);
    const Integers is_better = i == 0 ? Integers{} - 1 : error < least;
    best = is_better ? scale : best;
    least = is_better ? error : least;
  }
  const Vector again[1] = {inverse(best)};  // refitted to its own codes
  Vector on[1] = {}, own[1] = {};
  sum_codes<kIsWeighed>(group, rule, again, on, own);
  return to_half(on[0] * inverse(own[0]));
}

// Returns false if the scale of the largest magnitude does not fit fp16.
bool fit_symmetric(const Group& group, const SymmetricRule& rule, bool has_search, Vector& scale) {
  scale = to_half(group.peak() / rule.peaks[0]);
  if (!all_finite(scale)) return false;
  if (has_search)
    scale = group.importance ? search_symmetric<true>(group, rule)
                             : search_symmetric<false>(group, rule);
  return all_finite(scale);
}

struct AffineFit {
  Vector scale, minimum, error;
};

// (steps beyond the largest code, share of it that stays fixed).
constexpr double kAffineSteps[4][2] = {{0.0, 0.0}, {0.5, 0.0}, {0.5, 1.0}, {1.5, 0.5}};

constexpr int kAffineRefits = 2;  // refits of the best candidate

// The best scale and minimum for the codes 0..top that `to_code` and `offset` give; the minimum is
// relative to `middle`.
AffineFit refit_affine(const Group& group, Vector middle, double top, Vector to_code, Vector offset) {
  const auto high = static_cast<float>(top);
  Vector sum_x{}, sum_q{}, sum_qx{}, sum_qq{}, total{};
  for (std::int64_t c = 0; c < group.size; ++c) {
    const Vector around = group.tile[c] - middle;
    const Vector code = whole(around * to_code + offset, 0.0f, high);
    const Vector weighed = group.weighed(around, c), weighed_code = group.weighed(code, c);
    sum_x += weighed;
    sum_q += weighed_code;
    sum_qx += code * weighed;
    sum_qq += weighed_code * code;
    total += group.importance ? group.importance[c] : 1.0f;
  }
  const Vector spread = inverse(total * sum_qq - sum_q * sum_q);
  const Vector scale = to_half((total * sum_qx - sum_q * sum_x) * spread);
  const Vector shift = (sum_x - scale * sum_q) * inverse(total);
  const Vector error = scale * (scale * sum_qq - 2.0f * sum_qx + 2.0f * shift * sum_q);
  return {scale, shift, error + shift * (shift * total - 2.0f * sum_x)};
}

// The same for one candidate.
AffineFit fit_candidate(const Group& group, Vector middle, double top, const double (&candidate)[2]) {
  const double steps = top + candidate[0], pivot = top * candidate[1];
  const auto offset = static_cast<float>(pivot + (top / 2 - pivot) * steps / top);
  const Vector to_code = inverse((group.high - group.low) / static_cast<float>(steps));
  return refit_affine(group, middle, top, to_code, broadcast(offset));
}

// Computed from differences, because sums of squares would hide a near tie.
Vector affine_error(const Group& group, float top, const AffineFit& fit) {
  const Vector to_code = inverse(fit.scale);
  Vector error{};
  for (std::int64_t c = 0; c < group.size; ++c) {
    const Vector shifted = group.tile[c] - fit.minimum;
    const Vector loss = whole(shifted * to_code, 0.0f, top) * fit.scale - shifted;
    error += group.weighed(loss * loss, c);
  }
  return error;
}

// Returns false if the scale or the minimum does not fit fp16.
bool fit_affine(const Group& group, float top, bool has_search, AffineFit& fit) {
  fit = {to_half((group.high - group.low) / top), to_half(group.low), Vector{}};
  if (has_search) {
    const Vector middle = (group.low + group.high) / 2.0f;
    AffineFit best = fit_candidate(group, middle, top, kAffineSteps[0]);
    for (int i = 1; i < 4; ++i) {
      const AffineFit next = fit_candidate(group, middle, top, kAffineSteps[i]);
      const Integers is_better = next.error < best.error;
      best.scale = is_better ? next.scale : best.scale;
      best.minimum = is_better ? next.minimum : best.minimum;
      best.error = is_better ? next.error : best.error;
    }
    for (int i = 0; i < kAffineRefits; ++i) {
      const Vector to_code = inverse(best.scale);
      best = refit_affine(group, middle, top, to_code, -best.minimum * to_code);
    }
    best.minimum = to_half(best.minimum + middle);
    const Integers is_better = affine_error(group, top, best) < affine_error(group, top, fit);
    fit.scale = is_better ? best.scale : fit.scale;
    fit.minimum = is_better ? best.minimum : fit.minimum;
  }
  return all_finite(fit.scale) && all_finite(fit.minimum);
}

#include "quantize_tables.inl"

#include "quantize_mxfp4.inl"

// Writes the part's scales to line `line` of the block's scales.
inline void write_halves(std::uint8_t* scales, std::int64_t line, int part, Vector values) {
  std::int32_t lanes[TANDEM_LANES];
  const Integers bits = half_bits(values);
  std::memcpy(lanes, &bits, sizeof lanes);
  auto* to = reinterpret_cast<std::uint16_t*>(scales) + line * kBlockRows + part * TANDEM_LANES;
  for (int lane = 0; lane < TANDEM_LANES; ++lane) to[lane] = static_cast<std::uint16_t>(lanes[lane]);
}

inline void write_bytes(std::uint8_t* scales, std::int64_t line, int part, Integers values) {
  std::uint8_t* to = scales + line * kBlockRows + part * TANDEM_LANES;
  for (int lane = 0; lane < TANDEM_LANES; ++lane) to[lane] = static_cast<std::uint8_t>(values[lane]);
}

// The destination of a part of a group: its first dword, the block's scales, and the group's index
// in a row.
struct Place {
  std::uint8_t* data;
  std::uint8_t* scales;
  std::int64_t number;
  int part;
};

template <Format kFormat>
bool write_symmetric(const QuantizeCall& call, const Group& group, const Place& place) {
  constexpr Encoding e = encoding(kFormat);
  constexpr SymmetricRule rule = symmetric_rule(e.bits);
  Vector scale;
  if (!fit_symmetric(group, rule, call.has_search, scale)) return false;
  const Vector to_code = inverse(scale);
  const auto code_of = [&](std::int64_t c) {
    return to_integers(whole(group.tile[c] * to_code, rule.low, rule.high)) + e.offset;
  };
  if constexpr (e.bits == 8) write_codes<8>(place.data, group.size, code_of);
  else write_planes<e.bits>(place.data, group.size, code_of);
  write_halves(place.scales, place.number, place.part, scale);
  return true;
}

template <Format kFormat>
bool write_affine(const QuantizeCall& call, const Group& group, const Place& place) {
  constexpr Encoding e = encoding(kFormat);
  constexpr auto top = static_cast<float>(e.largest);
  AffineFit fit;
  if (!fit_affine(group, top, call.has_search, fit)) return false;
  const Vector to_code = inverse(fit.scale);
  write_planes<e.bits>(place.data, group.size, [&](std::int64_t c) {
    return to_integers(whole((group.tile[c] - fit.minimum) * to_code, 0.0f, top));
  });
  write_halves(place.scales, 2 * place.number, place.part, fit.scale);
  write_halves(place.scales, 2 * place.number + 1, place.part, fit.minimum);
  return true;
}

bool write_iq4_nl(const QuantizeCall& call, const Group& group, const Place& place) {
  Vector scale = plain_iq4(group);
  if (!all_finite(scale)) return false;
  if (call.has_search) scale = search_iq4(group, scale);
  const Vector to_code = inverse(scale);
  write_planes<4>(place.data, group.size,
                  [&](std::int64_t c) { return nearest_iq4(group.tile[c] * to_code).code; });
  write_halves(place.scales, place.number, place.part, scale);
  return all_finite(scale);
}

bool write_mxfp4(const QuantizeCall& call, const Group& group, const Place& place) {
  const Integers exponent = fit_exponent(call, group);
  const Vector to_unit = power_of_two(-exponent);
  write_planes<4>(place.data, group.size, [&](std::int64_t c) {
    const Vector x = group.tile[c];
    const Integers is_negative = x < 0.0f;
    return to_integers(e2m1_code(size_of(x) * to_unit)) | (is_negative & 8);
  });
  write_bytes(place.scales, place.number, place.part, exponent + kE8m0Bias);
  return true;
}

bool write_floats(const QuantizeCall& call, const Group& group, const Place& place) {
  Integers largest{};
  const bool is_bf16 = call.format == Format::kBf16;
  write_codes<16>(place.data, group.size, [&](std::int64_t c) {
    const Integers bits =
        is_bf16 ? to_bf16_bits(group.tile[c]) : half_bits(to_half(group.tile[c]));
    const Integers size = bits & 0x7FFF;
    largest = size > largest ? size : largest;
    return bits;
  });
  return !any(largest >= (is_bf16 ? 0x7F80 : 0x7C00));
}

#include "quantize_supers.inl"

#include "quantize_grids.inl"

bool write_group(const QuantizeCall& call, const Group& group, const Place& place) {
  switch (call.format) {
    case Format::kInt4: return write_symmetric<Format::kInt4>(call, group, place);
    case Format::kInt5: return write_symmetric<Format::kInt5>(call, group, place);
    case Format::kInt8: return write_symmetric<Format::kInt8>(call, group, place);
    case Format::kInt4Zero: return write_affine<Format::kInt4Zero>(call, group, place);
    case Format::kInt5Zero: return write_affine<Format::kInt5Zero>(call, group, place);
    case Format::kIq4Nl: return write_iq4_nl(call, group, place);
    case Format::kIq4Xs: return write_super<Format::kIq4Xs>(call, group, place);
    case Format::kQ2K: return write_super<Format::kQ2K>(call, group, place);
    case Format::kQ3K: return write_super<Format::kQ3K>(call, group, place);
    case Format::kQ4K: return write_super<Format::kQ4K>(call, group, place);
    case Format::kQ5K: return write_super<Format::kQ5K>(call, group, place);
    case Format::kQ6K: return write_super<Format::kQ6K>(call, group, place);
    case Format::kMxfp4: return write_mxfp4(call, group, place);
    case Format::kIq2Xxs: return write_grid<Format::kIq2Xxs>(call, group, place);
    case Format::kIq2Xs: return write_grid<Format::kIq2Xs>(call, group, place);
    case Format::kIq2S: return write_grid<Format::kIq2S>(call, group, place);
    case Format::kIq3Xxs: return write_grid<Format::kIq3Xxs>(call, group, place);
    case Format::kIq3S: return write_grid<Format::kIq3S>(call, group, place);
    default: return write_floats(call, group, place);
  }
}

// e4m3: all rows of a block share a scale.
bool write_e4m3(const QuantizeCall& call, const Group* parts, std::uint8_t* data,
                std::uint8_t* scales, std::int64_t number) {
  float peak = 0.0f;
  for (int part = 0; part < kParts; ++part)
    peak = std::max(peak, greatest_of(larger(parts[part].high, -parts[part].low)));
  const float scale = peak / 448.0f, divisor = scale == 0.0f ? 1.0f : scale;
  for (int part = 0; part < kParts; ++part)
    write_codes<8>(data + part * TANDEM_LANES * 4, call.group, [&](std::int64_t c) {
      const Vector scaled = parts[part].tile[c] / divisor;
      return to_e4m3_bits(smaller(larger(scaled, broadcast(-448.0f)), broadcast(448.0f)));
    });
  std::memcpy(scales + number * 4, &scale, sizeof scale);
  return true;
}

bool round_block(const QuantizeCall& call, std::int64_t block) {
  Vector tiles[kParts][kWidest];
  Group parts[kParts];
  std::uint8_t* data = call.data + block * call.data_stride;
  std::uint8_t* scales = call.scales + block * call.scale_stride;
  // Whether each group is quantised by itself.
  const bool is_alone = call.group && !has_supers(call.format);
  const std::int64_t step = is_alone ? call.group : kWidest;
  for (std::int64_t col = 0; col < call.padded_cols; col += step) {
    const std::int64_t size = std::min(step, call.padded_cols - col);
    std::uint8_t* to = data + code_bytes(call.format, col);
    for (int part = 0; part < kParts; ++part) {
      load_tile(call, block * kBlockRows + part * TANDEM_LANES, col, size, tiles[part]);
      parts[part] = {tiles[part], size, call.importance ? call.importance + col : nullptr,
                     Vector{}, Vector{}};
      if (!find_extremes(parts[part])) return false;
      const Place place{to + part * TANDEM_LANES * 4, scales, col / step, part};
      if (call.format != Format::kFp8 && !write_group(call, parts[part], place)) return false;
    }
    if (call.format == Format::kFp8 && !write_e4m3(call, parts, to, scales, col / step))
      return false;
  }
  return true;
}

constexpr QuantizeKernels kQuantizeKernels{round_block};
