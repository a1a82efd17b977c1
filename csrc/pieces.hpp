// Long work on matrices in memory or in mapped files, split into pieces that threads take in order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <span>
#include <system_error>
#include <thread>
#include <vector>

#include "memory.hpp"
#include "packed.hpp"

namespace tandem {

// Weights per piece: worth starting a thread, and the source still fits a core's cache.
inline constexpr std::int64_t kPieceWeights = 1 << 18;
// Pieces to prefetch: enough to keep a disk's queue full.
inline constexpr std::int64_t kPiecesAhead = 32;

// Some blocks of 16 rows of a matrix; `Call` has `rows` and `cols`.
template <class Call>
struct Piece {
  const Call* call;
  std::int64_t first, count;
};

template <class Call>
std::vector<Piece<Call>> cut(std::span<const Call> calls) {
  std::vector<Piece<Call>> pieces;
  for (const Call& call : calls) {
    const std::int64_t blocks = (call.rows + kBlockRows - 1) / kBlockRows;
    const std::int64_t step =
        std::max<std::int64_t>(1, kPieceWeights / std::max<std::int64_t>(1, call.cols) / kBlockRows);
    for (std::int64_t first = 0; first < blocks; first += step)
      pieces.push_back({&call, first, std::min(step, blocks - first)});
  }
  return pieces;
}

// The address range of a piece's source.
struct Extent {
  const void* begin;
  std::int64_t bytes;
};

// Calls `do_block(call, block)` for every block of all matrices in up to `num_threads` threads,
// until one returns false; prefetches `source_of(piece)`. Returns whether all were true. If the
// system gives fewer threads, those that exist do all the work.
template <class Call, class SourceOf, class DoBlock>
bool do_pieces(std::span<const Call> calls, int num_threads, SourceOf source_of, DoBlock do_block) {
  const std::vector<Piece<Call>> pieces = cut(calls);
  const auto total = static_cast<std::int64_t>(pieces.size());
  const auto ask_for = [&](std::int64_t number) {
    if (number < total) {
      const Extent source = source_of(pieces[static_cast<std::size_t>(number)]);
      read_ahead(source.begin, source.bytes);
    }
  };
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> is_well{true};
  const auto work = [&] {
    while (is_well.load(std::memory_order_relaxed)) {
      const std::int64_t number = next.fetch_add(1, std::memory_order_relaxed);
      if (number >= total) return;
      ask_for(number + kPiecesAhead);
      const Piece<Call>& piece = pieces[static_cast<std::size_t>(number)];
      for (std::int64_t block = piece.first; block < piece.first + piece.count; ++block)
        if (!do_block(*piece.call, block)) is_well.store(false, std::memory_order_relaxed);
    }
  };
  for (std::int64_t number = 0; number < kPiecesAhead; ++number) ask_for(number);
  std::vector<std::jthread> helpers;
  try {
    for (std::int64_t i = 1; i < std::min<std::int64_t>(num_threads, total); ++i)
      helpers.emplace_back(work);
  } catch (const std::system_error&) {
  }
  work();
  helpers.clear();  // joins them
  return is_well.load();
}

}  // namespace tandem
