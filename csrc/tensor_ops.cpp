#include "tensor_ops.hpp"

#include <type_traits>

#include "cpu_features.hpp"

namespace tandem {
namespace {

template <typename View>
void move(View& view, int dim, std::int64_t first) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>,
                                  const std::uint8_t, std::uint8_t>;
  if (view.data)
    view.data = static_cast<Byte*>(view.data) + first * view.strides[dim] * element_bytes(view.type);
}

// The part of a call that writes contiguous rows of `width` values.
template <typename Call>
Call rows_of(const Call& call, int dim, std::int64_t first, std::int64_t count,
             std::int64_t width) {
  Call part = call;
  part.sizes[dim] = count;
  move(part.x, dim, first);
  std::int64_t rows = first;  // rows before the part
  for (int d = dim + 1; d < 3; ++d) rows *= call.sizes[d];
  part.out = static_cast<std::uint8_t*>(call.out) + rows * width * element_bytes(call.type);
  if constexpr (!std::is_same_v<Call, Softmax>)
    if (call.index) part.index = call.index + rows * width;
  return part;
}

}  // namespace

const TensorKernels& tensor_kernels([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (has_avx512(isa)) return avx512_tensors();
  if (has_avx2(isa)) return avx2_tensors();
#endif
  return portable_tensors();
}

Elementwise part_of(const Elementwise& call, int dim, std::int64_t first, std::int64_t count) {
  Elementwise part = call;
  part.sizes[dim] = count;
  move(part.a, dim, first);
  move(part.b, dim, first);
  move(part.c, dim, first);
  move(part.out, dim, first);
  return part;
}

Reduction part_of(const Reduction& call, int dim, std::int64_t first, std::int64_t count) {
  return rows_of(call, dim, first, count, 1);
}

Softmax part_of(const Softmax& call, int dim, std::int64_t first, std::int64_t count) {
  return rows_of(call, dim, first, count, call.sizes[3]);
}

Greatest part_of(const Greatest& call, int dim, std::int64_t first, std::int64_t count) {
  return rows_of(call, dim, first, count, call.top_k);
}

Product part_of(const Product& call, std::int64_t first, std::int64_t count) {
  Product part = call;
  part.sizes[3] = count;
  move(part.b, 3, first);
  move(part.out, 3, first);
  return part;
}

}  // namespace tandem
