"""The executor interface, and `CpuExecutor`, which computes every expert on the CPU.

`CpuExecutor` is the simplest implementation and the baseline of all others. A result does not
depend on which processor computed which expert: each routed token gives one fp32 vector, and a
token's vectors are added in the order of the router's top-k.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.execution.batch import CallSide, ExpertFunctions, RoutedCall
from tandem.experts.execution.device import Device
from tandem.experts.execution.expert_kernels import ExpertKernels
from tandem.experts.execution.layer_call import LayerCall
from tandem.experts.execution.routed_layers import can_read, can_run_steps, native_layer
from tandem.experts.execution.routing import Routing
from tandem.experts.execution.row_memory import RowMemory
from tandem.experts.store.host_store import HostLayer, HostStore
from tandem.experts.tracing.events import LayerExecuted, Listener
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.policy.plan import LayerLoad

# Limits the fp32 results of a long prompt: 2048 tokens x top-8 x 2048 values are 128 MiB.
MAX_TOKENS_AT_ONCE = 2048


def computed_in_chunks(call: RoutedCall, compute: Callable[[RoutedCall], Tensor]) -> Tensor:
    """Return a call's result, computed in chunks of at most `MAX_TOKENS_AT_ONCE` tokens."""
    if len(call.hidden) <= MAX_TOKENS_AT_ONCE:
        return compute(call)
    parts = zip(*[tensor.split(MAX_TOKENS_AT_ONCE) for tensor in call.tensors], strict=True)
    return torch.cat([compute(RoutedCall(call.layer, *part)) for part in parts])


class DirectCall(NamedTuple):
    """How native code performs a layer call alone, from the router's choice to the sum."""

    layer: _native.RoutedLayer
    choice: tuple[Tensor, Tensor] | None
    """Index and weights to use instead of the router's, filled at the start of each step; None:
    the router's."""
    report: Callable[[Tensor, int], None] | None
    """To be called after each call, with the index and the number of active experts; None: no
    report is needed."""
    add: Callable[[_native.Program, tuple[Tensor, Tensor, Tensor, Tensor]], None] | None = None
    """Adds the call on the tensors (hidden, index, weights, out) to a program; None: the program
    runs `layer` without help."""


class Executor(ABC):
    """Computes the experts of a model's experts modules.

    Most methods with a default announce steps; only executors that depend on steps override them.
    """

    cache: ExpertCache | None = None
    """The expert cache on a device; None if the CPU computes every expert."""
    device: Device | None = None
    """The device whose slots a replayed step may read without this executor; None without a device,
    or if every call must go through the executor."""
    needs_steps = False
    """Whether `begin_step` must be called before each forward pass, even a replayed one."""
    takes_drafts = True
    """Whether a decode step may have several tokens of a sequence and reject some of them later."""

    def __init__(self, store: HostStore) -> None:
        """Serve the layers of `store`, at first without listeners."""
        self.store = store
        self.listeners: list[Listener] = []

    @property
    def reads_disk(self) -> bool:
        """Whether experts may be read from a disk; captured steps may then have to be repeated."""
        return self.store.slots is not None

    @property
    def asks_ahead(self) -> bool:
        """Whether the executor itself runs each next layer's router ahead."""
        return False

    def expect(self, known: Sequence[LayerLoad]) -> None:  # noqa: B027
        """Announce the known loads (of layers routed by token id) of the next forward pass.

        They must be in the layers' order, and precede the pass's `begin_step`.
        """

    def catch_up(self) -> None:  # noqa: B027
        """Report now all layers that were computed but not yet reported to listeners."""

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:  # noqa: B027
        """Announce the tokens of the next forward pass; the ids are empty if unknown."""

    def execute(
        self,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        functions: ExpertFunctions,
    ) -> Tensor:
        """Compute the sum over k of weight * expert(hidden), in the shape and dtype of `hidden`.

        `hidden` is (n_tokens, hidden_size), `top_k_index` and `top_k_weights` (n_tokens, top_k).
        An id outside 0..num_experts-1 is padding and adds nothing.
        """
        return self.compute(RoutedCall(layer, hidden, top_k_index, top_k_weights), functions)

    @abstractmethod
    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        """Compute a call; see `execute`."""

    def settle(self) -> None:  # noqa: B027
        """Finish the work left by earlier layers, before a step is replayed without `execute`."""

    def repeat_step(self, num_tokens: int) -> None:  # noqa: B027
        """Announce that the last step's tokens are computed again, to check a recorded step."""

    def deferring(self) -> AbstractContextManager[None]:
        """Return a context in which layers may defer work that their results do not need."""
        return nullcontext()

    def direct_call(self, call: RoutedCall, functions: ExpertFunctions) -> DirectCall | None:
        """Return how native code performs calls like this one without the executor.

        Returns None if the executor must take part in such calls.
        """
        return None

    def close(self) -> None:  # noqa: B027
        """End all threads; the executor must not be used afterwards."""


