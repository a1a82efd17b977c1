// Rounding to a table of numbers, llama.cpp's kvalues_iq4nl; included in quantize_kernel.inl.

struct TableCode {
  Integers code;
  Vector value;
};

constexpr float iq4_value(int code) { return static_cast<float>(kIq4Table[code]) - 127.0f; }

// The code of the nearest number; the lower one of two equally near. Codes are in the order of
// their numbers.
inline TableCode nearest_iq4(Vector x) {
  TableCode found{Integers{}, broadcast(iq4_value(0))};
  for (int code = 1; code < 16; ++code) {
    const Integers is_above = x > (iq4_value(code) + iq4_value(code - 1)) / 2;  // true is -1
    found.code -= is_above;
    found.value += from_bits(bits_of(broadcast(iq4_value(code) - iq4_value(code - 1))) & is_above);
  }
  return found;
}

Vector iq4_error(const Group& group, Vector scale) {
  const Vector to_code = inverse(scale);
  Vector error{};
  for (std::int64_t c = 0; c < group.size; ++c) {
    const Vector x = group.tile[c], loss = nearest_iq4(x * to_code).value * scale - x;
    error += group.weighed(loss * loss, c);
  }
  return error;
}

inline Vector plain_iq4(const Group& group) { return to_half(group.peak() / iq4_value(15)); }

constexpr double kTableShares[] = {0.75, 0.86, 0.97, 1.08, 1.2};

// The best among a scale and those refitted with the peak at shares of either end.
Vector search_iq4(const Group& group, Vector best) {
  constexpr int kShares = sizeof kTableShares / sizeof kTableShares[0];
  Vector least = iq4_error(group, best);
  for (int i = 0; i < 2 * kShares; ++i) {
    const double end = iq4_value(i < kShares ? 15 : 0) * kTableShares[i % kShares];
    const Vector to_code = inverse(group.peak() / static_cast<float>(end));
    Vector along{}, square{};
    for (std::int64_t c = 0; c < group.size; ++c) {
      const Vector x = group.tile[c], value = nearest_iq4(x * to_code).value;
      const Vector weighed = group.weighed(value, c);
      along += weighed * x;
      square += weighed * value;
    }
    const Vector scale = to_half(along * inverse(square)), error = iq4_error(group, scale);
    const Integers is_better = error < least;
    best = is_better ? scale : best;
    least = is_better ? error : least;
  }
  return best;
}
