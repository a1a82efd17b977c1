#include "quantize.hpp"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace tandem {
namespace {

// What a thread should have to do to be worth its start.
constexpr std::int64_t kWeightsPerThread = 1 << 18;

const QuantizeKernels& quantize_kernels([[maybe_unused]] const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512") return avx512_quantize();
  if (isa == "avx2" || isa == "avxvnni") return avx2_quantize();
#endif
  return portable_quantize();
}

}  // namespace

bool quantize(const QuantizeCall& call, const std::string& isa, int num_threads) {
  const QuantizeKernels& kernels = quantize_kernels(isa);
  const std::int64_t blocks = (call.rows + kBlockRows - 1) / kBlockRows;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> fits{true};
  const auto work = [&] {
    while (fits.load(std::memory_order_relaxed)) {
      const std::int64_t block = next.fetch_add(1, std::memory_order_relaxed);
      if (block >= blocks) return;
      if (!kernels.round_block(call, block)) fits.store(false, std::memory_order_relaxed);
    }
  };
  const std::int64_t worth = call.rows * call.cols / kWeightsPerThread;
  std::vector<std::jthread> helpers;
  for (std::int64_t i = 1; i < std::min<std::int64_t>(num_threads, worth); ++i)
    helpers.emplace_back(work);
  work();
  helpers.clear();  // waits for them
  return fits.load();
}

}  // namespace tandem
