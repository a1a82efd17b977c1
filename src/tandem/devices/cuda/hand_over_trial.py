"""Finds a way for a GPU and the host to signal each other, and times handing a layer over.

The trial hands over layers of one token, through a mailbox of its own. In one graph of many layers,
no layer misses an expert, so that nothing waits. In another graph each layer misses an expert, and
a host thread answers as soon as it sees the doorbell.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import queue
import threading
import time
from collections.abc import Callable
from statistics import median

import torch

from tandem.devices.cuda.captures import Capture, CudaCapture, captured_work
from tandem.devices.cuda.driver import open_driver
from tandem.devices.cuda.signals import KernelSignals, Signals, StreamSignals, longest_wait
from tandem.devices.cuda.streams import CudaStreams, Stream
from tandem.experts.execution.look_ahead_routers import LookAheadRouter
from tandem.experts.measuring.profiler import REPETITIONS
from tandem.policy.cost import GRAPH, HostCosts

# How long a kernel waits during the trial. Only a broken way of signalling reaches it.
_WAIT_SECONDS = 0.2
_NO_EXPERT, _ABSENT = -1, 0
_TRIAL_VALUES = 1  # values per token in the trial, which runs the same kernels
_ASLEEP_SECONDS = 1e-3  # a thread without work sleeps after this time


@dataclasses.dataclass(frozen=True, slots=True)
class TrialLimits:
    """The size of a trial, and how long it waits."""

    layers: int = 64
    """The number of layers of the graph that is timed."""
    router_experts: int = 128
    """The number of experts of the router that is run ahead in the timed graph."""
    doorbell_seconds: float = 10.0
    come_seconds: float = 2.0
    """Time limit for each wait of `Trial.works`."""


LIMITS = TrialLimits()


def find_signals(streams: CudaStreams, limits: TrialLimits | None = None) -> Signals | None:
    """Return the fastest way to signal between a GPU and the host among those that work in a graph.

    Returns None if no way works, or if Triton is missing.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    device, make_capture = streams.device, None
    if device.type == "cuda":  # otherwise the device is a CPU twin, whose captures know no signals
        make_capture = functools.partial(CudaCapture, device)
    found = list[Trial]()
    for make in (lambda: KernelSignals(_WAIT_SECONDS), lambda: _stream_signals(device)):
        with contextlib.suppress(Exception):  # Triton's compilers and tools raise what they like
            trial = Trial(make(), streams, _TRIAL_VALUES, make_capture, limits)
            if trial.works():
                found.append(trial)
    if not found:
        return None
    quickest = (found[0] if len(found) == 1 else min(found, key=_seconds)).signals
    if isinstance(quickest, KernelSignals):
        return KernelSignals(longest_wait(device.index or 0))
    return quickest


def _stream_signals(device: torch.device) -> StreamSignals:
    driver = open_driver()
    if driver is None:
        raise RuntimeError("there is no driver")
    return StreamSignals(driver, lambda: int(torch.cuda.current_stream(device).cuda_stream))


def _seconds(trial: "Trial") -> float:
    try:
        return trial.answered_seconds()
    except Exception:  # as above
        return math.inf


def graph_costs(
    signals: Signals,
    streams: CudaStreams,
    hidden_size: int,
    fetch_seconds: float,
    *,
    make_capture: Callable[[], Capture] | None = None,
    limits: TrialLimits | None = None,
) -> HostCosts:
    """Return the host costs of steps that are one graph.

    `fetch_seconds` is the time to launch a fetched expert; it becomes part of the result, because
    prompts are not computed in one graph. Without `make_capture` the layers are queued one by one,
    as on a CPU twin.
    """
    trial = Trial(signals, streams, hidden_size, make_capture, limits)
    of_hits, of_misses = trial.layer_seconds(_NO_EXPERT), trial.answered_seconds()
    taking = max(0.0, trial.layer_seconds(_NO_EXPERT, fetches=True) - of_hits)
    asking = max(0.0, trial.layer_seconds(_NO_EXPERT, asks=True) - of_hits)
    one_way = max(0.0, of_misses - of_hits) / 2
    return HostCosts(
        path=GRAPH,
        step_seconds=0.0,  # dense parts include it, because they are timed in whole steps
        layer_seconds=of_hits,
        cpu_begin_seconds=one_way,
        cpu_end_seconds=one_way,
        fetch_seconds=fetch_seconds,
        # Both kernels of a second launch find no expert here; they take as long as publish and
        # combine.
        second_launch_seconds=taking + of_hits,
        copy_wake_seconds=wake_seconds(),
        asking_seconds=asking,
    )


