#include "quantize.hpp"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "memory.hpp"

namespace tandem {
namespace {

// What a thread takes at a time: worth a thread's start, and its source stays in a core's cache.
constexpr std::int64_t kPieceWeights = 1 << 18;
// Pieces that are asked for ahead: enough to keep a disk's queue full.
constexpr std::int64_t kAhead = 32;

const QuantizeKernels& quantize_kernels([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return avx512_quantize();
  if (isa == "avx2" || isa == "avxvnni") return avx2_quantize();
#endif
  return portable_quantize();
}

// Some blocks of a matrix.
struct Piece {
  const QuantizeCall* call;
  std::int64_t first, count;
};

std::vector<Piece> cut(std::span<const QuantizeCall> calls) {
  std::vector<Piece> pieces;
  for (const QuantizeCall& call : calls) {
    const std::int64_t blocks = (call.rows + kBlockRows - 1) / kBlockRows;
    const std::int64_t step =
        std::max<std::int64_t>(1, kPieceWeights / std::max<std::int64_t>(1, call.cols) / kBlockRows);
    for (std::int64_t first = 0; first < blocks; first += step)
      pieces.push_back({&call, first, std::min(step, blocks - first)});
  }
  return pieces;
}

struct Memory {
  const void* begin;
  std::int64_t bytes;
};

// Where a piece's weights lie; of a matrix that is not row by row, where all of it lies.
Memory source_of(const Piece& piece) {
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
  const std::vector<Piece> pieces = cut(calls);
  const auto total = static_cast<std::int64_t>(pieces.size());
  const auto ask_for = [&](std::int64_t number) {
    if (number < total) {
      const Memory source = source_of(pieces[static_cast<std::size_t>(number)]);
      read_ahead(source.begin, source.bytes);
    }
  };
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> fits{true};
  const auto work = [&] {
    while (fits.load(std::memory_order_relaxed)) {
      const std::int64_t number = next.fetch_add(1, std::memory_order_relaxed);
      if (number >= total) return;
      ask_for(number + kAhead);
      const Piece& piece = pieces[static_cast<std::size_t>(number)];
      for (std::int64_t block = piece.first; block < piece.first + piece.count; ++block)
        if (!kernels.round_block(*piece.call, block)) fits.store(false, std::memory_order_relaxed);
    }
  };
  for (std::int64_t number = 0; number < kAhead; ++number) ask_for(number);
  std::vector<std::jthread> helpers;
  for (std::int64_t i = 1; i < std::min<std::int64_t>(num_threads, total); ++i)
    helpers.emplace_back(work);
  work();
  helpers.clear();  // waits for them
  return fits.load();
}

}  // namespace tandem
