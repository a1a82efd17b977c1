"""Device `cuda` on CPU twins with the CPU's kernels: the plan changes no bit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tandem.devices.cuda.checks import Gpu
from tandem.devices.cuda.kernels import Prepared, TorchKernels
from tandem.experts.execution.batch import ExpertBatch
from tandem.experts.execution.expert_kernels import ExpertKernels, WeightSource
from tandem.hf import load, quantizer
from tandem.kernels.dense import CpuThreads
from tandem.machines import cuda as cuda_machine
from tests.experts.lazy_streams import LazyStreams


class _At(NamedTuple):
    """Experts at given addresses."""

    found: Sequence[int]

    def addresses(self) -> Sequence[int]:
        return self.found

    def images(self) -> Sequence[Tensor]:
        raise AssertionError("packed experts are read by their addresses")


class NativeKernels(TorchKernels):
    """The CPU's kernels on the twin's slots, which are in host memory."""

    def __init__(self) -> None:
        self._kernels = ExpertKernels(CpuThreads(num_threads=1))

    def prepare(self, batch: ExpertBatch, use: WeightSource) -> Prepared:
        at = _At(use.addresses())
        return Prepared(batch.token, lambda token: self._kernels.run(batch, at))

    def add_rows(self, rows: Tensor, row_of: Tensor, weights: Tensor, out: Tensor) -> None:
        out.copy_(self._kernels.prepare_sum(row_of, weights.float())(rows))


@contextmanager
def twin_gpu(streams: LazyStreams) -> Iterator[LazyStreams]:
    """Run models that are loaded for device `cuda` on these streams."""
    with pytest.MonkeyPatch.context() as patch:
        gpu = Gpu("twin", (9, 0), 1 << 30)
        patch.setattr(cuda_machine, "require_cuda", lambda *args, **options: gpu)
        patch.setattr(cuda_machine, "require_on_one_gpu", lambda model: 0)
        patch.setattr(cuda_machine, "best_kernels", lambda gpu: NativeKernels())
        patch.setattr(cuda_machine, "CudaStreams", lambda index: streams)
        for module in (load, quantizer):
            patch.setattr(module, "dense_device", lambda config, device_map: torch.device("cpu"))
        yield streams
