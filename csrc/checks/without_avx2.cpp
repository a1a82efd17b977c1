// Stubs for AVX2's and AVX-VNNI's kernels while sanitizers check AVX-512's, which take as long to
// compile. `available_isas` does not list these then, so the stubs are never called.
#include <cstdlib>

#include "attention.hpp"
#include "hyper_connections.hpp"
#include "kernels.hpp"
#include "quantize.hpp"
#include "recurrent.hpp"
#include "rowwise.hpp"
#include "sampling.hpp"
#include "tensor_ops.hpp"

namespace tandem {

const AttentionKernel& avx2_attention() { std::abort(); }
const HyperKernels& avx2_hyper() { std::abort(); }
const Kernels& avx2_kernels() { std::abort(); }
const Kernels& avxvnni_kernels() { std::abort(); }
const QuantizeKernels& avx2_quantize() { std::abort(); }
const RecurrentKernels& avx2_recurrent() { std::abort(); }
const RowKernels& avx2_rows() { std::abort(); }
const SamplingKernel& avx2_sampling() { std::abort(); }
const TensorKernels& avx2_tensors() { std::abort(); }

}  // namespace tandem
