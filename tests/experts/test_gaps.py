"""Tests of experts with gaps between them, as in packed files: all paths give equal results."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tandem.core.errors import ModelError
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.executor import CpuExecutor, Executor
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.packed_layer import PackedLayer
from tandem.experts.store.pinning import pin_store
from tandem.kernels.dense import CpuThreads
from tandem.kernels.formats.weight_format import FILE_ALIGNMENT_BYTES, aligned
from tests.experts.captured import native_layers
from tests.experts.machines import (
    FUNCTIONS,
    GEOMETRY,
    make_executor,
    make_real_executor,
    make_store,
    route,
)
from tests.experts.twin_steps import TwinSteps

FUNCTIONS_IN_TORCH = dataclasses.replace(FUNCTIONS, native=None)


@pytest.fixture
def gapped() -> HostStore:
    store = make_store()
    for layer in store:
        (experts,) = layer.stored().values()
        stride = aligned(experts.shape[1], FILE_ALIGNMENT_BYTES)
        wide = torch.full((len(experts), stride), 0xA5, dtype=torch.uint8)
        wide[:, : experts.shape[1]] = experts
        layer.move_to({"experts": wide})
    return store


def outputs(executor: Executor, functions: ExpertFunctions) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        num_tokens = 12 if step == 0 else 1 + step % 3
        executor.begin_step(range(num_tokens), is_prefill=step == 0)
        for layer in range(GEOMETRY.num_layers):
            yield executor.execute(layer, *route(num_tokens, generator), functions)


def expected(functions: ExpertFunctions = FUNCTIONS) -> Iterator[torch.Tensor]:
    return outputs(CpuExecutor(make_store(), CpuThreads(num_threads=1)), functions)


def check(executor: Executor, functions: ExpertFunctions = FUNCTIONS) -> None:
    for actual, wanted in zip(outputs(executor, functions), expected(functions), strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("functions", [FUNCTIONS, FUNCTIONS_IN_TORCH], ids=["native", "torch"])
@pytest.mark.parametrize("num_slots", [None, 0, 8])
def test_answers_are_the_same(
    gapped: HostStore, num_slots: int | None, functions: ExpertFunctions
) -> None:
    if num_slots is None:
        check(CpuExecutor(gapped, CpuThreads(num_threads=1)), functions)
    else:
        check(make_executor(gapped, num_slots), functions)


def test_captured_steps_compute_and_copy_the_same(gapped: HostStore) -> None:
    executor = make_real_executor(gapped, 8)
    threads = CpuThreads(num_threads=1)
    executor.captured = TwinSteps(executor.cache, native_layers(gapped), threads, torch.float32)
    try:
        check(executor)
    finally:
        executor.close()


def test_an_expert_takes_as_much_as_without_gaps(gapped: HostStore) -> None:
    for layer, plain in zip(gapped, make_store(), strict=True):
        assert layer.image_bytes == plain.image_bytes
        for expert in range(GEOMETRY.num_experts):
            (found,), (expected,) = layer.extents(expert), plain.extents(expert)
            assert torch.equal(found.data, expected.data)
            assert found.data.is_contiguous()
            assert torch.equal(layer.weights(expert).up, plain.weights(expert).up)


def test_gaps_are_pinned_and_copied_with_the_experts(gapped: HostStore) -> None:
    before = [layer.stored()["experts"].clone() for layer in gapped]
    pinned = list[torch.Tensor]()

    def pin(tensor: torch.Tensor) -> bool:
        pinned.append(tensor)
        return True

    done = pin_store(gapped, pin, is_mapped=lambda _: True)
    assert done.moved_bytes == done.num_bytes == sum(tensor.nbytes for tensor in before)
    assert all(torch.equal(tensor, old) for tensor, old in zip(pinned, before, strict=True))
    check(CpuExecutor(gapped, CpuThreads(num_threads=1)))


@pytest.mark.parametrize("more", [1, 64, 4096])
def test_another_distance_is_refused(more: int) -> None:
    layer = make_store()[0]
    assert isinstance(layer, PackedLayer)
    stride = aligned(layer.layout.num_bytes, FILE_ALIGNMENT_BYTES)
    wide = torch.zeros(GEOMETRY.num_experts, stride + more, dtype=torch.uint8)
    with pytest.raises(ModelError, match=rf"of shape \(8, {stride + more}\) .*, expected experts"):
        layer.adopt("experts", wide)
