#include "tensor_ops.hpp"

#include <type_traits>

namespace tandem {
namespace {

template <typename View>
void move(View& view, int dim, std::int64_t first) {
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(view.data)>>,
                                  const std::uint8_t, std::uint8_t>;
  if (view.data)
    view.data = static_cast<Byte*>(view.data) + first * view.strides[dim] * element_bytes(view.type);
}

}  // namespace

const TensorKernels& tensor_kernels([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return avx512_tensors();
  if (isa == "avx2" || isa == "avxvnni") return avx2_tensors();
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

Product part_of(const Product& call, std::int64_t first, std::int64_t count) {
  Product part = call;
  part.sizes[3] = count;
  move(part.b, 3, first);
  move(part.out, 3, first);
  return part;
}

}  // namespace tandem
