"""Captured steps with handed-over layers, on the CPU twins of a GPU and its graphs."""

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.decode.padded import PaddedBatch
from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.handed_steps import HandedSteps
from tandem.devices.cuda.kernels import TorchKernels
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.experts.store.packed_layer import PackedLayer
from tandem.hf.experts import expert_functions
from tandem.hf.machine.parts import ObservedModel
from tandem.hf.runtime import require_runtime
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.reference import expert_ffn
from tandem.machines.cuda import device_parts
from tandem.policy.step_path import CAPTURE_SIZES
from tests.decode.whole_pool import logits_of
from tests.experts.driver_library import DriverLibrary
from tests.experts.lazy_streams import LazyStreams
from tests.experts.test_handed_layers import HostSignals

if TYPE_CHECKING:
    from tandem.triton_kernels.rows import GroupedRows

TOKENS = [50, 61, 72, 83, 94, 105, 116, 41]
MOST_OFF = 0.02  # the CPU rounds what its experts read, and the reference does not
_HANDED = list[Callable[..., Tensor]]()  # what the operation calls, by number


@torch.library.custom_op("twin::handed", mutates_args=())
def handed(
    number: int,
    layer: int,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    router_input: Tensor | None,
) -> Tensor:
    """Hand over a layer as an operation that the twin's graph records."""
    return _HANDED[number](layer, hidden, index, weights, router_input)


class AddressedExperts:
    """Reads experts by address as the kernels do, but faster than Triton's interpreter."""

    def __init__(self, host: PackedLayer, activate: Callable[[Tensor], Tensor]) -> None:
        self._host, self._activate = host, activate

    def compute(
        self,
        layout: ExpertLayout,
        activation: Any,
        hidden: Tensor,
        rows: "GroupedRows",
        out: Tensor,
    ) -> None:
        for row, address in enumerate(rows.addresses.tolist()):
            if address:
                memory = (ctypes.c_uint8 * layout.num_bytes).from_address(address)
                weights = self._host.weights_in(torch.frombuffer(memory, dtype=torch.uint8))
                token = int(rows.row_token[row])
                out[row] = expert_ffn(hidden[token : token + 1], weights, self._activate)[0]

    def add_rows(self, *tensors: Tensor) -> None:
        raise AssertionError("a captured step combines by itself")


class NotedLayers:
    """The layers of a step as operations that the twin's graph records."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._router_inputs: dict[int, Tensor] = {}

    def take_router_input(self, layer: int, hidden: Tensor) -> None:
        self._router_inputs[layer] = hidden

    def __call__(
        self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor, _: ExpertFunctions
    ) -> Tensor:
        return handed(
            self._number, layer, hidden, index, weights, self._router_inputs.pop(layer, None)
        )


class NotedSteps(HandedSteps):
    """Captured steps whose layers the twin's graph records."""

    functions: ExpertFunctions
    error: str | None = None

    def guess_of(self, size: int, layer: int) -> list[list[int]]:
        """Return the prediction that the device has published for the next layer."""
        inner: Any = self._layers[size][1]
        box, top_k = inner._box, self._cache.geometry.top_k
        start = layer * box.layer_bytes + box.guess
        words = inner._memory[start : start + 4 * size * top_k].view(torch.int32)
        found: list[list[int]] = words.view(size, top_k).tolist()
        return found

    def layers(self, size: int) -> Any:
        inner, functions = super().layers(size), self.functions
        self.router_inputs: dict[int, Tensor] = {}

        def call(
            layer: int, hidden: Tensor, index: Tensor, weights: Tensor, router_input: Tensor | None
        ) -> Tensor:
            if self.error is not None:
                raise RuntimeError(self.error)
            if not self.is_under_way:  # stands for a capture's end, which does nothing on a GPU
                return torch.zeros_like(hidden)
            if router_input is not None:
                self.router_inputs[layer] = router_input.clone()
                inner.take_router_input(layer, router_input)
            found = inner(layer, hidden, index, weights, functions)
            assert found is not None
            return found

        _HANDED.append(call)
        return NotedLayers(len(_HANDED) - 1)


def executor_on_twins(observed: ObservedModel, library: DriverLibrary) -> HybridExecutor:
    streams = LazyStreams(is_eager=True)
    parts = device_parts(observed, streams=streams, device_kernels=TorchKernels())
    settings = observed.options.planner_settings()
    if observed.look_ahead_routers is not None:
        settings = settings.with_predictions((), CAPTURE_SIZES)
    cache = ExpertCache(
        observed.store, parts.device, parts.clock, observed.geometry, parts.machine, settings,
        parts.make_engine,
    )  # fmt: skip
    cache.resize(observed.geometry.num_layers * observed.geometry.num_experts // 2)
    executor = HybridExecutor(cache, parts.device, parts.kernels)
    layers = observed.native_layers(cache)
    assert layers is not None
    assert isinstance(parts.device, CudaDevice)
    host, functions = observed.store[0], expert_functions(observed.bound[0][0])
    assert isinstance(host, PackedLayer)
    experts: Any = AddressedExperts(host, functions.unpacked_activate or functions.activate)
    steps = NotedSteps(
        cache, layers, observed.threads, observed.model.dtype, device=parts.device,
        experts=experts, signals=HostSignals(), library=library.path,
        routers=observed.look_ahead_routers,
    )  # fmt: skip
    steps.functions = functions
    executor.captured = steps
    return executor


def steps_of(executor: HybridExecutor) -> NotedSteps:
    assert isinstance(executor.captured, NotedSteps)
    return executor.captured


def prompts(num_sequences: int) -> list[list[int]]:
    return [[40 + row] * (3 + 2 * row) for row in range(num_sequences)]


def expected_of(model: Any, texts: list[list[int]]) -> list[Tensor]:
    """Return the CPU's logits of prompts and of `TOKENS`, padded."""
    runtime = require_runtime(model)
    with runtime.using(runtime.cpu_executor()):
        return logits_of(PaddedBatch(model, texts, 0), len(texts), TOKENS)


def assert_alike(found: Sequence[Tensor] | Tensor, expected: Sequence[Tensor]) -> None:
    """Compare the logits of all steps."""
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < MOST_OFF


def check_slots(executor: HybridExecutor) -> None:
    """Assert that each slot holds the expert that the planner says."""
    steps_of(executor).leave()
    cache = executor.cache
    for key, slot in enumerate(cache.planner.residency.slot_of):
        if slot >= 0:
            layer, expert = divmod(key, cache.geometry.num_experts)
            (extent,) = cache.store[layer].extents(expert)
            memory = cache.engine.slots.memory(slot)
            assert torch.equal(memory[: len(extent.data)], extent.data)
