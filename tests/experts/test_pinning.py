"""Tests of pinning: it stops at the system's limit and reports it, and copies mapped files."""

import warnings
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.checkpoint.mapped_files import find_mapped
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.pinning import KEPT_FREE_BYTES, pin_store
from tandem.kernels.dense import CpuThreads
from tandem.kernels.memory import allocate
from tests.experts.faults import FaultyDevice
from tests.experts.machines import FUNCTIONS, make_store, route


def test_all_is_pinned_without_a_limit() -> None:
    store = make_store()
    device = FaultyDevice(1 << 20, ExpertKernels(CpuThreads(num_threads=1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pinned = pin_store(store, device.pin)
    assert pinned == (store.num_bytes, store.num_bytes, 0, None)


def test_a_limit_is_respected_and_told() -> None:
    store = make_store()
    limit = store[0].num_bytes + 10
    device = FaultyDevice(1 << 20, ExpertKernels(CpuThreads(num_threads=1)))
    device.may_pin_bytes = limit
    with pytest.warns(UserWarning, match=r"only .* of .* of experts could be pinned.*ulimit -l"):
        pinned = pin_store(store, device.pin)
    assert (pinned.num_bytes, pinned.total_bytes) == (store[0].num_bytes, store.num_bytes)


def mapped_store(directory: Path) -> HostStore:
    """Return a store whose experts are in a mapped checkpoint file."""
    store, file = make_store(), directory / "packed.safetensors"
    save_file({str(layer.layer): layer.stored()["experts"] for layer in store}, file)
    with safe_open(file, "pt") as opened:
        for layer in store:
            layer.move_to({"experts": opened.get_tensor(str(layer.layer))})
    return store


def test_mapped_layers_are_copied_out_first_and_compute_the_same(tmp_path: Path) -> None:
    store = mapped_store(tmp_path)
    is_mapped = find_mapped()
    assert all(is_mapped(layer.stored()["experts"]) for layer in store)
    call = route(3, torch.Generator().manual_seed(0))
    expected = CpuExecutor(make_store(), CpuThreads(num_threads=1)).execute(1, *call, FUNCTIONS)
    pinned = list[Tensor]()

    def pin(tensor: Tensor) -> bool:
        pinned.append(tensor)
        return True

    done = pin_store(store, pin, is_mapped=is_mapped)
    assert done == (store.num_bytes, store.num_bytes, store.num_bytes, None)
    assert not any(is_mapped(tensor) for tensor in pinned)
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in pinned)
    assert [t.data_ptr() for t in pinned] == [
        layer.stored()["experts"].data_ptr() for layer in store
    ]
    out = CpuExecutor(store, CpuThreads(num_threads=1)).execute(1, *call, FUNCTIONS)
    assert torch.equal(out, expected)


def page_flags(tensor: Tensor) -> set[str]:
    """Return the kernel's flags of a tensor's pages: "sh" shared, "hg" huge if possible."""
    address, is_here = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, last = (int(end, 16) for end in name.split("-"))
            is_here = first <= address < last
        elif is_here and name == "VmFlags:":
            return set(rest.split())
    raise AssertionError("nothing is mapped there")


def test_experts_moved_off_mapped_files_lie_as_packed_ones_do(tmp_path: Path) -> None:
    """They are not on 4 KB pages of shared memory, where every read walks the page table."""
    store = mapped_store(tmp_path)
    pin_store(store, lambda tensor: True, is_mapped=find_mapped())
    packed = page_flags(allocate(1 << 20))
    for layer in store:
        moved = page_flags(layer.stored()["experts"])
        assert "sh" not in moved
        assert ("hg" in moved) == ("hg" in packed)


def test_mapped_layers_stay_where_they_are_without_memory_for_a_copy(tmp_path: Path) -> None:
    store = mapped_store(tmp_path)
    free = iter([store[0].num_bytes + KEPT_FREE_BYTES, KEPT_FREE_BYTES])
    is_mapped = find_mapped()
    with pytest.warns(UserWarning, match=r"mapped files, and 1 GiB of host memory are too few"):
        done = pin_store(
            store, lambda tensor: True, is_mapped=is_mapped, free_bytes=lambda: next(free)
        )
    assert done.num_bytes == done.moved_bytes == store[0].num_bytes
    assert is_mapped(store[1].stored()["experts"])


def test_what_is_refused_where_it_lies_is_tried_on_pages_of_its_own() -> None:
    store = make_store()
    before = {layer.stored()["experts"].data_ptr() for layer in store}
    done = pin_store(store, lambda tensor: tensor.data_ptr() not in before)
    assert done == (store.num_bytes, store.num_bytes, store.num_bytes, None)
