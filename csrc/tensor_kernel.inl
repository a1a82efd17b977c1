// Operations along a dimension and by index, in the including file's instruction set. Included
// inside a namespace, after tensor_elements.inl.

// A thread's memory for a row of any length.
inline float* long_row(int which, std::int64_t count) {
  thread_local std::vector<float> rows[2];
  std::vector<float>& row = rows[which];
  const std::int64_t needed = (count + TANDEM_LANES - 1) / TANDEM_LANES * TANDEM_LANES;
  if (static_cast<std::int64_t>(row.size()) < needed) row.resize(needed);
  return row.data();
}

template <typename Function>
inline float sum_over(std::int64_t count, const Function& value) {
  constexpr std::int64_t kLanes = 32;  // independent sums, which the compiler keeps in registers
  float sums[kLanes] = {};
  const std::int64_t whole = count / kLanes * kLanes;
  for (std::int64_t k = 0; k < whole; k += kLanes)
    for (std::int64_t i = 0; i < kLanes; ++i) sums[i] += value(k + i);
  for (std::int64_t k = whole; k < count; ++k) sums[k - whole] += value(k);
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

// Whether `x` replaces the best so far; NaN does, once.
inline bool is_better(ReductionKind kind, float x, float best) {
  if (best != best) return false;
  return x != x || (kind == ReductionKind::kGreatest ? x > best : x < best);
}

inline float reduce_row(const Reduction& call, const float* row, std::int64_t* index) {
  const std::int64_t count = call.sizes[3];
  if (call.kind <= ReductionKind::kMean) {
    const float total = sum_over(count, [&](std::int64_t i) { return row[i]; });
    return call.kind == ReductionKind::kMean ? total / static_cast<float>(count) : total;
  }
  if (call.kind == ReductionKind::kLength)
    return std::sqrt(sum_over(count, [&](std::int64_t i) { return row[i] * row[i]; }));
  std::int64_t best = 0;
  for (std::int64_t i = 1; i < count; ++i)
    if (is_better(call.kind, row[i], row[best])) best = i;
  if (index) *index = best;
  return row[best];
}

// Sums whole rows, if the reduced dimension has larger strides than the one that stays.
inline void sum_rows(const Reduction& call, std::int64_t row, const Four& first) {
  const std::int64_t width = call.sizes[2], count = call.sizes[3];
  Row sum, next;
  for (std::int64_t w = 0; w < width; w += kPart) {
    const std::int64_t some = std::min(kPart, width - w);
    std::fill_n(sum.values, some, 0.0f);
    for (std::int64_t n = 0; n < count; ++n) {
      const Four at{first[0], first[1], w, n};
      load_row(call.x.type, element_at(call.x.data, call.x.type, offset_of(call.x.strides, at)),
               call.x.strides[2], some, next.values);
      map_two(some, sum.values, next.values, [](float x, float y) { return x + y; });
    }
    if (call.kind == ReductionKind::kMean)
      map_one(some, sum.values, [&](float x) { return x / static_cast<float>(count); });
    store_row(call.type, element_at(call.out, call.type, row * width + w), 1, some, sum.values);
  }
}

inline void reduce_values(const Reduction& call) {
  if (call.kind <= ReductionKind::kMean && call.sizes[2] > 1 && call.x.strides[3] != 1)
    return each_row({call.sizes[0], call.sizes[1], 1, 1},
                    [&](std::int64_t row, const Four& at) { sum_rows(call, row, at); });
  float* values = long_row(0, call.sizes[3]);
  each_row(call.sizes, [&](std::int64_t row, const Four& at) {
    load_operand(call.x, at, call.sizes[3], values);
    const float result = reduce_row(call, values, call.index ? call.index + row : nullptr);
    store_row(call.type, element_at(call.out, call.type, row), 1, 1, &result);
  });
}

inline void softmax_rows(const Softmax& call) {
  const std::int64_t count = call.sizes[3];
  float* row = long_row(0, count);
  each_row(call.sizes, [&](std::int64_t r, const Four& at) {
    load_operand(call.x, at, count, row);
    float greatest = -INFINITY;
    for (std::int64_t i = 0; i < count; ++i) greatest = row[i] > greatest ? row[i] : greatest;
    map_vectors(count, row, [&](Vector x) { return exponential(x - greatest); });
    const float total = sum_over(count, [&](std::int64_t i) { return row[i]; });
    map_one(count, row, [&](float x) { return x / total; });
    store_row(call.type, element_at(call.out, call.type, r * count), 1, count, row);
  });
}

inline void norm_layers(const LayerNorm& call) {
  const std::int64_t count = call.sizes[3];
  float* row = long_row(0, count);
  each_row(call.sizes, [&](std::int64_t r, const Four& at) {
    load_operand(call.x, at, count, row);
    const auto n = static_cast<float>(count);
    const float mean = sum_over(count, [&](std::int64_t i) { return row[i]; }) / n;
    map_one(count, row, [&](float x) { return x - mean; });
    const float variance = sum_over(count, [&](std::int64_t i) { return row[i] * row[i]; }) / n;
    const float scale = 1.0f / std::sqrt(variance + call.eps);
    map_one(count, row, [&](float x) { return x * scale; });
    if (call.weight)
      map_two(count, row, call.weight, [](float x, float y) { return x * y; });
    if (call.bias) map_two(count, row, call.bias, [](float x, float y) { return x + y; });
    store_row(call.type, element_at(call.out, call.type, r * count), 1, count, row);
  });
}

inline void find_greatest(const Greatest& call) {
  thread_local std::vector<std::int64_t> order;
  const std::int64_t count = call.sizes[3];
  float *row = long_row(0, count), *best = long_row(1, call.top_k);
  order.resize(count);
  // NaN counts as the greatest, because sorting needs an order.
  const auto is_before = [&](std::int64_t a, std::int64_t b) {
    const bool is_nan = row[a] != row[a], is_other_nan = row[b] != row[b];
    if (is_nan || is_other_nan) return is_nan != is_other_nan ? is_nan : a < b;
    return row[a] != row[b] ? row[a] > row[b] : a < b;
  };
  each_row(call.sizes, [&](std::int64_t r, const Four& at) {
    load_operand(call.x, at, count, row);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + call.top_k, order.end(), is_before);
    for (std::int64_t k = 0; k < call.top_k; ++k) {
      best[k] = row[order[k]];
      call.index[r * call.top_k + k] = order[k];
    }
    store_row(call.type, element_at(call.out, call.type, r * call.top_k), 1, call.top_k, best);
  });
}

