#include "quantize.hpp"

#include <algorithm>

#include "cpu_features.hpp"
#include "pieces.hpp"

namespace tandem {
namespace {

const QuantizeKernels& quantize_kernels([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (has_avx512(isa)) return avx512_quantize();
  if (has_avx2(isa)) return avx2_quantize();
#endif
  return portable_quantize();
}

// The extent of a piece's weights; for a matrix that is not row-major, that of all weights.
Extent source_of(const Piece<QuantizeCall>& piece) {
  const QuantizeCall& call = *piece.call;
  const std::int64_t size = call.type == SourceType::kFp32 ? 4 : 2;
  const auto* begin = static_cast<const std::uint8_t*>(call.source);
  if (call.col_stride != 1)
    return {begin, size * ((call.rows - 1) * call.row_stride + (call.cols - 1) * call.col_stride + 1)};
  const std::int64_t first = piece.first * kBlockRows;
  const std::int64_t count = std::min(call.rows - first, piece.count * kBlockRows);
  return {begin + size * first * call.row_stride, size * ((count - 1) * call.row_stride + call.cols)};
}

}  // namespace

bool quantize(std::span<const QuantizeCall> calls, const std::string& isa, int num_threads) {
  const QuantizeKernels& kernels = quantize_kernels(isa);
  return do_pieces(calls, num_threads, source_of,
                   [&](const QuantizeCall& call, std::int64_t block) {
                     return kernels.round_block(call, block);
                   });
}

}  // namespace tandem
