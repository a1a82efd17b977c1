"""The shadow device: in `with shadow_gpu() as gpu:` this machine has a GPU with CPU values.

The real host code of device `cuda` runs on it, from `tandem.load` to the last event. Its tensors
say `cuda:0` and cannot be mixed with the CPU's, forbidden waits raise, and events must order the
bytes that two streams use (see `order`). Only a real GPU can show instructions, bandwidths,
latencies and what the driver itself does.
"""

import ctypes
import functools
import importlib.util
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths

from tests.kernels.interpreter import interpreted
from tests.shadow.gpu import ShadowGpu
from tests.shadow.kernels import launched_kernels
from tests.shadow.tensor import _PRESENT, Shadow, met, pinned
from tests.shadow.torch_cuda import replacements

_GUARD = Path(__file__).with_name("guard.cpp")


@contextmanager
def shadow_gpu(
    *,
    total_bytes: int = 8 << 30,
    capability: tuple[int, int] = (8, 9),
    kernels: str = "twins",
    has_words: bool = True,
    has_batch: bool = True,
) -> Iterator[ShadowGpu]:
    """Simulate a GPU on this machine; at the end raise the first fault, even if it was caught
    before.

    `kernels` are "twins" (interpreted, but torch for experts), "interpreted", or "none", no Triton.
    """
    gpu = ShadowGpu(total_bytes)
    _PRESENT.append(gpu)
    _forget_devices()
    _device_guard().shadow_guard(1)
    lifted_before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # new tensors come by operations
    launched = launched_kernels(has_twins=kernels == "twins") if kernels != "none" else _no_triton()
    try:
        with pytest.MonkeyPatch.context() as patch, launched:
            for name, value in replacements(gpu, capability).items():
                patch.setattr(torch.cuda, name, value)
            patch.setattr(torch.version, "cuda", "12.8")
            _patch_tensors(patch, gpu)
            _patch_threads(patch)
            with met():
                from tests.shadow.driver import shadow_driver  # imports kernels, interpreted now

                with shadow_driver(gpu, has_words=has_words, has_batch=has_batch):
                    yield gpu
            assert not gpu.faults, "\n".join(dict.fromkeys(gpu.faults))
    finally:
        gpu.worker.close()
        _forget_devices()
        torch._C._set_only_lift_cpu_tensors(lifted_before)
        _device_guard().shadow_guard(0)
        _PRESENT.remove(gpu)


@functools.cache
def _device_guard() -> ctypes.CDLL:
    """Build `guard.cpp` (two seconds): `shadow_guard(1)` allows tensors on `cuda:0`; 0 ends it."""
    libraries = str(Path(torch.__file__).parent / "lib")
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "libguard.so")
        includes = [f"-I{folder}" for folder in include_paths()]
        command = ["c++", "-std=c++20", "-shared", "-fPIC", *includes, str(_GUARD), "-o", path]
        subprocess.run([*command, f"-L{libraries}", "-lc10"], check=True)
        return ctypes.CDLL(path)


def _forget_devices() -> None:
    """Clear caches that are keyed by device, because the next GPU is another one."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("tandem.devices.cuda", "tandem.decode.cuda", "tandem.triton_kernels")):
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def _patch_tensors(patch: pytest.MonkeyPatch, gpu: ShadowGpu) -> None:
    """Let modules accept GPU tensors, and record the host's accesses to pinned memory."""
    patch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    patch.setattr(Tensor, "is_pinned", lambda self, device=None: _is_pinned(gpu, self))
    patch.setattr(Tensor, "pin_memory", lambda self, device=None: pinned(self.clone()))
    for name in ("tolist", "numpy"):
        patch.setattr(Tensor, name, _looked_at(gpu, name, getattr(Tensor, name)))


def _is_pinned(gpu: ShadowGpu, tensor: Tensor) -> bool:
    # torch looks at the begin of the storage, which may lie before the pinned part.
    return gpu.pinned_at(tensor.untyped_storage().data_ptr()) is not None


def _looked_at(gpu: ShadowGpu, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Shadow):
            gpu.host_uses(self, name, writes=False)
        return method(self, *args, **kwargs)

    return look


def _patch_threads(patch: pytest.MonkeyPatch) -> None:
    run = threading.Thread.run

    def run_with_gpu(self: threading.Thread) -> None:
        if self.name.startswith("shadow"):
            return run(self)
        with met():
            return run(self)

    patch.setattr(threading.Thread, "run", run_with_gpu)


@contextmanager
def _no_triton() -> Iterator[None]:
    find = importlib.util.find_spec
    with interpreted() as patch:  # modules that are imported anyway are not compiled later
        patch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *package: None if name == "triton" else find(name, *package),
        )
        yield
