// Super-blocks: 256 columns whose groups' scales and minima are bytes times an fp16 factor, as
// tandem/kernels/formats/super_blocks.py defines them. Included in quantize_kernel.inl.

constexpr int kMostGroups = 16;  // per super-block
// Limit for the factor that makes products with the weights right.
constexpr float kMostStretch = 1.25f;
constexpr float kLargestHalf = 65504.0f;

// Groups' bytes as floats, and their common factor.
struct TwoLevels {
  Vector factor, steps[kMostGroups];

  Vector of(int group) const { return steps[group] * factor; }  // exact
};

struct SuperFit {
  TwoLevels scales, minima;
  Vector error;
};

template <Format kFormat>
constexpr int kGroups = kSuperCols / encoding(kFormat).group;

template <Format kFormat>
TwoLevels two_levels(const Vector (&values)[kMostGroups]) {
  constexpr bool are_nibbles = encoding(kFormat).scale == ScaleKind::kNibblesOfSuper;
  constexpr float largest = are_nibbles ? 15.0f : 127.0f;
  Vector low = values[0], high = low;
  for (int g = 1; g < kGroups<kFormat>; ++g) {
    low = smaller(values[g], low);
    high = larger(values[g], high);
  }
  // Nibbles have no sign, so the factor has the sign of the largest scale.
  const Vector peak = are_nibbles ? (high > -low ? high : low) : larger(high, -low);
  TwoLevels found{to_half(peak / largest) + 0.0f, {}};  // + 0 turns -0 into 0
  const Vector to_step = inverse(found.factor);
  for (int g = 0; g < kGroups<kFormat>; ++g)
    found.steps[g] = whole(values[g] * to_step, are_nibbles ? 0.0f : -largest, largest);
  return found;
}

// A column's stored code, and its number before scaling.
template <Format kFormat>
inline TableCode nearest(Vector x) {
  constexpr Encoding e = encoding(kFormat);
  if constexpr (e.table != nullptr) return nearest_iq4(x);
  constexpr auto low = static_cast<float>(-e.offset), high = static_cast<float>(e.largest - e.offset);
  const Vector value = whole(x, low, high);
  return {to_integers(value) + e.offset, value};
}

// Rounds the scales and minima of groups as the super-block stores them; also returns their squared
// error.
template <Format kFormat>
SuperFit round_super(const Group& whole_super, const Vector (&scales)[kMostGroups],
                     const Vector (&minima)[kMostGroups]) {
  constexpr Encoding e = encoding(kFormat);
  SuperFit fit{two_levels<kFormat>(scales), {}, {}};
  if constexpr (e.has_minima) fit.minima = two_levels<kFormat>(minima);
  for (int g = 0; g < kGroups<kFormat>; ++g) {
    const Vector scale = fit.scales.of(g), to_code = inverse(scale);
    const Vector minimum = e.has_minima ? fit.minima.of(g) : Vector{};
    Vector error{};
    for (std::int64_t c = g * e.group; c < (g + 1) * e.group; ++c) {
      const Vector x = whole_super.tile[c];
      const Vector loss = nearest<kFormat>((x - minimum) * to_code).value * scale + minimum - x;
      error += whole_super.weighed(loss * loss, c);
    }
    fit.error += error;
  }
  return fit;
}

// Fits each group by itself; returns false if a scale does not fit fp16.
template <Format kFormat>
bool fit_groups(const Group& whole_super, bool has_search, Vector (&scales)[kMostGroups],
                Vector (&minima)[kMostGroups]) {
  constexpr Encoding e = encoding(kFormat);
  for (int g = 0; g < kGroups<kFormat>; ++g) {
    const std::int64_t first = g * e.group;
    Group group{whole_super.tile + first, e.group,
                whole_super.importance ? whole_super.importance + first : nullptr, Vector{}, Vector{}};
    if (!find_extremes(group)) return false;
    bool is_fit;
    if constexpr (e.table != nullptr) {
      scales[g] = plain_iq4(group);
      is_fit = all_finite(scales[g]);
      if (has_search && is_fit) scales[g] = search_iq4(group, scales[g]);
    } else if constexpr (e.has_minima) {
      AffineFit fit;
      is_fit = fit_affine(group, static_cast<float>(e.largest), has_search, fit);
      scales[g] = fit.scale;
      minima[g] = fit.minimum;
    } else {
      is_fit = fit_symmetric(group, symmetric_rule(e.bits), has_search, scales[g]);
    }
    if (!is_fit) return false;
  }
  return true;
}

