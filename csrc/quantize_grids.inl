// Rounding to lines of a grid (IQ2 and IQ3), as tandem/kernels/formats/grid_search.py defines it.
// Every line of 8 or 4 columns is tried. Its product with the weights is a sum of two table
// entries, one for each byte of the line. Included in quantize_kernel.inl.

constexpr int kBytes = 256;

template <Format kFormat>
struct Lines {
  static constexpr Encoding e = encoding(kFormat);
  static constexpr Grid grid = *e.grid;
  static constexpr int cols = grid.line_cols, half = cols / 2, count = 1 << grid.index_bits;
  static constexpr int magnitudes = cols == 8 ? 3 : 8;
  static constexpr int of_super = kSuperCols / cols, of_group = static_cast<int>(e.group) / cols;
  static constexpr int groups = kSuperCols / static_cast<int>(e.group);

  static constexpr float magnitude(int code) {
    return static_cast<float>(e.table[code] - e.offset) * e.unit;
  }
  static constexpr float largest = magnitude(magnitudes - 1);
};

constexpr int kScaleSteps = 16;  // steps of a group's scale, which is an odd multiple of the factor
constexpr float kLargestMultiple = 2 * kScaleSteps - 1;

// A super-block's weights without signs, and the weighted squares of its lines.
template <Format kFormat>
struct GridWeights {
  Vector weighed[kSuperCols];  // times their importance
  Integers signs[kSuperCols / 8];  // of eight columns, one bit each
  Vector energy;  // the sum of importance times square
  Vector peaks[Lines<kFormat>::groups];
  float squares[Lines<kFormat>::of_super][Lines<kFormat>::count];  // weighted, of a line's numbers
};

// Writes every sum of one product per column, indexed by the byte of these products' codes.
template <Format kFormat, int kColumn, typename Value>
inline void sum_products(const Value (&products)[Lines<kFormat>::half][8], Value sum, int byte,
                         Value* table) {
  using L = Lines<kFormat>;
  if constexpr (kColumn == L::half) {
    table[byte] = sum;
  } else {
    for (int code = 0; code < L::magnitudes; ++code)
      sum_products<kFormat, kColumn + 1>(products, kColumn ? sum + products[kColumn][code]
                                                           : products[kColumn][code],
                                         byte | code << (kColumn * L::grid.line_bits()), table);
  }
}

// `of(column, code)` returns a product.
template <Format kFormat, typename Value, typename Product>
inline void fill_table(const Product& of, Value* table) {
  using L = Lines<kFormat>;
  Value products[L::half][8];
  for (int c = 0; c < L::half; ++c)
    for (int code = 0; code < L::magnitudes; ++code) products[c][code] = of(c, code);
  sum_products<kFormat, 0>(products, Value{}, 0, table);
}

template <Format kFormat>
void sum_squares(const float* importance, float (&squares)[Lines<kFormat>::count]) {
  using L = Lines<kFormat>;
  float tables[2][kBytes];
  for (int h = 0; h < 2; ++h)
    fill_table<kFormat>(
        [&](int c, int code) {
          const float square = L::magnitude(code) * L::magnitude(code);
          return importance ? square * importance[h * L::half + c] : square;
        },
        tables[h]);
  for (int line = 0; line < L::count; ++line) {
    const int bits = L::grid.lines[line];
    squares[line] = tables[0][bits & 255] + tables[1][bits >> 8];
  }
}

// If the number of minus signs must be even, the least important weight may get the wrong sign; its
// magnitude is then negative.
template <Format kFormat>
void take_signs(const Group& group, GridWeights<kFormat>& to) {
  to.energy = Vector{};
  for (int eight = 0; eight < kSuperCols / 8; ++eight) {
    Integers signs{}, odd{}, where{};
    Vector least = broadcast(__builtin_inff());
    for (int i = 0; i < 8; ++i) {
      const int c = 8 * eight + i;
      const Integers is_negative = group.tile[c] < 0.0f;  // true is -1
      const Vector size = group.weighed(size_of(group.tile[c]), c);
      signs |= is_negative & (1 << i);
      odd ^= is_negative;
      const Integers is_less = size < least;
      least = is_less ? size : least;
      where = is_less ? Integers{} + (1 << i) : where;
      to.weighed[c] = size;
      to.energy += size * size_of(group.tile[c]);
    }
    if constexpr (Lines<kFormat>::grid.sign_kind() == Signs::kEven) {
      where &= odd;
      signs ^= where;
      for (int i = 0; i < 8; ++i) {
        Vector& size = to.weighed[8 * eight + i];
        size = (where & (1 << i)) != 0 ? -size : size;
      }
    }
    to.signs[eight] = signs;
  }
}