// Calls function(position, number of positions from it on, their index): one by one, or once for a
// row in which all indices are the same.
template <typename Function>
inline void each_index(const Four& sizes, const DimIndex& along, const Function& function) {
  const std::int64_t step = along.index_strides[3] == 0 ? sizes[3] : 1;
  each_row(sizes, [&](std::int64_t row, Four at) {
    for (; at[3] < sizes[3]; at[3] += step)
      function(row, at, step, along.index[offset_of(along.index_strides, at)]);
  });
}

inline void look_up(const Lookup& call) {
  Row values;
  each_index(call.sizes, call.along, [&](std::int64_t row, Four at, std::int64_t count,
                                          std::int64_t number) {
    const bool is_inside = number >= 0 && number < call.along.count;
    const std::int64_t jump = is_inside ? number * call.along.stride : 0;
    for (std::int64_t end = at[3] + count; at[3] < end; at[3] += kPart) {
      const std::int64_t some = std::min(kPart, end - at[3]);
      void* out = element_at(call.out, call.type, row * call.sizes[3] + at[3]);
      const void* from =
          element_at(call.x.data, call.x.type, offset_of(call.x.strides, at) + jump);
      if (call.type == ElementType::kInt64) {  // fp32 would round it
        for (std::int64_t i = 0; i < some; ++i)
          static_cast<std::int64_t*>(out)[i] =
              is_inside ? static_cast<const std::int64_t*>(from)[i * call.x.strides[3]] : -1;
        continue;
      }
      if (is_inside)
        load_row(call.x.type, from, call.x.strides[3], some, values.values);
      else
        std::fill_n(values.values, some, NAN);
      store_row(call.type, out, 1, some, values.values);
    }
  });
}

inline void scatter_values(const Scatter& call) {
  Four sizes = call.sizes;
  each_row(sizes, [&](std::int64_t, Four at) {
    for (; at[3] < sizes[3]; ++at[3]) {
      const std::int64_t number = call.along.index[offset_of(call.along.index_strides, at)];
      if (number < 0 || number >= call.along.count) continue;
      float value = call.x.scalar;
      load_operand(call.x, at, 1, &value);
      store_row(call.out.type,
                element_at(call.out.data, call.out.type,
                           offset_of(call.out.strides, at) + number * call.along.stride),
                1, 1, &value);
    }
  });
}

inline void store_products(const Product& call, const Four& at, const float* row) {
  store_row(call.out.type, element_at(call.out.data, call.out.type, offset_of(call.out.strides, at)),
            call.out.strides[3], call.sizes[3], row);
}

// If the columns of `b` are contiguous: sums rows of it.
inline void multiply_by_rows(const Product& call) {
  float *a = long_row(0, call.depth), *out = long_row(1, call.sizes[3]);
  Row sum, next;
  each_row(call.sizes, [&](std::int64_t, const Four& at) {
    load_operand(call.a, at, call.depth, a);
    for (std::int64_t c = 0; c < call.sizes[3]; c += kPart) {
      const std::int64_t some = std::min(kPart, call.sizes[3] - c);
      std::fill_n(sum.values, some, 0.0f);
      for (std::int64_t k = 0; k < call.depth; ++k) {
        load_operand(call.b, {at[0], at[1], k, c}, some, next.values);
        map_two(some, sum.values, next.values, [&](float x, float y) { return x + a[k] * y; });
      }
      std::copy_n(sum.values, some, out + c);
    }
    store_products(call, at, out);
  });
}

