// Unpacks codes in registers of any width: from planes of bits to unsigned bytes.
//
// `V` has the instruction set's operations: load, shift_left, shift_right, keep, either, look_up.
// Everything is in an anonymous namespace. Each file that includes this is compiled for another
// instruction set, and the linker would keep one copy of a shared function for all of them.
#pragma once

#include <cstdint>
#include <utility>

#include "packed.hpp"

// Functions that take sums by reference must be inlined; otherwise sums are kept in memory.
#define TANDEM_INLINE inline __attribute__((always_inline))
#define TANDEM_INLINED __attribute__((always_inline))  // after a lambda's parameters

namespace tandem {
namespace {

// Calls function(0) .. function(N - 1) with constants. Arrays indexed by constants become
// registers; those indexed in a loop that the compiler unrolls later do not.
template <int N, typename Function>
TANDEM_INLINE void each(const Function& function) {
  [&]<int... I>(std::integer_sequence<int, I...>) TANDEM_INLINED {
    (function(std::integral_constant<int, I>{}), ...);
  }(std::make_integer_sequence<int, N>{});
}

template <Format F>
constexpr int kBits = encoding(F).bits;

template <Format F>
constexpr bool kHasMinima = encoding(F).has_minima;

template <Format F>
constexpr std::int64_t kStripBytes = code_bytes(F, kStripCols);

// The factor for a half that has the bits of an e4m3 number, because their exponents' biases
// differ.
constexpr float kE4m3OfHalf = 256;

constexpr int kFoursOfStrip = kStripCols / 4;

// Groups per strip: more than one if a group has fewer columns than a strip.
template <Format F>
constexpr int kGroupsOfStrip =
    encoding(F).group == 0 || encoding(F).group > kStripCols
        ? 1
        : static_cast<int>(kStripCols / encoding(F).group);

// The bits of the J-th four columns in a plane of `Width` bits, shifted to bit `At`.
template <class V, int Width, int J, int At>
TANDEM_INLINE typename V::Register field(const std::uint8_t* plane) {
  constexpr int kPerByte = 8 / Width;
  constexpr int kDown = Width * (J % kPerByte) - At;
  typename V::Register bytes = V::load(plane + 64 * (J / kPerByte));
  if constexpr (Width == 8) return bytes;
  if constexpr (kDown > 0) bytes = V::template shift_right<kDown>(bytes);
  if constexpr (kDown < 0) bytes = V::template shift_left<-kDown>(bytes);
  return V::keep(bytes, static_cast<std::uint8_t>(((1 << Width) - 1) << At));
}

// Joins the planes of `Bits` bits, lowest first.
template <class V, int Bits, int J, int At = 0>
TANDEM_INLINE typename V::Register join(const std::uint8_t* planes) {
  constexpr int kWidth = Bits & 8 ? 8 : Bits & 4 ? 4 : Bits & 2 ? 2 : 1;
  const typename V::Register low = field<V, kWidth, J, At>(planes);
  if constexpr (Bits == kWidth) {
    return low;
  } else {
    const std::uint8_t* next = planes + kStripCols * kBlockRows * kWidth / 8;
    return V::either(low, join<V, Bits - kWidth, J, At + kWidth>(next));
  }
}

// Unsigned codes of the J-th four columns of a strip: one byte each, rows in the block's order.
template <class V, Format F, int J>
TANDEM_INLINE typename V::Register codes_of(const std::uint8_t* strip) {
  const typename V::Register stored = join<V, kBits<F>, J>(strip);
  if constexpr (encoding(F).table != nullptr) return V::look_up(encoding(F).table, stored);
  return stored;
}

}  // namespace
}  // namespace tandem
