"""A layer inside a captured step whose misses the host computes: queued, never waited for.

    publish -> doorbell -> hits (vector kernels) -> wait for `done` -> combine

It stands where `ResidentLayers` does, so that a step with it is one graph. The host's side is the
coordinator (docs/decisions/0016-coordinator.md), whose mailbox and table of addresses it reads.
Publish and combine ring and wait themselves, or the driver's stream operations do: which of them
work is found by trying (`works`), and the quicker way is taken.
"""

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tandem.devices.cuda import handing
from tandem.devices.cuda.captures import Capture, Graph, on_capture_stream
from tandem.devices.cuda.driver import open_driver
from tandem.devices.cuda.handed_steps import MAX_ROWS
from tandem.devices.cuda.resident import GroupedExperts
from tandem.devices.cuda.stream_ops import StreamOps
from tandem.devices.cuda.streams import Stream, Streams
from tandem.devices.cuda.waits import TRIAL_SECONDS, longest_wait
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels import _native
from tandem.triton_kernels.rows import GroupedRows

_TRIAL_SECONDS = 2.0
_TRIAL_VALUES = 1  # of a token whose hand-over is tried and timed: by the same kernels


class Signals(Protocol):
    """How a stream sets a word that the host sees, and waits for one of the host's."""

    name: str
    wait_seconds: float
    """Publish sets the doorbell itself, and combine waits, so long at most; 0: neither."""

    def ring(self, doorbell: Tensor) -> None:
        """Queue `doorbell = 1`, behind all that is queued; nothing where kernels do it."""

    def wait(self, done: Tensor) -> None:
        """Queue a wait for `done == 1`; nothing where kernels do it."""


class StreamSignals:
    """The driver's writes and waits, in the order of torch's current stream."""

    name, wait_seconds = "stream operations", 0.0

    def __init__(self, operations: StreamOps, current_stream: Callable[[], int]) -> None:
        """Queue on the stream that `current_stream` returns."""
        self._operations, self._current_stream = operations, current_stream

    def ring(self, doorbell: Tensor) -> None:
        """Queue a write."""
        address = self._operations.address_of(doorbell.data_ptr())
        self._operations.write(self._current_stream(), address, 1)

    def wait(self, done: Tensor) -> None:
        """Queue a wait."""
        address = self._operations.address_of(done.data_ptr())
        self._operations.wait(self._current_stream(), address, 1)


class KernelSignals:
    """Publish sets the doorbell, and combine polls with a pause: nothing else is queued."""

    name = "polling kernels"

    def __init__(self, wait_seconds: float) -> None:
        """Wait for so long at most, by the GPU's clock."""
        self.wait_seconds = wait_seconds

    def ring(self, doorbell: Tensor) -> None:
        """No-op: publish has done it."""

    def wait(self, done: Tensor) -> None:
        """No-op: combine does it."""


