"""The host's side of a hand-off, against a thread that does what a captured graph would."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu.hand_off import COUNT, Mailbox, comes, serve

ROUNDS = 8  # two threads of Python take turns, of 5 ms each


class TwinGraph:
    """Rings, waits for the host's flag, resets it and reads the numbers, so many times."""

    def __init__(self, box: Mailbox, rounds: int) -> None:
        self.box, self.rounds, self.read = box, rounds, list[int]()
        self.is_given_up = self.is_over = False

    def run(self) -> None:
        words = self.box.memory.numpy()
        for number in range(self.rounds):
            self.box.published.fill_(number)
            words[0] = 1
            while words[32] != 1:
                if self.is_given_up:
                    return
            words[32] = 0
            self.read.append(int(self.box.answers[0]))
        self.is_over = True


@contextmanager
def running(graph: TwinGraph) -> Iterator[None]:
    thread = threading.Thread(target=graph.run)
    thread.start()
    try:
        yield
    finally:
        graph.is_given_up = True
        thread.join()


def test_every_doorbell_is_answered_once_and_flags_are_reset() -> None:
    box = Mailbox(is_pinned=False)
    graph = TwinGraph(box, ROUNDS)
    with running(graph):
        assert serve(box, ROUNDS, lambda: graph.is_over)
    assert len(graph.read) == ROUNDS
    assert box.memory[:64].sum() == 0


def test_numbers_come_before_their_flag_both_ways() -> None:
    box = Mailbox(is_pinned=False)
    graph = TwinGraph(box, ROUNDS)
    with running(graph):
        for number in range(ROUNDS):
            assert comes(box.has_rung)
            assert box.published.tolist() == [number] * COUNT
            box.reset()
            box.answer(-box.published)
        assert comes(lambda: graph.is_over)
    assert graph.read == [-number for number in range(ROUNDS)]


def test_a_graph_that_stops_ringing_is_given_up() -> None:
    assert not serve(Mailbox(is_pinned=False), 1, lambda: True, seconds=0.01)