template <Format kFormat>
void prepare(const Group& group, GridWeights<kFormat>& to) {
  using L = Lines<kFormat>;
  take_signs(group, to);
  for (int g = 0; g < L::groups; ++g) {
    Vector peak{};
    for (std::int64_t c = g * L::e.group; c < (g + 1) * L::e.group; ++c)
      peak = larger(size_of(group.tile[c]), peak);
    to.peaks[g] = peak;
  }
  for (int line = 0; line < L::of_super; ++line) {
    const float* importance = group.importance ? group.importance + line * L::cols : nullptr;
    sum_squares<kFormat>(importance, to.squares[line]);
  }
}

// The products of all of a grid's lines with the weights at one line's position.
template <Format kFormat>
struct LineProducts {
  Vector low[kBytes], high[kBytes];
  const float* squares;

  LineProducts(const GridWeights<kFormat>& weights, int place) : squares(weights.squares[place]) {
    using L = Lines<kFormat>;
    const Vector* from = weights.weighed + place * L::cols;
    fill_table<kFormat>([&](int c, int code) { return from[c] * L::magnitude(code); }, low);
    fill_table<kFormat>([&](int c, int code) { return from[L::half + c] * L::magnitude(code); },
                        high);
  }

  Vector along(int line) const {
    const int bits = Lines<kFormat>::grid.lines[line];
    return low[bits & 255] + high[bits >> 8];
  }
};

// With a scale s, a line leaves the error s * (s * square - 2 * along). So the best line has the
// least s / 2 * square - along.
template <Format kFormat, int kCount>
void add_errors(const GridWeights<kFormat>& weights, int group, const Vector (&scales)[kCount],
                Vector (&errors)[kCount]) {
  using L = Lines<kFormat>;
  Vector halves[kCount];
  for (int i = 0; i < kCount; ++i) {
    halves[i] = scales[i] * 0.5f;
    errors[i] = Vector{};
  }
  for (int place = group * L::of_group; place < (group + 1) * L::of_group; ++place) {
    const LineProducts<kFormat> products(weights, place);
    Vector least[kCount];
    for (Vector& one : least) one = broadcast(__builtin_inff());
    for (int line = 0; line < L::count; ++line) {
      const Vector along = products.along(line);
      for (int i = 0; i < kCount; ++i)
        least[i] = smaller(halves[i] * products.squares[line] - along, least[i]);
    }
    for (int i = 0; i < kCount; ++i) errors[i] += least[i];
  }
  for (int i = 0; i < kCount; ++i) errors[i] *= scales[i];  // half of them
}

template <Format kFormat>
struct GridFit {
  Vector factor, error;
  // Sums over values before the factor: with the weights, and with themselves.
  Vector along, square;
  Integers steps[Lines<kFormat>::groups], lines[Lines<kFormat>::of_super];
};

// Chooses the best line at each position for its group's scale, then the factor that fits them
// best.
template <Format kFormat>
void choose_lines(const GridWeights<kFormat>& weights, GridFit<kFormat>& fit) {
  using L = Lines<kFormat>;
  fit.along = fit.square = Vector{};
  for (int place = 0; place < L::of_super; ++place) {
    const LineProducts<kFormat> products(weights, place);
    const Vector multiple =
        __builtin_convertvector(fit.steps[place / L::of_group] * 2 + 1, Vector);
    const Vector half = multiple * fit.factor * 0.5f;
    Vector least = broadcast(__builtin_inff()), its_square{};
    Integers best{};
    for (int line = 0; line < L::count; ++line) {
      const Vector error = half * products.squares[line] - products.along(line);
      const Integers is_less = error < least;
      least = is_less ? error : least;
      best = is_less ? Integers{} + line : best;
      its_square = is_less ? broadcast(products.squares[line]) : its_square;
    }
    fit.lines[place] = best;
    fit.along += multiple * (half * its_square - least);
    fit.square += multiple * multiple * its_square;
  }
  fit.factor = to_half(fit.along * inverse(fit.square));
}

// The factor with the least error makes all values too small by the share of the error, and this
// adds up over layers. So the factor is chosen to make their products with the weights right.
template <Format kFormat>
void stretch(const GridWeights<kFormat>& weights, GridFit<kFormat>& fit) {
  const Vector most = fit.along * inverse(fit.square) * kMostStretch;
  fit.factor = to_half(smaller(weights.energy * inverse(fit.along), most));
  fit.error = fit.factor * (fit.factor * fit.square - 2.0f * fit.along);
}

// Candidates: where the largest magnitude goes, as shares of the grid's largest.
constexpr float kGridShares[] = {0.7f, 0.8f, 0.9f, 1.0f, 1.12f, 1.25f, 1.4f, 1.6f};

template <Format kFormat>
Vector best_scale(const GridWeights<kFormat>& weights, int group) {
  constexpr int kCount = sizeof kGridShares / sizeof kGridShares[0];
  Vector scales[kCount], errors[kCount];
  for (int i = 0; i < kCount; ++i)
    scales[i] = weights.peaks[group] / (Lines<kFormat>::largest * kGridShares[i]);
  add_errors<kFormat>(weights, group, scales, errors);
  for (int i = 1; i < kCount; ++i) {
    const Integers is_less = errors[i] < errors[0];
    errors[0] = is_less ? errors[i] : errors[0];
    scales[0] = is_less ? scales[i] : scales[0];
  }
  return scales[0];
}