class HandedLayers:
    """The layers of one captured step of so many rows, as publish and combine see them."""

    def __init__(
        self,
        store: HostStore,
        box: "_native.MailboxLayout",
        memory: Tensor,
        table: Tensor,
        experts: GroupedExperts,
        signals: Signals,
        words: handing.WaitWords,
        *,
        host_table: Tensor | None = None,
    ) -> None:
        """Hand over through a mailbox, whose bytes are `memory` (num_bytes,) uint8, mapped.

        `table` (layers, experts) int64 on the device has the address of each resident expert, 0
        for the others. Each step begins with bringing `host_table`, pinned, if there is one.
        `words` are for all mailboxes: a step is under way in one of them.
        """
        self._store, self._box, self._memory, self._table = store, box, memory, table
        self._experts, self._signals, self._host_table = experts, signals, host_table
        self._words = words

    def serves(self, layer: int, functions: ExpertFunctions, index: Tensor) -> bool:
        """Tell whether a layer is handed over: packed, plainly gated, of few rows."""
        host = self._store[layer]
        is_plain = functions.native is not None and functions.post_norm is None
        is_packed = isinstance(host, PackedLayer) and host.input_order is None
        return is_plain and is_packed and len(index) <= MAX_ROWS

    def __call__(
        self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor, functions: ExpertFunctions
    ) -> Tensor | None:
        """Queue a layer of the step's rows; None if it needs a graph break."""
        if not self.serves(layer, functions, index):
            return None
        host = self._store[layer]
        assert isinstance(host, PackedLayer)
        if layer == 0:
            self._words.begin_step()
            if self._host_table is not None:
                self._table.copy_(self._host_table, non_blocking=True)
        num_experts = host.arrivals.num_experts
        hidden, index = hidden.contiguous(), index.contiguous()
        weights = weights.float().contiguous()
        box = self._tensors(layer, hidden, index.numel())
        signals, table = self._signals, self._table[layer, :num_experts]
        inside = signals.wait_seconds
        addresses = handing.publish(box, table, hidden, index, weights, rings=inside > 0)
        signals.ring(box.doorbell)
        computed = hidden.new_empty(index.numel(), hidden.shape[1], dtype=torch.float32)
        rows = _rows(addresses, *index.shape)
        self._experts.compute(host.layout, functions.native, hidden, rows, computed)
        signals.wait(box.done)
        out = torch.empty_like(hidden)
        handing.combine(
            box, computed, addresses, index, weights, num_experts, out, layer=layer,
            wait_seconds=inside,
        )  # fmt: skip
        return out

    def launch_once(self, hidden: Tensor, top_k: int) -> None:
        """Queue a layer's first and last kernel, for rows that have chosen no expert."""
        with torch.inference_mode(False):
            index = torch.full((len(hidden), top_k), -1, device=hidden.device)
            weights = torch.zeros(len(hidden), top_k, device=hidden.device)
            computed = hidden.new_empty(index.numel(), hidden.shape[1], dtype=torch.float32)
        count = self._store[0].arrivals.num_experts
        box, table = self._tensors(0, hidden, index.numel()), self._table[0, :count]
        inside, out = self._signals.wait_seconds, torch.empty_like(hidden)
        addresses = handing.publish(box, table, hidden, index, weights, rings=inside > 0)
        handing.combine(
            box, computed, addresses, index, weights, count, out, layer=0, wait_seconds=inside
        )

    def _tensors(self, layer: int, hidden: Tensor, pairs: int) -> handing.MailboxTensors:
        """Return the mailbox of a layer as tensors of the host's memory, for so many choices."""
        box, start = self._box, layer * self._box.layer_bytes

        def part(offset: int, count: int, dtype: torch.dtype) -> Tensor:
            return self._memory[offset : offset + count * dtype.itemsize].view(dtype)

        return handing.MailboxTensors(
            part(start + box.doorbell, 1, torch.int32),
            part(start + box.done, 1, torch.int32),
            part(start + box.choice, pairs, torch.int32),
            part(start + box.is_hit, pairs, torch.int32),
            part(start + box.weights, pairs, torch.float32),
            part(box.hidden, hidden.numel(), hidden.dtype),
            part(box.results, pairs * hidden.shape[1], torch.float32),
            self._words,
        )


def find_signals(
    streams: Streams,
    current_stream: Callable[[], int],
    make_capture: Callable[[], Capture] | None = None,
) -> Signals | None:
    """Return how this GPU and the host signal each other, the quicker way that works; None: none.

    With `make_capture` it has to work in a graph.
    """
    try:
        words = streams.pinned(128).view(torch.int32)
    except RuntimeError:  # no memory that both of them see
        return None
    found = list[Signals]()
    in_kernels = functools.partial(KernelSignals, TRIAL_SECONDS)
    for make in (in_kernels, functools.partial(_stream_signals, current_stream)):
        with contextlib.suppress(Exception):  # Triton's compilers and tools raise what they like
            signals = make()
            if signals is not None and works(signals, streams, words, make_capture):
                found.append(signals)
    if not found:
        return None
    quickest = _quickest(found, streams, make_capture)
    if isinstance(quickest, KernelSignals):
        return KernelSignals(longest_wait(streams.device.index or 0))
    return quickest


def _stream_signals(current_stream: Callable[[], int]) -> Signals | None:
    driver = open_driver()
    return None if driver is None else StreamSignals(StreamOps(driver), current_stream)


def _quickest(
    found: Sequence[Signals], streams: Streams, make_capture: Callable[[], Capture] | None
) -> Signals:
    from tandem.devices.cuda.hand_over_cost import Trial

    def seconds(signals: Signals) -> float:
        try:
            return Trial(signals, streams, _TRIAL_VALUES, make_capture).answered_seconds()
        except Exception:  # as above
            return math.inf

    return found[0] if len(found) == 1 else min(found, key=seconds)