template <Format kFormat>
void write_levels(const SuperFit& fit, std::uint8_t* to, int part) {
  constexpr Encoding e = encoding(kFormat);
  constexpr bool are_nibbles = e.scale == ScaleKind::kNibblesOfSuper;
  write_halves(to, 0, part, fit.scales.factor);
  if constexpr (e.has_minima) write_halves(to, 1, part, fit.minima.factor);
  for (int g = 0; g < kGroups<kFormat>; ++g) {
    const std::int64_t line = in_super(kFormat, g) / kBlockRows;
    const Integers scale = to_integers(fit.scales.steps[g]);
    if constexpr (!e.has_minima) {
      write_bytes(to, line, part, scale);
    } else {
      const Integers minimum = to_integers(fit.minima.steps[g]);
      write_bytes(to, line, part, are_nibbles ? scale | minimum << 4 : scale);
      if (!are_nibbles) write_bytes(to, line + 1, part, minimum);
    }
  }
}

inline void choose(Integers is_better, TwoLevels& best, const TwoLevels& next, int count) {
  best.factor = is_better ? next.factor : best.factor;
  for (int g = 0; g < count; ++g) best.steps[g] = is_better ? next.steps[g] : best.steps[g];
}

// Multiplies the factor, rounded to fp16; leaves it unchanged if the result would leave the range.
inline void stretch(TwoLevels& levels, Vector by) {
  const Vector stretched = to_half(levels.factor * by);
  const Vector size = stretched < 0.0f ? -stretched : stretched;
  levels.factor = size <= kLargestHalf ? stretched : levels.factor;
}

// Scales with the least error make all values too small. This makes their products with the weights
// right, as for grids; codes stay.
template <Format kFormat>
void stretch_super(const Group& whole_super, SuperFit& fit) {
  constexpr Encoding e = encoding(kFormat);
  Vector along{}, energy{};
  for (int g = 0; g < kGroups<kFormat>; ++g) {
    const Vector scale = fit.scales.of(g), to_code = inverse(scale);
    const Vector minimum = e.has_minima ? fit.minima.of(g) : Vector{};
    for (std::int64_t c = g * e.group; c < (g + 1) * e.group; ++c) {
      const Vector x = whole_super.tile[c];
      const Vector value = nearest<kFormat>((x - minimum) * to_code).value * scale + minimum;
      along += whole_super.weighed(x * value, c);
      energy += whole_super.weighed(x * x, c);
    }
  }
  const Vector by =
      larger(smaller(energy * inverse(along), broadcast(kMostStretch)), broadcast(1.0f));
  stretch(fit.scales, by);
  if constexpr (e.has_minima) stretch(fit.minima, by);
}

// By super-block, takes the better of the plain and the searched scales.
template <Format kFormat>
bool write_super(const QuantizeCall& call, const Group& whole_super, const Place& place) {
  constexpr Encoding e = encoding(kFormat);
  Vector scales[kMostGroups], minima[kMostGroups] = {};
  if (!fit_groups<kFormat>(whole_super, false, scales, minima)) return false;
  SuperFit best = round_super<kFormat>(whole_super, scales, minima);
  if (call.has_search) {
    if (!fit_groups<kFormat>(whole_super, true, scales, minima)) return false;
    const SuperFit next = round_super<kFormat>(whole_super, scales, minima);
    const Integers is_better = next.error < best.error;
    choose(is_better, best.scales, next.scales, kGroups<kFormat>);
    if constexpr (e.has_minima) choose(is_better, best.minima, next.minima, kGroups<kFormat>);
  }
  Vector to_code[kMostGroups];
  for (int g = 0; g < kGroups<kFormat>; ++g) to_code[g] = inverse(best.scales.of(g));
  write_planes<e.bits>(place.data, kSuperCols, [&](std::int64_t c) {
    const auto g = static_cast<int>(c / e.group);
    const Vector minimum = e.has_minima ? best.minima.of(g) : Vector{};
    return nearest<kFormat>((whole_super.tile[c] - minimum) * to_code[g]).code;
  });
  if (call.has_search) stretch_super<kFormat>(whole_super, best);
  const std::int64_t super_bytes = scale_bytes(kFormat, kSuperCols, e.group);
  write_levels<kFormat>(best, place.scales + place.number * super_bytes, place.part);
  return all_finite(best.scales.factor) && all_finite(best.minima.factor);
}