def wake_seconds() -> float:
    """Return the median time in seconds that a sleeping thread takes to wake up."""
    requests, took = queue.SimpleQueue[float | None](), list[float]()

    def work() -> None:
        while (begin := requests.get()) is not None:
            took.append(time.perf_counter() - begin)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for _ in range(REPETITIONS):
        time.sleep(_ASLEEP_SECONDS)
        requests.put(time.perf_counter())
    requests.put(None)
    thread.join()
    return median(took)


class Trial:
    """Hands layers of one token over to the host through a mailbox of its own, and times them.

    A layer's token chooses one expert, which the host must compute, or none.
    """

    def __init__(
        self,
        signals: Signals,
        streams: CudaStreams,
        hidden_size: int,
        make_capture: Callable[[], Capture] | None = None,
        limits: TrialLimits | None = None,
    ) -> None:
        """Allocate the mailbox; raises `RuntimeError` if no memory is accessible to both sides."""
        from tandem.devices.cuda import handing

        self.signals, self._streams, self._make_capture = signals, streams, make_capture
        self._limits = limits or LIMITS
        self._layer = handing.hand_over_layer
        self._words = words = streams.pinned(256).view(torch.int32)[:64].zero_()
        shared = streams.pinned(8 * hidden_size).view(torch.float32)[: 2 * hidden_size]
        self._doorbell, self._done, self._given_up = words[:1], words[16:17], words[48:49]
        self._results = shared[hidden_size:]
        with torch.inference_mode(False):
            device = streams.device
            self._hidden = torch.ones(1, hidden_size, device=device)
            self._one = torch.ones(1, 1, device=device)
            router = torch.zeros(
                self._limits.router_experts, hidden_size, dtype=torch.bfloat16, device=device
            )
            residual = torch.zeros(hidden_size, device=device)
            self._next_router = handing.NextRouter(
                LookAheadRouter(router, None, residual), self._hidden
            )
            self._address_of = torch.zeros(1, dtype=torch.int64, device=device)
            self._index = {
                expert: torch.full((1, 1), expert, device=device)
                for expert in (_NO_EXPERT, _ABSENT)
            }
        self._box = handing.MailboxTensors(
            self._doorbell, self._done, words[32:33], words[33:34],
            words[34:35].view(torch.float32), words[36:38].view(torch.int64), words[40:41],
            words[41:42],
            shared[:hidden_size], self._results,
            handing.WaitWords.on(device, self._given_up),
        )  # fmt: skip
        self._out = self._hidden
        self._is_lost = False

    def works(self) -> bool:
        """Tell whether hand-overs work, in a graph too if there is `make_capture`.

        Waits for a limited time. The host always sets the word that the stream waits for, even
        after a failure.
        """
        streams = self._streams
        streams.run(Stream.COMPUTE, self._load)
        if not self._comes(streams.record(Stream.COMPUTE).query):
            return False
        work = functools.partial(self._hand_over, _ABSENT, 0, self.signals)
        if not self._comes_through(work, 2.0):
            return False
        if self._make_capture is None:
            return True
        graph = captured_work(work, self._make_capture(), streams)
        return all(self._comes_through(graph.replay, result) for result in (3.0, 4.0))

    def answered_seconds(self) -> float:
        """Return the seconds of a layer that the host answers.

        Raises `RuntimeError` if a signal does not arrive in time.
        """
        return self.layer_seconds(_ABSENT)

    def layer_seconds(self, expert: int, *, fetches: bool = False, asks: bool = False) -> float:
        """Return the seconds of a layer whose only token has chosen `expert`.

        `expert` is `_ABSENT`, for which the host answers, or `_NO_EXPERT`. With `fetches` the layer
        also runs `take_fetched` and launches its hits a second time; with `asks` it also runs the
        next layer's router ahead.
        """

        def work() -> None:
            for layer in range(self._limits.layers):
                self._hand_over(expert, layer, self.signals, fetches=fetches, asks=asks)

        self._once(functools.partial(self._load, asks=asks), _NO_EXPERT)
        launch: Callable[[], None] = work
        if self._make_capture is not None:
            launch = captured_work(work, self._make_capture(), self._streams).replay
        return median(self._once(launch, expert) for _ in range(REPETITIONS)) / self._limits.layers

    def _load(self, *, asks: bool = False) -> None:
        """Launch all kernels once for a token without experts, so that nothing waits.

        Loading a kernel while the stream waits could deadlock.
        """
        signals = KernelSignals(self.signals.wait_seconds)
        self._hand_over(_NO_EXPERT, 0, signals, fetches=True, asks=asks)

    def _hand_over(
        self,
        expert: int,
        layer: int,
        signals: Signals,
        *,
        fetches: bool = False,
        asks: bool = False,
    ) -> None:
        if layer == 0:
            self._box.waits.begin_step()
        self._out = self._layer(
            self._box, signals, self._address_of, self._hidden, self._index[expert], self._one,
            lambda addresses, rows: None, layer=layer, fetches=fetches,
            next_router=self._next_router if asks else None,
        )  # fmt: skip

    def _comes_through(self, work: Callable[[], None], result: float) -> bool:
        """Queue a hand-over, answer it, and tell whether both sides saw the expected values.

        With CUDA_LAUNCH_BLOCKING, queueing itself waits for the hand-over's end; a timer then
        answers.
        """
        self._words.zero_()
        held = threading.Timer(self._limits.come_seconds, self._answer, [result])
        held.start()
        try:
            self._streams.run(Stream.COMPUTE, work)
            end = self._streams.record(Stream.COMPUTE)
            has_rung = self._comes(lambda: int(self._doorbell) == 1)
            has_waited = not end.query()
        finally:
            held.cancel()
            self._answer(result)
        # Wait also after a failed trial, because the next one uses the same words.
        has_ended = self._comes(end.query)
        return has_rung and has_waited and has_ended and float(self._out[0, 0]) == result

    def _answer(self, result: float) -> None:
        """Answer with `result` in every value, which releases the stream."""
        self._results.fill_(result)
        self._done.fill_(1)

    def _once(self, launch: Callable[[], None], expert: int) -> float:
        """Call `launch`, which queues layers; return the seconds until they are done.

        If their `expert` is `_ABSENT`, a thread answers the layers. Raises `RuntimeError` if a
        signal does not arrive; no layer waits any more then.
        """
        self._words.zero_()
        is_over = threading.Event()
        answering = threading.Thread(target=self._answer_all, args=(is_over,), daemon=True)
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
        if self._is_lost or int(self._given_up):
            raise RuntimeError("a layer's doorbell did not reach the host, or its answer the GPU")
        return seconds

    def _answer_all(self, is_over: threading.Event) -> None:
        words = self._words.numpy()  # faster to read than a tensor
        for _ in range(self._limits.layers):
            last = time.perf_counter() + self._limits.doorbell_seconds
            while words[0] != 1:
                if is_over.is_set():
                    return
                if time.perf_counter() > last:
                    return self._let_go(is_over)
            words[0] = 0
            words[16] = 1

    def _let_go(self, is_over: threading.Event) -> None:
        """Record that a signal was lost; answer all remaining layers until `is_over` is set."""
        self._is_lost = True
        while not is_over.is_set():
            self._done.fill_(1)
            time.sleep(1e-3)

    def _comes(self, is_so: Callable[[], bool]) -> bool:
        end = time.perf_counter() + self._limits.come_seconds
        while not is_so():
            if time.perf_counter() > end:
                return is_so()
        return True