// The best of a step and its neighbours.
template <Format kFormat>
Integers best_step(const GridWeights<kFormat>& weights, int group, Vector factor, Integers near) {
  Vector scales[3], errors[3];
  Integers steps[3];
  for (int i = 0; i < 3; ++i) {
    const Integers step = near + (i - 1);
    steps[i] = step < 0 ? Integers{} : step >= kScaleSteps ? Integers{} + (kScaleSteps - 1) : step;
    scales[i] = factor * __builtin_convertvector(steps[i] * 2 + 1, Vector);
  }
  add_errors<kFormat>(weights, group, scales, errors);
  Integers best = errors[0] < errors[1] ? steps[0] : steps[1];
  const Vector least = smaller(errors[0], errors[1]);
  return errors[2] < least ? steps[2] : best;
}

// Rounds every group's scale to the nearest step.
template <Format kFormat>
void fit_scales(const GridWeights<kFormat>& weights, const Vector (&scales)[Lines<kFormat>::groups],
                GridFit<kFormat>& fit) {
  Vector largest{};
  for (const Vector scale : scales) largest = larger(scale, largest);
  fit.factor = to_half(largest / kLargestMultiple);
  const Vector to_multiple = inverse(fit.factor);
  for (int g = 0; g < Lines<kFormat>::groups; ++g)
    fit.steps[g] = to_integers(
        whole(scales[g] * to_multiple * 0.5f - 0.5f, 0.0f, static_cast<float>(kScaleSteps - 1)));
  choose_lines<kFormat>(weights, fit);
}

// The scales from the largest magnitudes.
template <Format kFormat>
void fit_plain(const GridWeights<kFormat>& weights, GridFit<kFormat>& fit) {
  using L = Lines<kFormat>;
  Vector scales[L::groups];
  for (int g = 0; g < L::groups; ++g) scales[g] = weights.peaks[g] / L::largest;
  fit_scales<kFormat>(weights, scales, fit);
  stretch(weights, fit);
}

// The scales with the least error, then the steps with the least error for the resulting factor.
template <Format kFormat>
void fit_searched(const GridWeights<kFormat>& weights, GridFit<kFormat>& fit) {
  using L = Lines<kFormat>;
  Vector scales[L::groups];
  for (int g = 0; g < L::groups; ++g) scales[g] = best_scale<kFormat>(weights, g);
  fit_scales<kFormat>(weights, scales, fit);
  for (int g = 0; g < L::groups; ++g)
    fit.steps[g] = best_step<kFormat>(weights, g, fit.factor, fit.steps[g]);
  choose_lines<kFormat>(weights, fit);
  stretch(weights, fit);
}

template <Format kFormat>
void write_lines(const GridFit<kFormat>& fit, const Integers* signs, const Place& place) {
  using L = Lines<kFormat>;
  Integers words[L::grid.words] = {};
  const auto put = [&](const BitField& field, int number, Integers value) {
    words[field.at(number) / 32] |= value << (field.at(number) % 32);
  };
  for (int i = 0; i < L::of_super; ++i) {
    put(L::grid.low, i, fit.lines[i] & 255);
    if (L::grid.high.width) put(L::grid.high, i, fit.lines[i] >> 8);
  }
  for (int i = 0; i < kSuperCols / 8; ++i)
    put(L::grid.signs, i, signs[i] & ((1 << L::grid.signs.width) - 1));
  for (int g = 0; g < L::groups; ++g) put(L::grid.scales, g, fit.steps[g]);
  for (int w = 0; w < L::grid.words; ++w)
    std::memcpy(place.data + w * 4 * kBlockRows, &words[w], sizeof words[w]);
  write_halves(place.scales, place.number, place.part, fit.factor);
}

template <Format kFormat>
void choose(Integers is_better, GridFit<kFormat>& best, const GridFit<kFormat>& next) {
  using L = Lines<kFormat>;
  best.factor = is_better ? next.factor : best.factor;
  for (int i = 0; i < L::of_super; ++i) best.lines[i] = is_better ? next.lines[i] : best.lines[i];
  for (int g = 0; g < L::groups; ++g) best.steps[g] = is_better ? next.steps[g] : best.steps[g];
}

// By super-block, takes the better of the plain and the searched scales.
template <Format kFormat>
bool write_grid(const QuantizeCall& call, const Group& group, const Place& place) {
  GridWeights<kFormat> weights;
  prepare(group, weights);
  GridFit<kFormat> fit, next;
  fit_plain(weights, fit);
  if (!all_finite(fit.factor)) return false;
  if (call.has_search) {
    fit_searched(weights, next);
    choose<kFormat>(next.error < fit.error, fit, next);
  }
  write_lines<kFormat>(fit, weights.signs, place);
  return all_finite(fit.factor);
}
