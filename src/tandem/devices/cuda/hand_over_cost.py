"""What it costs to hand a layer of a captured step over: timed with a host that answers at once.

A graph of many layers is launched whose experts are all on the GPU, so that nobody is waited for,
and one in which each layer misses an expert: a thread of the host answers it as soon as it sees it.
"""

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.devices.cuda.captures import Capture
from tandem.devices.cuda.streams import Stream, Streams
from tandem.experts.measuring.profiler import REPETITIONS
from tandem.policy.host_costs import GRAPH, HostCosts

if TYPE_CHECKING:
    from tandem.devices.cuda.handed_layers import Signals

_LAYERS = 64  # of a graph
_LIMIT_SECONDS = 10.0  # for a doorbell
_NO_EXPERT, _ABSENT = -1, 0
_GIVEN_UP = 48  # of the words


def graph_costs(
    signals: "Signals",
    streams: Streams,
    hidden_size: int,
    fetch_seconds: float,
    *,
    make_capture: Callable[[], Capture] | None = None,
) -> HostCosts:
    """Return the host's work for steps that are one graph; prompts fetch as they do elsewhere.

    Without `make_capture` the layers are queued one by one, as on a twin.
    """
    trial = Trial(signals, streams, hidden_size, make_capture)
    of_hits, of_misses = trial.layer_seconds(_NO_EXPERT), trial.answered_seconds()
    one_way = max(0.0, of_misses - of_hits) / 2
    return HostCosts(
        path=GRAPH,
        step_seconds=0.0,  # in the dense parts, which are timed in whole steps
        layer_seconds=of_hits,
        cpu_begin_seconds=one_way,
        cpu_end_seconds=one_way,
        fetch_seconds=fetch_seconds,
    )


class Trial:
    """Layers of one token, in one mailbox."""

    def __init__(
        self,
        signals: "Signals",
        streams: Streams,
        hidden_size: int,
        make_capture: Callable[[], Capture] | None,
    ) -> None:
        self._signals, self._streams, self._make_capture = signals, streams, make_capture
        self._words = streams.pinned(256).view(torch.int32)[:64].zero_()
        self._shared = streams.pinned(4 * hidden_size).view(torch.float32)[:hidden_size]
        with torch.inference_mode(False):
            device = streams.device
            self._hidden, self._out = (torch.zeros(1, hidden_size, device=device) for _ in range(2))
            self._weights = torch.zeros(1, 1, device=device)
            self._rows = torch.zeros(1, hidden_size, device=device)
            self._address_of = torch.zeros(1, dtype=torch.int64, device=device)
            self._turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._is_lost = False

    def answered_seconds(self) -> float:
        """Time a layer that the host answers; raises `RuntimeError` if it does not come through."""
        return self.layer_seconds(_ABSENT)

    def layer_seconds(self, expert: int) -> float:
        """Time a layer whose token has chosen one expert."""
        with torch.inference_mode(False):
            none, index = (
                torch.full((1, 1), each, device=self._streams.device)
                for each in (_NO_EXPERT, expert)
            )

        def work() -> None:
            for layer in range(_LAYERS):
                self._hand_over(index, layer)

        self._once(lambda: self._hand_over(none, 0), _NO_EXPERT)  # compiles, and waits for nobody
        launch: Callable[[], Any] = work
        if self._make_capture is not None:
            from tandem.devices.cuda.handed_layers import captured_work

            launch = captured_work(work, self._make_capture(), self._streams).replay
        return median(self._once(launch, expert) for _ in range(REPETITIONS)) / _LAYERS

    def _hand_over(self, index: Tensor, layer: int) -> None:
        from tandem.devices.cuda import handing

        words = self._words
        doorbell, done, is_inside = words[:1], words[16:17], self._signals.wait_seconds > 0
        choice, is_hit = words[32:33], words[33:34]
        box = handing.MailboxTensors(
            doorbell, done, choice, is_hit, words[34:35].view(torch.float32), self._shared,
            self._shared, handing.WaitWords(self._turn, words[_GIVEN_UP : _GIVEN_UP + 1]),
        )  # fmt: skip
        if layer == 0:
            box.waits.begin_step()
        table, weights = self._address_of, self._weights
        addresses = handing.publish(box, table, self._hidden, index, weights, rings=is_inside)
        self._signals.ring(doorbell)
        self._signals.wait(done)
        handing.combine(
            box, self._rows, addresses, index, weights, 1, self._out, layer=layer,
            wait_seconds=self._signals.wait_seconds,
        )  # fmt: skip

    def _once(self, launch: Callable[[], Any], expert: int) -> float:
        """Return how long the layers take; whatever happens, nothing is left waiting."""
        self._words.zero_()
        is_over = threading.Event()
        answering = threading.Thread(target=self._answer, args=(is_over,), daemon=True)
        if expert == _ABSENT:
            answering.start()
        try:
            begin = time.perf_counter()
            self._streams.run(Stream.COMPUTE, launch)
            self._streams.synchronize()
            seconds = time.perf_counter() - begin
        finally:
            is_over.set()
            if expert == _ABSENT:
                answering.join()
        if self._is_lost or int(self._words[_GIVEN_UP]):
            raise RuntimeError("a layer's doorbell did not reach the host, or its answer the GPU")
        return seconds

    def _answer(self, is_over: threading.Event) -> None:
        words = self._words.numpy()  # sooner read than a tensor
        for _ in range(_LAYERS):
            last = time.perf_counter() + _LIMIT_SECONDS
            while words[0] != 1:
                if is_over.is_set():
                    return
                if time.perf_counter() > last:
                    return self._let_go(is_over)
            words[0] = 0
            words[16] = 1

    def _let_go(self, is_over: threading.Event) -> None:
        """Let the device through what is left."""
        self._is_lost = True
        while not is_over.is_set():
            self._words[16] = 1
            time.sleep(1e-3)
