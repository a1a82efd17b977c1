"""Tests of a layer in one graph on a real GPU: hits there, misses by the coordinator."""

from collections.abc import Callable

import pytest
import torch

from tandem.devices.cuda.hand_over_trial import find_signals
from tandem.devices.cuda.streams import CudaStreams
from tandem.experts.execution.executor import CpuExecutor
from tandem.experts.execution.routed_layers import native_layer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads, pack_dense
from tandem.kernels.engine import best_isa
from tandem.kernels.formats.weight_format import find_format
from tandem.kernels.native import TOKEN_DTYPES
from tests.experts.machines import FUNCTIONS, GEOMETRY, HIDDEN, make_store
from tests.gpu.models import DEVICE, IS_DRY

pytestmark = pytest.mark.skipif(IS_DRY, reason="needs the Triton kernels")
PATIENCE = 20.0


@pytest.mark.parametrize("resident", [(), (0, 2, 3, 7), tuple(range(8))], ids=len)
def test_a_captured_layer_is_answered(resident: tuple[int, ...]) -> None:
    from tandem.devices.cuda.handed_layers import HandedLayers
    from tandem.devices.cuda.handing import WaitWords
    from tandem.triton_kernels.experts import TritonExperts

    streams, store = CudaStreams(), make_store()
    signals = find_signals(streams)
    assert signals is not None
    native = [x for x in (native_layer(host, FUNCTIONS) for host in store) if x is not None]
    coordinator = _native.StepCoordinator(native, 1, best_isa())
    box = _native.MailboxLayout(
        GEOMETRY.num_layers, 1, GEOMETRY.top_k, HIDDEN, TOKEN_DTYPES[torch.float32]
    )
    memory = streams.pinned(box.num_bytes).zero_()
    number = coordinator.add_mailbox(1, GEOMETRY.top_k, TOKEN_DTYPES[torch.float32], memory)
    images, table = [], torch.zeros(GEOMETRY.num_layers, GEOMETRY.num_experts, dtype=torch.int64)
    for layer, host in enumerate(store):
        assert isinstance(host, PackedLayer)
        for expert in resident:
            images.append(host.buffers[expert].to(DEVICE))
            table[layer, expert] = images[-1].data_ptr()
    given_up = streams.pinned(64).view(torch.int32)[:1].zero_()
    words = WaitWords.on(torch.device(DEVICE, 0), given_up)
    layers = HandedLayers(store, box, memory, table.to(DEVICE), TritonExperts(), signals, words)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, HIDDEN, generator=random)
    weights, index = torch.rand(1, GEOMETRY.num_experts, generator=random).topk(GEOMETRY.top_k)
    given = (hidden.to(DEVICE), index.to(DEVICE), weights.to(DEVICE))

    def step() -> list[torch.Tensor | None]:
        return [layers(layer, *given, FUNCTIONS) for layer in range(GEOMETRY.num_layers)]

    def answered(run: Callable[[], object]) -> None:
        coordinator.begin_step(number, PATIENCE)
        run()
        coordinator.finish_step(PATIENCE)
        torch.cuda.synchronize()

    with torch.inference_mode():
        answered(step)  # compiles
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            results = step()
        for _ in range(3):
            answered(graph.replay)
    cpu = CpuExecutor(store, CpuThreads(num_threads=1))
    for layer, found in enumerate(results):
        assert found is not None
        expected = cpu.execute(layer, hidden, index, weights, FUNCTIONS)
        assert float((found.cpu() - expected).norm() / expected.norm()) < 0.03
    assert int(given_up) == 0
    coordinator.close()


@pytest.mark.parametrize("num_tokens", [1, 8, 100])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_packed_linear_layers(name: str, num_tokens: int) -> None:
    from tandem.triton_kernels.dense import copy_to_device, multiply

    random = torch.Generator().manual_seed(0)
    packed = pack_dense(torch.randn(520, 1024, generator=random) / 32, None, find_format(name))
    x = torch.randn(num_tokens, 1024, generator=random).bfloat16()
    found = multiply(x.to(DEVICE), copy_to_device(packed, torch.device(DEVICE))).cpu().float()
    expected = x.float() @ packed.values().T
    assert float((found - expected).norm() / expected.norm()) < 0.01
