"""The shadow device's driver: words that streams write and wait for, and copies."""

import ctypes
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.devices.cuda import batch_copy, hand_over_trial, handed_steps
from tandem.devices.cuda.driver import Driver
from tests.experts.driver_library import DriverLibrary, FakeDriver
from tests.shadow.captures import launch
from tests.shadow.gpu import ShadowFaultError, ShadowGpu
from tests.shadow.tensor import present

_LIMIT_SECONDS = 60.0
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
_NO_BARRIER = 1  # CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
_STREAM_WORDS = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
_POINTERS, _SIZES = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)
_BATCH = (
    _POINTERS, _POINTERS, _SIZES, ctypes.c_size_t, ctypes.c_void_p, _SIZES, ctypes.c_size_t,
    _SIZES, ctypes.c_void_p,
)  # fmt: skip


@functools.cache
def native_library() -> DriverLibrary:
    """Return the library that native code loads, built once per process."""
    return DriverLibrary(Path(tempfile.mkdtemp(prefix="tandem-shadow-")))


@contextmanager
def shadow_driver(gpu: ShadowGpu, *, has_words: bool, has_batch: bool) -> Iterator[None]:
    """Install the driver: `has_words` enables stream operations, `has_batch` batched copies."""
    fake = FakeDriver()
    if has_words:
        for name, function in (("Write", _write), ("Wait", _wait)):
            made = ctypes.CFUNCTYPE(ctypes.c_int, *_STREAM_WORDS)(_refusing(function))
            fake.functions[f"cuStream{name}Value32", 11070] = made
    if has_batch:
        made = ctypes.CFUNCTYPE(ctypes.c_int, *_BATCH)(_refusing(_copy_batch))
        fake.functions["cuMemcpyBatchAsync", 12080] = made
    driver = Driver(fake)
    library = native_library()
    library.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand_over_trial, "open_driver", lambda: driver)
        patch.setattr(handed_steps, "DRIVER_LIBRARY", library.path)
        patch.setattr(batch_copy, "open_driver", lambda load: driver)
        yield


def _refusing(function: Callable[..., int]) -> Callable[..., int]:
    """Store a fault and return its error code, because nothing may raise through native code."""

    def call(*args: Any) -> int:
        try:
            return function(*args)
        except ShadowFaultError:
            return _INVALID_VALUE

    return call


def _word(address: int) -> ctypes.c_int32:
    if present().pinned_at(address) is None:
        present().fault("a stream's word is not in pinned memory")
    return ctypes.c_int32.from_address(address)


def _write(stream: int | None, address: int, value: int, flags: int) -> int:
    word = _word(address)
    if flags & _NO_BARRIER:
        present().fault("a word is written without a fence behind what it tells of")

    def write() -> None:
        word.value = value

    return _on(stream, "a word's write", write)


def _wait(stream: int | None, address: int, value: int, flags: int) -> int:
    word = _word(address)

    def wait() -> None:
        last = time.perf_counter() + _LIMIT_SECONDS
        while word.value != value:
            if time.perf_counter() > last:
                raise ShadowFaultError("a stream waits for a word that nobody sets")
            time.sleep(0)

    return _on(stream, "a wait for a word", wait)


def _on(stream: int | None, what: str, work: Any) -> int:
    gpu = present()
    if (stream or 0) != 0x1000 * gpu.stream_number:
        gpu.fault(f"{what} goes to another stream than the current one")
    launch(what, work, [])
    return 0


def _copy_batch(targets: Any, sources: Any, sizes: Any, count: int, *_: Any) -> int:
    gpu, stream = present(), _[-1]
    number = (stream or 0) // 0x1000
    moment = gpu.order.next(number)
    for place in range(count):
        memory = [
            torch.frombuffer(
                (ctypes.c_uint8 * sizes[place]).from_address(pointers[place]), dtype=torch.uint8
            )
            for pointers in (sources, targets)
        ]
        for each, writes in zip(memory, (False, True), strict=True):
            found = gpu.find(each.data_ptr())
            if found is None:
                gpu.fault("a batch of copies reads or writes memory that nobody knows")
            else:
                low = each.data_ptr()
                gpu.order.use(found, low, low + each.nbytes, moment, "a batch", writes=writes)
        memory[1].copy_(memory[0])
    gpu.launched.append("a batch of copies")
    return 0
