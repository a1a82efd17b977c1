"""Computes resident layers inside a graph segment, and reports them afterwards.

A step that is captured whole runs no code of the executor, so the executor's listeners would miss
the step's layers. The routers' choices therefore stay in the step's memory. They are copied to the
host after each replay and reported after the next launch: one step late, without a wait.
"""

from collections import deque
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.devices.cuda.device import CudaDevice
from tandem.devices.cuda.resident import ResidentLayers, resident_event
from tandem.devices.cuda.streams import Event, Stream
from tandem.experts.cache.clock import Clock
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.executor import Executor

_HOST_COPIES = 2  # one is read while the next step's is written


class _Replay(NamedTuple):
    """A launched replay whose layers are not yet reported; `begin` and `end` surround its work."""

    begin: Event
    end: Event
    chosen: Tensor
    """The routers' choices, (layers, n_tokens, top_k), on the host; complete after `end`."""


class GraphedLayers:
    """The `GraphLayers` of one captured step whose experts are all resident."""

    def __init__(
        self, executor: Executor, device: CudaDevice, clock: Clock, layers: ResidentLayers
    ) -> None:
        """Take `layers`, which compute on `device`, and `executor`, whose listeners get reports."""
        self._executor, self._device = executor, device
        self._clock, self._layers = clock, layers
        self._chosen: dict[int, Tensor] = {}  # by layer: (n_tokens, top_k) in the step's memory
        self._hosts: deque[Tensor] = deque()  # in turns
        self._begin: Event | None = None
        self._replays: deque[_Replay] = deque()  # not yet reported

    def prepare(self, num_tokens: int) -> None:
        """Allocate the memory that must exist before a step of `num_tokens` is captured."""
        self._layers.prepare(num_tokens)

    def __call__(
        self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor, functions: ExpertFunctions
    ) -> Tensor | None:
        """Queue a layer's experts and return their result; None: the layer needs a graph break."""
        if not self._layers.serves(functions):
            return None
        self._chosen[layer] = index
        return self._layers.execute(layer, hidden, index, weights, functions)

    def take_router_input(self, layer: int, hidden: Tensor) -> bool:
        """Return True and do nothing: with all experts resident, no router is run ahead."""
        return True

    def around(self) -> AbstractContextManager[None]:
        """Return the executor's context manager inside which it may defer work of graph breaks."""
        return self._executor.deferring()

    def give_up(self, error: Exception) -> bool:
        """Return False: capturing without these layers would not help."""
        return False

    def begin_step(self) -> None:
        """Record an event where a replay begins, unless all layers are graph breaks."""
        if not self._chosen:  # all layers are graph breaks
            return
        self._begin = self._device.streams.record(Stream.COMPUTE, is_timed=True)

    def end_step(self) -> None:
        """Queue the copy of the routers' choices to the host, behind the replay's work."""
        if not self._chosen:
            return
        streams = self._device.streams
        chosen = torch.stack([self._chosen[layer] for layer in sorted(self._chosen)])
        with torch.inference_mode(False):
            while len(self._hosts) < _HOST_COPIES:
                memory = streams.pinned(chosen.nbytes)
                self._hosts.append(memory.view(chosen.dtype).view(chosen.shape))
        self._hosts.rotate()
        host = self._hosts[0]

        def copy() -> None:
            host.copy_(chosen, non_blocking=True)

        streams.run(Stream.COMPUTE, copy)
        assert self._begin is not None
        end = streams.record(Stream.COMPUTE, is_timed=True)
        self._replays.append(_Replay(self._begin, end, host))

    def report(self, *, but: int = 0) -> None:
        """Report the layers of unreported replays to listeners, except the last `but` replays."""
        while len(self._replays) > but:
            begin, end, host = self._replays.popleft()
            if not end.query():  # its logits have been read, so it is about to be done
                end.synchronize()
            self._device.add_busy(self._device.streams.between(begin, end))
            for layer, chosen in zip(sorted(self._chosen), host, strict=True):
                event = resident_event(self._executor.store[layer], chosen, self._clock.now)
                for listener in self._executor.listeners:
                    listener(event)


def graphed_layers(executor: Executor | None) -> GraphedLayers | None:
    """Return the object that computes layers in a segment; None unless all experts are resident.

    None also for an executor that passes calls on to another executor, because it may change the
    router's choice.
    """
    if executor is None or executor.cache is None or not isinstance(executor.device, CudaDevice):
        return None
    layers = executor.device.resident(executor.cache)
    if layers is None or not layers.is_whole():
        return None
    return GraphedLayers(executor, executor.device, executor.cache.clock, layers)
