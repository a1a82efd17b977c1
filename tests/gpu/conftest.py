"""Tests that need a GPU: `make test-gpu`. Without a GPU they are skipped, and their twins run.

A dry run finds errors in the tests themselves before anybody pays for a GPU: CPU twins replace the
GPU, and measurements are made up.

    TANDEM_DRY_GPU=1 pytest tests/gpu
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.decode.cuda import slots
from tandem.devices.cuda.checks import Gpu
from tandem.devices.cuda.kernels import TorchKernels
from tandem.hf import load, quantizer
from tandem.machines import cuda as cuda_machine
from tests.decode.twin_capture import TwinCapture
from tests.experts.lazy_streams import LazyStreams
from tests.gpu.models import IS_DRY

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the tests of this directory, and skip them without a GPU."""
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # Drivers and CUDA builds give other warnings than CPU builds; tests must not fail.
            item.add_marker(pytest.mark.filterwarnings("default"))
            if not (IS_DRY or torch.cuda.is_available()):
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def twins_in_a_dry_run() -> Any:
    """Replace the GPU by the twins."""
    if not IS_DRY:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        gpu = Gpu("dry", (9, 0), 1 << 40)
        patch.setattr(cuda_machine, "require_cuda", lambda *args, **options: gpu)
        patch.setattr(cuda_machine, "require_on_one_gpu", lambda model: 0)
        patch.setattr(cuda_machine, "best_kernels", lambda gpu: TorchKernels())
        patch.setattr(
            cuda_machine,
            "CudaStreams",
            lambda index: LazyStreams(total_bytes=1 << 40, is_eager=True),
        )
        patch.setattr(slots, "make_cuda_capture", lambda model: TwinCapture)
        for module in (load, quantizer):
            patch.setattr(module, "dense_device", lambda config, device_map: torch.device("cpu"))
        for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
            patch.setattr(torch.cuda, name, lambda *args: None)
        for name in ("set_sync_debug_mode", "set_per_process_memory_fraction"):
            patch.setattr(torch.cuda, name, lambda *args: None)
        patch.setattr(torch.cuda, "max_memory_reserved", lambda *args: 0)
        yield
