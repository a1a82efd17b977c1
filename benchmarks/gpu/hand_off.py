"""Whether a captured graph and a thread of the host can hand work over, and how fast.

    python -m benchmarks.gpu.hand_off operations|mapped|latency

What docs/runtime.md plans rests on it: a decode step as one graph, in which the host computes some
experts. Each check is a process of its own with a limit of time, as a wait that never ends cannot
be undone. The last line says what was found; with exit code 3, what to use instead.

    the graph: numbers, doorbell = 1 -> wait for done == 1, done = 0 -> reads the host's numbers
    the host:  sees doorbell == 1, resets it, reads the numbers, writes its own -> done = 1
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.devices.cuda.driver import DriverError, open_driver
from tandem.devices.cuda.stream_ops import StreamOps

COUNT = 256  # numbers handed over at a time
ROUNDS = 500
HAND_OFFS = 64  # of the graph that is timed
LIMIT_SECONDS = 5.0
_MOST_POLLS = 5_000_000  # of a polling kernel: some seconds
_LINE = 32  # words: flags and numbers lie on lines of their own
NOT_HERE = 3  # the exit code of a way that this machine does not have

POLLING = "use kernels that set a flag and poll one (benchmarks.gpu.hand_off_kernels)"
PIECES = "decode steps stay captured graph segments with Python between them"


class NotHereError(Exception):
    """A way that this machine does not have; says what to use instead."""


class Mailbox:
    """Words that both sides see: two flags, numbers for the host, numbers of the host."""

    def __init__(self, *, is_pinned: bool = True) -> None:
        """Take host memory; `is_pinned` is for a GPU to see it."""
        memory = torch.zeros(2 * _LINE + 2 * COUNT, dtype=torch.int32)
        self.memory = memory.pin_memory() if is_pinned else memory
        self.doorbell, self.done = self.memory[:1], self.memory[_LINE : _LINE + 1]
        self.published, self.answers = self.memory[2 * _LINE :].split(COUNT)
        self._words = self.memory.numpy()  # reads memory again each time

    def has_rung(self) -> bool:
        """Tell whether the doorbell is set."""
        return int(self._words[0]) == 1

    def reset(self) -> None:
        """Reset the doorbell."""
        self._words[0] = 0

    def answer(self, numbers: Tensor | None = None) -> None:
        """Write numbers, then the flag: x86 processors show them in this order."""
        if numbers is not None:
            self.answers.copy_(numbers)
        self._words[_LINE] = 1


class Way(Protocol):
    """How a stream sets the doorbell and waits for the host."""

    name: str

    def ring(self, box: Mailbox, source: Tensor) -> None:
        """Queue: numbers to the host, then the doorbell."""

    def wait(self, box: Mailbox) -> None:
        """Queue: wait for the host's flag, and reset it."""


class ByStreamOps:
    """The driver's writes and waits."""

    name = "stream operations"

    def __init__(self) -> None:
        """Raises `NotHereError` where the driver has none."""
        driver = open_driver()
        if driver is None:
            raise NotHereError(f"the driver is older than CUDA 12; {POLLING}")
        try:
            self.operations = StreamOps(driver)
        except DriverError as error:
            raise NotHereError(f"{error}; {POLLING}") from error

    def ring(self, box: Mailbox, source: Tensor) -> None:
        """Let a kernel write the numbers and the stream the flag."""
        _publish(box, source, sets_flag=False)
        self.operations.write(_stream(), self._at(box.doorbell), 1)

    def wait(self, box: Mailbox) -> None:
        """Let the stream wait and reset."""
        self.operations.wait(_stream(), self._at(box.done), 1)
        self.operations.write(_stream(), self._at(box.done), 0)

    def _at(self, word: Tensor) -> int:
        return self.operations.address_of(word.data_ptr())


class ByKernels:
    """A kernel that sets the flag, and one that polls with a pause."""

    name = "polling kernels"

    def __init__(self) -> None:
        """Make what the polling kernel reports."""
        self.seen = torch.zeros(1, dtype=torch.int32, device="cuda")

    def ring(self, box: Mailbox, source: Tensor) -> None:
        """Let one kernel do both."""
        _publish(box, source, sets_flag=True)

    def wait(self, box: Mailbox) -> None:
        """Poll."""
        from benchmarks.gpu import hand_off_kernels as hand_off

        hand_off.wait_for[(1,)](
            box.done, self.seen, most_polls=_MOST_POLLS, on_gpu=True, num_warps=1
        )