@contextmanager
def unheard(executor: Executor | None) -> Iterator[None]:
    """Return a context in which an executor's listeners hear nothing (None: no executor).

    It is for trial steps: listeners count, learn from and show only steps that compute answers.
    """
    if executor is None:
        yield
        return
    executor.catch_up()
    listeners = executor.listeners
    kept = listeners[:]
    listeners.clear()  # in place, because recorded steps hold this list object
    try:
        yield
    finally:
        listeners[:] = kept


class CpuExecutor(Executor):
    """Computes every active expert on the CPU: packed experts natively, plain experts in torch."""

    def __init__(self, store: HostStore, threads: CpuThreads | None = None) -> None:
        """Serve the layers of a store; without `threads`, use one thread for each fast core."""
        super().__init__(store)
        self._kernels = ExpertKernels(threads or CpuThreads())
        self._rows = RowMemory()
        self._rows_lock = threading.Lock()  # several Python threads may call the same model

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        """Compute a call; see `execute`."""
        call = call.detached()
        if all(tensor.is_cpu for tensor in call.tensors):
            return self._execute(call, functions)
        on_host = RoutedCall(call.layer, *[tensor.to("cpu") for tensor in call.tensors])
        return self._execute(on_host, functions).to(call.hidden.device)

    def direct_call(self, call: RoutedCall, functions: ExpertFunctions) -> DirectCall | None:
        """Return the direct call of a packed layer; None if the kernels do not support it."""
        if type(self) is not CpuExecutor:  # a subclass computes differently
            return None
        layer = self.store[call.layer]
        native = native_layer(layer, functions)
        if native is None or not can_run_steps(layer, functions) or not can_read(call):
            return None
        if not all(tensor.is_contiguous() for tensor in call.tensors):
            return None

        def report(index: Tensor, num_active: int) -> None:
            if self.listeners:
                self.report(layer, index, num_active, index.numel())

        return DirectCall(native, None, report)

    def _execute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        layer = self.store[call.layer]
        return computed_in_chunks(call, lambda chunk: self._execute_chunk(layer, chunk, functions))

    def _execute_chunk(
        self, layer: HostLayer, call: RoutedCall, functions: ExpertFunctions
    ) -> Tensor:
        direct = self._kernels.run_directly(layer, functions, call)
        if direct is not None:
            out, num_active = direct
            if self.listeners:
                self.report(layer, call.top_k_index, num_active, call.top_k_index.numel())
            return out
        self._kernels.wake()  # threads wake up while tokens are sorted
        routing = Routing(call.top_k_index, layer.arrivals.num_experts)
        order = routing.fastest_order()
        with self._rows_lock:
            rows = self._rows(routing.num_routed, call.hidden.shape[1])
            side, work = CallSide(call.hidden, rows), LayerCall(layer, functions, routing, order)
            if order:
                self._kernels.run(work.batch(0, len(order), side))
            if self.listeners:
                self.report(layer, call.top_k_index, len(routing.experts), routing.num_routed)
            return work.prepare_result(side, call.top_k_weights, self._kernels.prepare_sum)()

    def report(self, layer: HostLayer, chosen: Tensor, num_active: int, num_routed: int) -> None:
        """Report a layer to the listeners: what its router chose, and how much was computed.

        `num_active` counts active experts, `num_routed` routed tokens.
        """
        event = LayerExecuted(
            layer=layer.layer,
            num_tokens=len(chosen),
            num_active_experts=num_active,
            num_expert_rows=num_routed,
            touched_bytes=num_active * (layer.num_bytes // layer.arrivals.num_experts),
            chosen=chosen,
        )
        for listener in self.listeners:
            listener(event)