// If `b` is contiguous along its depth: reads each column once for all rows.
inline void multiply_by_columns(const Product& call, std::int64_t i, std::int64_t j) {
  const std::int64_t rows = call.sizes[2], columns = call.sizes[3];
  float *a = long_row(0, rows * call.depth), *out = long_row(1, rows * columns);
  for (std::int64_t r = 0; r < rows; ++r)
    load_operand(call.a, {i, j, r, 0}, call.depth, a + r * call.depth);
  std::fill_n(out, rows * columns, 0.0f);
  Row column;
  for (std::int64_t c = 0; c < columns; ++c)
    for (std::int64_t k = 0; k < call.depth; k += kPart) {
      const std::int64_t some = std::min(kPart, call.depth - k);
      const std::int64_t place = offset_of(call.b.strides, {i, j, k, c});
      load_row(call.b.type, element_at(call.b.data, call.b.type, place), call.b.strides[2], some,
               column.values);
      for (std::int64_t r = 0; r < rows; ++r) {
        const float* row = a + r * call.depth + k;
        out[r * columns + c] += sum_over(some, [&](std::int64_t n) { return row[n] * column.values[n]; });
      }
    }
  for (std::int64_t r = 0; r < rows; ++r) store_products(call, {i, j, r, 0}, out + r * columns);
}

inline void multiply(const Product& call) {
  if (call.b.strides[2] != 1) return multiply_by_rows(call);
  for (std::int64_t i = 0; i < call.sizes[0]; ++i)
    for (std::int64_t j = 0; j < call.sizes[1]; ++j) multiply_by_columns(call, i, j);
}

// Multiplies some heads by some keys (.., dim). Several keys share each register of heads, and
// several registers share each key.
template <int kKeys, int kVectors>
inline void multiply_heads(const KeyScores& call, const float* keys, std::int64_t head,
                           Vector (&sums)[kKeys][kVectors]) {
  for (std::int64_t d = 0; d < call.dim; ++d) {
    Vector query[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      query[v] = load(call.queries + d * call.heads + head + v * TANDEM_LANES);
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
      const float key = keys[k * call.dim + d];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[k][v] += query[v] * key;
    }
  }
}

// Adds the scores of some heads for some keys to `totals`.
template <int kKeys, int kVectors>
inline void score_heads(const KeyScores& call, const float* keys, std::int64_t head,
                        Vector (&totals)[kKeys]) {
  Vector sums[kKeys][kVectors] = {};
  multiply_heads(call, keys, head, sums);
  for (int v = 0; v < kVectors; ++v) {
    const Vector weights = load(call.weights + head + v * TANDEM_LANES);
    for (int k = 0; k < kKeys; ++k) {
      const Vector positive = sums[k][v] < 0 ? Vector{} : sums[k][v];  // keeps NaN
      totals[k] += positive * weights;
    }
  }
}

// Loads some keys into this thread's memory.
inline const float* loaded_keys(const KeyScores& call, std::int64_t first, std::int64_t count) {
  thread_local std::vector<float> keys;
  keys.resize(count * call.dim);
  load_values(value_at(call.keys, call.type, first * call.dim), call.type, count * call.dim,
              keys.data());
  return keys.data();
}

template <int kKeys>
inline void score_some(const KeyScores& call, std::int64_t first) {
  const float* keys = loaded_keys(call, first, kKeys);
  Vector totals[kKeys]{};
  std::int64_t head = 0;
  for (; head + 2 * TANDEM_LANES <= call.heads; head += 2 * TANDEM_LANES)
    score_heads<kKeys, 2>(call, keys, head, totals);
  for (; head < call.heads; head += TANDEM_LANES)
    score_heads<kKeys, 1>(call, keys, head, totals);
  for (int k = 0; k < kKeys; ++k) call.scores[first + k] = sum_of(totals[k]);
}

inline void score_keys(const KeyScores& call) {
  constexpr int kKeys = TANDEM_LANES == 16 ? 8 : 4;  // sums take half of the registers
  std::int64_t first = 0;
  for (; first + kKeys <= call.count; first += kKeys) score_some<kKeys>(call, first);
  for (; first < call.count; ++first) score_some<1>(call, first);
}

template <int kKeys>
inline void best_of_some(const KeyScores& call, std::int64_t first) {
  const float* keys = loaded_keys(call, first, kKeys);
  for (std::int64_t head = 0; head < call.heads; head += TANDEM_LANES) {
    Vector sums[kKeys][1] = {};
    multiply_heads(call, keys, head, sums);
    Vector best = load(call.scores + head);
    for (int k = 0; k < kKeys; ++k)
      best = ((sums[k][0] <= best) | (best != best)) ? best : sums[k][0];  // keeps NaN
    store(call.scores + head, best);
  }
}

inline void best_keys(const KeyScores& call) {
  constexpr int kKeys = 8;
  std::fill_n(call.scores, call.heads, -INFINITY);
  std::int64_t first = 0;
  for (; first + kKeys <= call.count; first += kKeys) best_of_some<kKeys>(call, first);
  for (; first < call.count; ++first) best_of_some<1>(call, first);
}

constexpr TensorKernels kTensorKernels{combine_values, reduce_values, softmax_rows,
                                       norm_layers,    find_greatest, look_up,
                                       scatter_values, multiply,      score_keys,
                                       best_keys};