class _TrialLayer:
    """A layer of one token, whose only expert the host computes: one value."""

    def __init__(self, words: Tensor, device: torch.device) -> None:
        self.words = words
        self.doorbell, self.done = words[:1], words[16:17]
        floats = words.view(torch.float32)
        self.result = floats[28:29]
        self.box = handing.MailboxTensors(
            self.doorbell, self.done, words[24:25], words[25:26], floats[26:27], floats[20:21],
            self.result, handing.WaitWords.on(device, words[29:30]),
        )  # fmt: skip
        with torch.inference_mode(False):
            self._absent = torch.zeros(1, dtype=torch.int64, device=device)
            self._expert = torch.zeros(1, 1, dtype=torch.int64, device=device)
            self._none = torch.full((1, 1), -1, device=device)
            self._one, self.out = (torch.ones(1, 1, device=device) for _ in range(2))

    def queue(self, signals: Signals) -> None:
        """Hand it over."""
        box, index, one = self.box, self._expert, self._one
        inside = signals.wait_seconds
        box.waits.begin_step()
        addresses = handing.publish(box, self._absent, one, index, one, rings=inside > 0)
        signals.ring(self.doorbell)
        signals.wait(self.done)
        handing.combine(box, one, addresses, index, one, 1, self.out, layer=0, wait_seconds=inside)

    def answer(self, result: float) -> None:
        """Let the stream go on."""
        self.result.fill_(result)
        self.done.fill_(1)

    def load(self, signals: Signals) -> None:
        """Launch the kernels for a token without experts, which waits for nobody.

        To load one behind a wait could wait for that wait's end.
        """
        box, index, one = self.box, self._none, self._one
        inside = signals.wait_seconds
        box.waits.begin_step()
        addresses = handing.publish(box, self._absent, one, index, one, rings=inside > 0)
        handing.combine(box, one, addresses, index, one, 1, self.out, layer=0, wait_seconds=inside)


def works(
    signals: Signals,
    streams: Streams,
    words: Tensor,
    make_capture: Callable[[], Capture] | None = None,
) -> bool:
    """Try a hand-over on words of mapped memory; waits, but never for ever.

    Whatever happens, the host sets what the stream waits for.
    """
    layer = _TrialLayer(words, streams.device)
    work = functools.partial(layer.queue, signals)
    streams.run(Stream.COMPUTE, functools.partial(layer.load, signals))
    if not _comes(streams.record(Stream.COMPUTE).query):
        return False
    if not _hands_over(work, streams, layer, 2.0):
        return False
    if make_capture is None:
        return True
    graph = captured_work(work, make_capture(), streams)
    return all(_hands_over(graph.replay, streams, layer, result) for result in (3.0, 4.0))


def _hands_over(
    work: Callable[[], None], streams: Streams, layer: _TrialLayer, result: float
) -> bool:
    """Queue a hand-over, answer it, and tell whether both sides have seen what they should.

    To queue it may itself wait for its end (CUDA_LAUNCH_BLOCKING): a timer answers it then.
    """
    layer.words.zero_()
    held = threading.Timer(_TRIAL_SECONDS, layer.answer, [result])
    held.start()
    try:
        streams.run(Stream.COMPUTE, work)
        end = streams.record(Stream.COMPUTE)
        has_rung = _comes(lambda: int(layer.doorbell) == 1)
        has_waited = not end.query()
    finally:
        held.cancel()
        layer.answer(result)
    has_ended = _comes(end.query)  # also of a failed trial: the next one uses the same words
    return has_rung and has_waited and has_ended and float(layer.out) == result


def captured_work(work: Callable[[], None], capture: Capture, streams: Streams) -> Graph:
    """Return a graph of what `work` queues."""
    graphs = list[Graph]()

    def queue() -> None:
        with on_capture_stream(capture):
            try:
                capture.begin()
                work()
                graphs.append(capture.end())
            except BaseException:
                capture.abandon()
                raise

    streams.run(Stream.COMPUTE, queue)
    return graphs[0]


def _comes(is_so: Callable[[], bool]) -> bool:
    end = time.perf_counter() + _TRIAL_SECONDS
    while not is_so():
        if time.perf_counter() > end:
            return is_so()
    return True


@functools.lru_cache(maxsize=64)
def _tables(num_rows: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        every = torch.arange(num_rows * top_k + 1, dtype=torch.int32, device=device)
        return every, torch.div(every[:-1], top_k, rounding_mode="floor")


def _rows(addresses: Tensor, num_rows: int, top_k: int) -> GroupedRows:
    """Return every (row, choice) as a row of an expert of its own."""
    begin, row_token = _tables(num_rows, top_k, addresses.device)
    none = begin[:0]
    return GroupedRows(addresses, begin, row_token, none, none, most_tokens=1, block_rows=0)
