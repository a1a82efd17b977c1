"""kt-kernel (KTransformers): its mixture-of-experts classes, called as its own wrappers call them.

For each format it uses the class that the wrappers choose on a processor with AVX-512, otherwise
the AVX2 class. With groups of 128 instead of 32, release 0.7.2 gives no result.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.kernels.peers.peer import Prepared, why_not_installed
from torch import Tensor

from tandem.bench.kernels import Work


@dataclass(frozen=True, slots=True)
class _Method:
    classes: tuple[str, ...]
    bits: int
    bits_per_weight: float
    group: int = 0


_METHODS = {
    "bf16": _Method(("AMXBF16_MOE", "AVX2BF16_MOE"), 16, 16),
    "int4-g32": _Method(("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE"), 4, 4.5, 32),
    "mxfp4": _Method(("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"), 4, 4.25, 32),
}


class KtKernel:
    """`num_spared` is the number of threads that it has fewer than Tandem."""

    def __init__(self, *, num_spared: int = 0) -> None:
        """Choose the threads; nothing is loaded yet."""
        self._num_spared = num_spared
        self.name = "kt-kernel" if num_spared == 0 else f"kt-kernel, {num_spared} thread fewer"

    def why_missing(self) -> str | None:
        """Return why it cannot run here; None: it can."""
        return why_not_installed("kt_kernel", "kt-kernel")

    def supports(self, format_name: str) -> bool:
        """Tell whether it supports a format."""
        return format_name in _METHODS

    def prepare(self, work: Work) -> Prepared:
        """Fill the store with random codes and let the library rearrange them."""
        library = importlib.import_module("kt_kernel").kt_kernel_ext
        method = _METHODS[work.format]
        name = next(name for name in method.classes if hasattr(library.moe, name))
        count = work.num_experts(method.bits_per_weight)
        threads = max(1, work.num_threads - self._num_spared)
        pool = _thread_pool(library, threads)
        mask = torch.zeros(
            count, dtype=torch.bool
        )  # no expert is on a GPU; it is read in each call
        config, kept = _config(library, work, method, mask)
        config.pool = pool.backend_
        experts = getattr(library.moe, name)(config)
        order = torch.arange(count)
        pool.submit(experts.load_weights_task(order.data_ptr()))
        pool.sync()
        kept.clear()  # the library has its own copy
        run = _Run(pool, experts, work, mask)
        run(1, 0)
        if not run.has_result():
            raise OSError(f"{name} returned no result")
        weights = 3 * work.hidden_size * work.intermediate_size * work.num_active
        return Prepared(
            run, int(weights * method.bits_per_weight / 8), f"{name}, {threads} threads"
        )


class _Run:
    """One call: every token uses the same experts, the next ones in each call."""

    def __init__(self, pool: Any, experts: Any, work: Work, mask: Tensor) -> None:
        self._pool, self._experts, self._work, self._mask = pool, experts, work, mask
        self._rows = torch.randn(work.max_tokens, work.hidden_size).bfloat16()
        self._out = torch.zeros_like(self._rows)
        self._weights = torch.full((work.max_tokens, work.num_active), 1 / work.num_active)

    def __call__(self, tokens: int, call: int) -> None:
        active = self._work.num_active
        chosen = (torch.arange(active) + call * active) % len(self._mask)
        ids = chosen.expand(tokens, active).contiguous()
        number = torch.tensor([tokens], dtype=torch.int32)
        task = self._experts.forward_task(
            number.data_ptr(), active, ids.data_ptr(), self._weights.data_ptr(),
            self._rows.data_ptr(), self._out.data_ptr(), False,
        )  # fmt: skip
        self._pool.submit(task)
        self._pool.sync()

    def has_result(self) -> bool:
        """Tell whether the first token's output was computed; some classes return at once."""
        return bool(self._out[0].any()) and bool(self._out[0].isfinite().all())


def _thread_pool(library: Any, num_threads: int) -> Any:
    config = library.WorkerPoolConfig()
    config.subpool_count = 1
    config.subpool_numa_map = [0]
    config.subpool_thread_count = [num_threads]
    return library.CPUInfer(config)


def _config(library: Any, work: Work, method: _Method, mask: Tensor) -> tuple[Any, list[Tensor]]:
    """Return the layer's description, and the tensors that must stay alive until it is loaded."""
    hidden, inner, count = work.hidden_size, work.intermediate_size, len(mask)
    config = library.moe.MOEConfig(count, work.num_active, hidden, inner, mask.data_ptr())
    config.layer_idx = 0
    config.max_len = max(work.max_tokens, 64)
    kept: list[Tensor] = []
    for name, rows, cols in (
        ("gate", inner, hidden),
        ("up", inner, hidden),
        ("down", hidden, inner),
    ):
        codes, scales = _random_matrix(method, rows, cols)
        kept += [codes, scales]
        # All experts are loaded from one: the library copies each to its own memory.
        setattr(config, f"{name}_projs", [[codes.data_ptr()] * count])
        setattr(config, f"{name}_scales", [[scales.data_ptr()] * count])
    if method.group:
        config.quant_config.bits = method.bits
        config.quant_config.group_size = method.group
        config.quant_config.zero_point = False
    return config, kept


def _random_matrix(method: _Method, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    if method.bits == 16:
        codes = (torch.randn(rows, cols) * 0.01).bfloat16()
        return codes, torch.zeros(1)
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
    return codes, torch.full((rows, cols // method.group), 0.0078125, dtype=torch.bfloat16)