def _publish(box: Mailbox, source: Tensor, *, sets_flag: bool) -> None:
    from benchmarks.gpu import hand_off_kernels as hand_off

    hand_off.publish[(1,)](
        box.published, box.doorbell, source, count=COUNT, sets_flag=sets_flag, num_warps=4
    )


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def comes(is_so: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> bool:
    """Look until something is so; False if it is not within a time."""
    end = time.perf_counter() + seconds
    while not is_so():
        if time.perf_counter() > end:
            return is_so()
    return True


def serve(
    box: Mailbox,
    number_of: int,
    is_over: Callable[[], bool],
    seconds: float = LIMIT_SECONDS,
) -> bool:
    """Answer doorbells as fast as Python can; False if they stop coming before the end."""
    for _ in range(number_of):
        if not comes(box.has_rung, seconds):
            return False
        box.reset()
        box.answer()
    return comes(is_over, seconds)


def captured(work: Callable[[], None]) -> Any:
    """Return a graph of some work; raises `NotHereError` where it cannot be captured."""
    from tandem.devices.cuda.captures import CudaCapture, on_capture_stream

    capture = CudaCapture(torch.device("cuda", torch.cuda.current_device()))
    with on_capture_stream(capture):
        try:
            capture.begin()
            work()
            return capture.end()
        except RuntimeError as error:
            capture.abandon()
            first_line = str(error).partition("\n")[0]
            raise NotHereError(f"it cannot be captured ({first_line}); {POLLING}") from error


def load_kernels(box: Mailbox, source: Tensor) -> None:
    """Compile and load all kernels: to load one behind a wait could wait for its end."""
    from benchmarks.gpu import hand_off_kernels as hand_off

    seen, out = source.new_zeros(1), torch.zeros_like(source)
    for sets_flag in (False, True):
        _publish(box, source, sets_flag=sets_flag)
    box.answer()
    hand_off.wait_for[(1,)](box.done, seen, most_polls=_MOST_POLLS, on_gpu=True, num_warps=1)
    for is_volatile in (False, True):
        hand_off.collect[(1,)](box.answers, out, count=COUNT, is_volatile=is_volatile, num_warps=4)
    source.add_(0)
    torch.cuda.synchronize()
    box.reset()


def queued(work: Callable[[], None]) -> torch.cuda.Event:
    """Queue some work; return the event behind it."""
    work()
    end = torch.cuda.Event()
    end.record()
    return end


def operations() -> str:
    """Capture a write, a wait and a write; replay them twice. A store of the host ends the wait."""
    way, box = ByStreamOps(), Mailbox()
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    source = torch.zeros(COUNT, dtype=torch.int32, device="cuda")
    load_kernels(box, source)

    def work() -> None:
        way.ring(box, source)
        way.wait(box)
        count.add_(1)

    graph = captured(work)
    for replay in (1, 2):
        end = queued(graph.replay)
        if not comes(box.has_rung):
            raise NotHereError(f"replay {replay}: its write does not reach the host; {POLLING}")
        box.reset()
        if comes(end.query, 0.05):
            raise NotHereError(f"replay {replay} did not wait for the host; {POLLING}")
        box.answer()
        if not comes(end.query):
            raise NotHereError(
                f"replay {replay}: a store of the host does not end the wait, "
                f"{_ended_by_a_stream(way, box, end)}; {POLLING}"
            )
        assert int(count) == replay
        assert int(box.done) == 0, "the wait was not reset"
    return "written, waited for and reset in a captured graph, twice; a store of the host ends it"


def _ended_by_a_stream(way: ByStreamOps, box: Mailbox, end: torch.cuda.Event) -> str:
    """Try to end a wait by a write of another stream; say whether that does it."""
    with torch.cuda.stream(torch.cuda.Stream()):
        way.operations.write(_stream(), way._at(box.done), 1)
    return f"a write of another stream does{'' if comes(end.query) else ' not either'}"


def mapped() -> str:
    """Hand numbers over and back many times, by both ways; none may be older than its flag."""
    said, problems = [], []
    for make_way in (ByStreamOps, ByKernels):
        try:
            way: Way = make_way()
            said.append(f"{way.name}: {_numbers_in_order(way)}")
        except (NotHereError, DriverError) as error:
            problems.append(str(error))
    if not said:
        raise NotHereError(f"{'; '.join(problems)}; neither way keeps the order: {PIECES}")
    return "; ".join([*said, *problems])


def _numbers_in_order(way: Way) -> str:
    from benchmarks.gpu import hand_off_kernels as hand_off

    box, source = Mailbox(), torch.arange(COUNT, dtype=torch.int32, device="cuda")
    cached, past = (torch.zeros_like(source) for _ in range(2))

    def work() -> None:
        way.ring(box, source)
        way.wait(box)
        hand_off.collect[(1,)](box.answers, cached, count=COUNT, is_volatile=False, num_warps=4)
        hand_off.collect[(1,)](box.answers, past, count=COUNT, is_volatile=True, num_warps=4)
        source.add_(COUNT)

    load_kernels(box, source)
    late = old_cached = old_past = 0
    step: Callable[[], None] = work  # once as it is
    for number in range(ROUNDS):
        end = queued(step)
        if not comes(box.has_rung):
            raise NotHereError(f"{way.name}: the flag does not reach the host")
        wanted = torch.arange(number * COUNT + 1, (number + 1) * COUNT + 1, dtype=torch.int32)
        late += int((box.published != wanted).any())
        box.reset()
        box.answer(-wanted)
        if not comes(end.query):
            raise NotHereError(f"{way.name}: the host's flag does not reach the GPU")
        old_cached += int((cached.cpu() != -wanted).any())
        old_past += int((past.cpu() != -wanted).any())
        if number == 0:
            step = captured(work).replay
    if late or old_past:
        raise NotHereError(
            f"{way.name}: of {ROUNDS} rounds the host saw the flag before the numbers in {late}, "
            f"the GPU in {old_past}"
        )
    cache = f"; {old_cached} old ones read without volatile" if old_cached else ""
    return f"{ROUNDS} rounds in order, both directions{cache}"


def latency() -> str:
    """Time a hand-off and back inside a graph, both ways, and today's way: a copy and an event."""
    times = []
    for make_way in (ByStreamOps, ByKernels):
        try:
            way: Way = make_way()
            times.append(f"{_hand_off_seconds(way) * 1e6:.1f} us by {way.name}")
        except (NotHereError, DriverError) as error:
            times.append(f"not by {make_way.name} ({error})")
    if not any(" us by " in said for said in times):
        raise NotHereError(f"{'; '.join(times)}; {PIECES}")
    return f"{', '.join(times)}, {_event_seconds() * 1e6:.1f} us by a copy, an event and a launch"


def _hand_off_seconds(way: Way) -> float:
    box, source = Mailbox(), torch.zeros(COUNT, dtype=torch.int32, device="cuda")

    def work() -> None:
        way.ring(box, source)
        way.wait(box)

    def several() -> None:
        for _ in range(HAND_OFFS):
            work()

    load_kernels(box, source)
    end = queued(work)
    if not serve(box, 1, end.query):
        raise NotHereError("a hand-off does not come through")
    graph, best = captured(several), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        end = queued(graph.replay)
        if not serve(box, HAND_OFFS, end.query):
            raise NotHereError("a hand-off of a replay does not come through")
        best = min(best, time.perf_counter() - begin)
    return best / HAND_OFFS


def _event_seconds() -> float:
    """Time what a layer does today: bring a choice to the host, wait, launch what follows."""
    choice = torch.zeros(COUNT, dtype=torch.int32, device="cuda")
    host = torch.zeros(COUNT, dtype=torch.int32).pin_memory()

    def layer() -> None:
        choice.add_(1)
        host.copy_(choice, non_blocking=True)
        end = torch.cuda.Event()
        end.record()
        end.synchronize()

    layer()
    begin = time.perf_counter()
    for _ in range(HAND_OFFS):
        layer()
    return (time.perf_counter() - begin) / HAND_OFFS


CHECKS: dict[str, Callable[[], str]] = {
    "operations": operations,
    "mapped": mapped,
    "latency": latency,
}


def main() -> None:
    """Run the check that is named; end the process without waiting for a stream that waits."""
    code = 0
    try:
        print(CHECKS[sys.argv[1]](), flush=True)
    except NotHereError as error:
        code = NOT_HERE
        print(error, flush=True)
    except BaseException:
        code = 2
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
