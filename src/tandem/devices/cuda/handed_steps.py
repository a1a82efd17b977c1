"""Captured steps on a GPU: graphs without a break, whose layers the coordinator answers.

    begin     the host's table, already without the experts that plans evict, is copied to the
              device
      -> the graph: consists of kernels alone, so that its launch costs little; each layer is
                 handed over
      -> finish  all layers have been answered; the GPU may still compute what follows the layers

While a step runs, the copying thread also writes entries of the device's table, if the driver
supports that. The next copy of the host's table may overwrite such an entry with 0; its expert is
then a miss once.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tandem.core.errors import TandemWarning
from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.driver import DRIVER_LIBRARY
from tandem.devices.cuda.hand_over_trial import find_signals
from tandem.devices.cuda.signals import Signals
from tandem.devices.cuda.streams import Event, Stream
from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.execution.captured_steps import PATIENCE_SECONDS, CapturedSteps
from tandem.experts.execution.device import DeviceLostError
from tandem.experts.execution.look_ahead_routers import LookAheadRouter
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels import _native
from tandem.kernels.dense import CpuThreads
from tandem.kernels.native import TOKEN_DTYPES
from tandem.policy.plan import LayerLoad
from tandem.policy.step_path import CAPTURE_SIZES

if TYPE_CHECKING:
    from tandem.devices.cuda.handed_layers import HandedLayers
    from tandem.devices.cuda.handing import WaitWords
    from tandem.triton_kernels.experts import TritonExperts

_LOOK_SECONDS = 5e-5
_SPINNING_SECONDS = 5e-3  # longer than a step's output head takes


class HandedSteps(CapturedSteps):
    """Runs captured steps on a GPU; one object serves one expert cache and one dtype of tokens."""

    def __init__(
        self,
        cache: ExpertCache,
        layers: Sequence[_native.RoutedLayer],
        threads: CpuThreads,
        dtype: torch.dtype,
        *,
        device: CudaDevice,
        experts: "TritonExperts",
        signals: Signals,
        library: str | None,
        bytes_per_second: float | None = None,
        routers: Sequence[LookAheadRouter | None] | None = None,
    ) -> None:
        """Start the coordinator's threads; `experts` compute the hits.

        `routers` has an entry for each layer but the first: its router, or None if that router
        cannot be run ahead. `library` is the driver library, whose functions copy experts; None:
        slots are in host memory. Raises `RuntimeError` if the library lacks a function.
        """
        geometry, streams = cache.geometry, device.streams
        shape = geometry.num_layers, geometry.num_experts
        with torch.inference_mode(False):
            host = streams.pinned(8 * shape[0] * shape[1]).view(torch.int64).view(shape).zero_()
            self._device_table = torch.zeros(shape, dtype=torch.int64, device=streams.device)
        super().__init__(cache, layers, threads, host.numpy(), bytes_per_second=bytes_per_second)
        self._device, self._streams, self._dtype = device, streams, dtype
        self._host_table, self._experts, self._signals = host, experts, signals
        first = cache.store[0]
        assert isinstance(first, PackedLayer), "what is handed over is packed"
        self._hidden_size = first.layout.hidden_size
        self._words, self._routers = self._wait_words(), routers or ()
        self._layers: dict[int, tuple[int, HandedLayers]] = {}  # size -> (mailbox, layers)
        self._begin: Event | None = None
        self._end: Event | None = None
        self._link: _native.DriverLink | None = None
        self.is_given_up = False
        """Whether hand-overs failed, so that steps run as graph segments."""
        if library is not None:
            streams.run(Stream.COMPUTE, lambda: self._open(library))  # makes this GPU current

    def _wait_words(self) -> "WaitWords":
        from tandem.devices.cuda.handing import WaitWords

        with torch.inference_mode(False):
            given_up = self._streams.pinned(64).view(torch.int32)[:1].zero_()
        return WaitWords.on(self._streams.device, given_up)

    def _open(self, library: str) -> None:
        self._link = _native.DriverLink(library, self._device_table.data_ptr())

    def link(self) -> _native.DriverLink | None:
        """Return the copying thread's access to the GPU; None if slots are in host memory."""
        return self._link

    def layers(self, size: int) -> "HandedLayers":
        """Return the object that queues the layers of a step of `size` tokens.

        `size` must be at most `MAX_GRAPH_TOKENS`.
        """
        from tandem.devices.cuda.handed_layers import HandedLayers

        if size not in self._layers:
            box, memory = self._mailbox(size)
            top_k, kind = self._cache.geometry.top_k, TOKEN_DTYPES[self._dtype]
            number = self.coordinator.add_mailbox(size, top_k, kind, memory)
            self._layers[size] = (
                number,
                HandedLayers(
                    self._cache.store, box, memory, self._device_table, self._experts,
                    self._signals, self._words, fetches=self.fetches(size),
                    routers=self._routers_for(size),
                ),
            )  # fmt: skip
        return self._layers[size][1]

    def _routers_for(self, size: int) -> Sequence[LookAheadRouter | None]:
        """Return the routers that a step of `size` tokens runs ahead; empty if it runs none."""
        return self._routers if self.asks(size) else ()

    def _mailbox(self, size: int) -> tuple[_native.MailboxLayout, Tensor]:
        """Return the layout of a mailbox for steps of `size` tokens, and new memory of zeros."""
        geometry, kind = self._cache.geometry, TOKEN_DTYPES[self._dtype]
        box = _native.MailboxLayout(
            geometry.num_layers, size, geometry.top_k, self._hidden_size, kind
        )
        with torch.inference_mode(False):
            return box, self._streams.pinned(box.num_bytes)[: box.num_bytes].zero_()

    def compilations(self) -> list[Callable[[], None]]:
        """Return callables that compile the hand-over kernels, so that no capture has to."""
        return [partial(self._launch_once, size) for size in CAPTURE_SIZES]

    def _launch_once(self, size: int) -> None:
        """Compile the kernels of steps of `size` tokens: queue a layer that needs no answer."""
        from tandem.devices.cuda.handed_layers import HandedLayers

        box, memory = self._mailbox(size)
        store, table, geometry = self._cache.store, self._device_table, self._cache.geometry
        layers = HandedLayers(
            store, box, memory, table, self._experts, self._signals, self._words,
            fetches=self.fetches(size), routers=self._routers_for(size),
        )  # fmt: skip
        with torch.inference_mode(False):
            hidden = torch.zeros(size, self._hidden_size, dtype=self._dtype, device=table.device)
        layers.launch_once(hidden, geometry.top_k)

    def begin(self, size: int, known: Sequence[LayerLoad] = ()) -> None:
        """Begin a step of `size` tokens; call this before its graph is launched.

        `known` are the step's known loads.
        """
        number, _ = self._layers[size]
        # The known loads depend on the last step's tokens, so that step has ended.
        if known and self._end is not None:
            self._wait_for(self._end)
        if self._begin is not None and self._end is not None and self._end.query():
            self._device.add_busy(self._streams.between(self._begin, self._end))
        self._begin = self._end = None
        self._words.given_up.zero_()
        self.begin_on(number, size, known)
        self._streams.run(Stream.COMPUTE, self._bring_table)
        self._begin = self._streams.record(Stream.COMPUTE, is_timed=True)

    def _bring_table(self) -> None:
        self._device_table.copy_(self._host_table, non_blocking=True)

    def finish(self, *, has_listeners: bool) -> None:
        """End a step whose graph has been launched.

        Raises `DeviceLostError` if the device does not recover, and `RuntimeError` if the device
        stopped waiting for a layer's answer: the step's results must then not be used.
        """
        self._end = self._streams.record(Stream.COMPUTE, is_timed=True)
        try:
            super().finish(has_listeners=has_listeners)
        except _native.StepLostError:
            self.wait_for_device()
            raise
        if self._signals.wait_seconds > 0:
            self._wait_for(self._end)  # even the last layer's wait may expire
            if int(self._words.given_up):
                raise RuntimeError(
                    f"{self._streams.name} has waited for {self._signals.wait_seconds:g} seconds "
                    "for a layer's answer, and went on without it"
                )

    def wait_for_device(self) -> None:
        """Wait for all queued work; raises `DeviceLostError` if it does not end in time."""
        self._wait_for(self._streams.record(Stream.COMPUTE))

    def _wait_for(self, end: Event) -> None:
        begin = time.perf_counter()
        while not end.query():
            waited = time.perf_counter() - begin
            if waited > PATIENCE_SECONDS:
                raise DeviceLostError(
                    f"{self._streams.name} has not come to the end of a decode step for "
                    f"{PATIENCE_SECONDS:.0f} seconds; start the program again"
                )
            if waited > _SPINNING_SECONDS:
                time.sleep(_LOOK_SECONDS)


def handed_steps(
    cache: ExpertCache,
    layers: Sequence[_native.RoutedLayer],
    threads: CpuThreads,
    dtype: torch.dtype,
    device: CudaDevice,
    bytes_per_second: float | None,
    routers: Sequence[LookAheadRouter | None] | None = None,
) -> HandedSteps | None:
    """Return the object that runs captured steps; None if layers cannot be handed over.

    If GPU and host cannot signal each other, a warning says so. There is no warning if the device
    has no kernels for grouped experts. In both cases steps run as graph segments. `routers` is as
    in `HandedSteps`.
    """
    experts, is_gpu = device.grouped_experts, device.streams.device.type == "cuda"
    if experts is None:
        return None
    signals = find_signals(device.streams)
    reason = "GPU and host cannot signal each other in a graph"
    if signals is not None:
        try:
            return HandedSteps(
                cache, layers, threads, dtype, device=device, experts=experts, signals=signals,
                library=DRIVER_LIBRARY if is_gpu else None, bytes_per_second=bytes_per_second,
                routers=routers,
            )  # fmt: skip
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
    warnings.warn(
        f"decode steps are captured with a break at the experts of each layer, slower: {reason}",
        TandemWarning,
        stacklevel=2,
    )
    return None
