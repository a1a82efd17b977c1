"""A layer inside a captured step whose misses the host computes: queued, never waited for.

    publish -> doorbell -> hits (vector kernels) -> wait for `done`, reset it -> combine

It stands where `ResidentLayers` does, so that a step with it is one graph. The host's side is the
coordinator (docs/decisions/0016-coordinator.md), whose mailbox and table of addresses it reads.
Doorbell and wait are the driver's stream operations, or kernels where a machine has none: what it
has is found by trying (`works`).
"""

import functools
import time
from collections.abc import Callable
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
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.store.host_store import HostStore
from tandem.experts.store.packed_layer import PackedLayer
from tandem.kernels import _native
from tandem.triton_kernels.rows import GroupedRows

_TRIAL_SECONDS = 2.0


class Signals(Protocol):
    """How a stream sets a word that the host sees, and waits for one of the host's."""

    name: str
    rings: bool
    """Whether publish sets the doorbell itself."""

    def ring(self, doorbell: Tensor) -> None:
        """Queue `doorbell = 1`, behind all that is queued; nothing where publish `rings`."""

    def wait(self, done: Tensor) -> None:
        """Queue a wait for `done == 1`, and its reset."""


class StreamSignals:
    """The driver's writes and waits, in the order of torch's current stream."""

    name, rings = "stream operations", False

    def __init__(self, operations: StreamOps, current_stream: Callable[[], int]) -> None:
        """Queue on the stream that `current_stream` returns."""
        self._operations, self._current_stream = operations, current_stream

    def ring(self, doorbell: Tensor) -> None:
        """Queue a write."""
        address = self._operations.address_of(doorbell.data_ptr())
        self._operations.write(self._current_stream(), address, 1)

    def wait(self, done: Tensor) -> None:
        """Queue a wait and a write."""
        address, stream = self._operations.address_of(done.data_ptr()), self._current_stream()
        self._operations.wait(stream, address, 1)
        self._operations.write(stream, address, 0)


class KernelSignals:
    """A kernel that sets the flag, and one that polls it with a pause."""

    name, rings = "polling kernels", True

    def __init__(self, device: torch.device) -> None:
        """Count on `device` the waits that were given up."""
        with torch.inference_mode(False):
            self.gave_up = torch.zeros(1, dtype=torch.int32, device=device)

    def ring(self, doorbell: Tensor) -> None:
        """No-op: publish has done it."""

    def wait(self, done: Tensor) -> None:
        """Queue the kernel that polls."""
        handing.wait_for(done, self.gave_up)


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
        *,
        host_table: Tensor | None = None,
    ) -> None:
        """Hand over through a mailbox, whose bytes are `memory` (num_bytes,) uint8, mapped.

        `table` (layers, experts) int64 on the device has the address of each resident expert, 0
        for the others. Each step begins with bringing `host_table`, pinned, if there is one.
        """
        self._store, self._box, self._memory, self._table = store, box, memory, table
        self._experts, self._signals, self._host_table = experts, signals, host_table

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
        if layer == 0 and self._host_table is not None:
            self._table.copy_(self._host_table, non_blocking=True)
        num_experts = host.arrivals.num_experts
        hidden, index = hidden.contiguous(), index.contiguous()
        weights = weights.float().contiguous()
        box = self._tensors(layer, hidden, index.numel())
        addresses = handing.publish(
            box, self._table[layer, :num_experts], hidden, index, weights, rings=self._signals.rings
        )
        self._signals.ring(box.doorbell)
        computed = hidden.new_empty(index.numel(), hidden.shape[1], dtype=torch.float32)
        rows = _rows(addresses, *index.shape)
        self._experts.compute(host.layout, functions.native, hidden, rows, computed)
        self._signals.wait(box.done)
        out = torch.empty_like(hidden)
        handing.combine(computed, box.results, addresses, index, weights, num_experts, out)
        return out

    def launch_once(self, hidden: Tensor, top_k: int) -> None:
        """Queue a layer's first and last kernel, for rows that have chosen no expert."""
        with torch.inference_mode(False):
            index = torch.full((len(hidden), top_k), -1, device=hidden.device)
            weights = torch.zeros(len(hidden), top_k, device=hidden.device)
            computed = hidden.new_empty(index.numel(), hidden.shape[1], dtype=torch.float32)
        count = self._store[0].arrivals.num_experts
        box, table = self._tensors(0, hidden, index.numel()), self._table[0, :count]
        addresses = handing.publish(box, table, hidden, index, weights, rings=self._signals.rings)
        handing.combine(
            computed, box.results, addresses, index, weights, count, torch.empty_like(hidden)
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
        )


def find_signals(
    streams: Streams,
    current_stream: Callable[[], int],
    make_capture: Callable[[], Capture] | None = None,
) -> Signals | None:
    """Return how this GPU and the host signal each other, the better way that works; None: none.

    With `make_capture` it has to work in a graph.
    """
    try:
        words = streams.pinned(128).view(torch.int32)
    except RuntimeError:  # no memory that both of them see
        return None
    for make in (functools.partial(_stream_signals, current_stream), _kernel_signals):
        try:
            signals = make(streams)
            if signals is not None and works(signals, streams, words, make_capture):
                return signals
        except Exception:  # Triton's compilers and tools raise what they like
            continue
    return None


def _stream_signals(current_stream: Callable[[], int], streams: Streams) -> Signals | None:
    driver = open_driver()
    return None if driver is None else StreamSignals(StreamOps(driver), current_stream)


def _kernel_signals(streams: Streams) -> Signals:
    return KernelSignals(streams.device)


def works(
    signals: Signals,
    streams: Streams,
    words: Tensor,
    make_capture: Callable[[], Capture] | None = None,
) -> bool:
    """Try a hand-over on words of mapped memory; waits, but never for ever.

    Whatever happens, the host sets what the stream waits for.
    """
    with torch.inference_mode(False):
        address_of = torch.zeros(1, dtype=torch.int64, device=streams.device)
        none = torch.full((1, 1), -1, device=streams.device)
        weight = torch.zeros(1, 1, device=streams.device)
    doorbell, done = words[:1], words[16:17]
    box = handing.MailboxTensors(doorbell, words[8:9], *(words[24 + i :][:1] for i in range(5)))

    def work() -> None:
        handing.publish(box, address_of, weight, none, weight, rings=signals.rings)
        signals.ring(doorbell)
        signals.wait(done)

    if not _hands_over(work, streams, words):
        return False
    if make_capture is None:
        return True
    graph = captured_work(work, make_capture(), streams)
    return all(_hands_over(graph.replay, streams, words) for _ in range(2))


def _hands_over(work: Callable[[], None], streams: Streams, words: Tensor) -> bool:
    """Queue a hand-over, answer it, and tell whether both sides have seen what they should."""
    words.zero_()
    doorbell, done = words[:1], words[16:17]
    try:
        streams.run(Stream.COMPUTE, work)
        end = streams.record(Stream.COMPUTE)
        has_rung = _comes(lambda: int(doorbell) == 1)
    finally:
        done.fill_(1)
    has_ended = _comes(end.query)  # also of a failed trial: the next one uses the same words
    return has_rung and has_ended and int(done) == 0


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
