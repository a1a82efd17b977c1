"""Tests of prefill chunks of several prompts and streams: each request gets its own answer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tandem.core.errors import ExecutionError
from tandem.decode.slots import SlotPool
from tandem.generate.generator import Generator
from tandem.generate.pace import Pace
from tandem.generate.request import Request
from tandem.generate.scheduler import Scheduler
from tandem.generate.token_output import Failure, StepFailedError
from tests.generate.test_scheduler import PART, finish, request_of, tokens
from tests.hf.tiny import loaded

BAD = 77


class Noted:
    """Records the slots of each prefill forward, and fails for one token."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Wrap a pool's `prefill` for a scheduler."""
        pool: Any = scheduler._pool
        self.prefill = pool.prefill
        self.slots: list[list[int]] = []
        pool.prefill = self

    def __call__(self, prompts: Mapping[int, Sequence[int]]) -> Tensor:
        """Call the pool's `prefill`."""
        self.slots.append(sorted(prompts))
        logits: Tensor = self.prefill(prompts)
        if any(BAD in tokens for tokens in prompts.values()):
            raise ExecutionError("a bad token")
        return logits


def prompts_of(*lengths: int) -> list[Request]:
    return [
        request_of(
            number, [4 + (number * 31 + i * 7) % 60 for i in range(length)], max_new_tokens=12
        )
        for number, length in enumerate(lengths)
    ]


def alone(generator: Generator, requests: Sequence[Request]) -> dict[int, list[int]]:
    """Return the results of requests that run one after another."""
    found = {}
    for request in requests:
        (answer,) = generator.generate(list(request.prompt), request.options)
        found[request.request_id] = answer.token_ids
    return found


def with_a_stream(scheduler: Scheduler, requests: Sequence[Request]) -> dict[int, list[int]]:
    """Submit a request after the one before it has some tokens."""
    found: dict[int, list[int]] = {}
    for request in requests:
        scheduler.add(request)
        for _ in range(8):  # until steps are recorded, and until one was computed in both ways
            for output in scheduler.step():
                found.setdefault(output.request_id, []).append(output.token_id or 0)
    for number, outputs in finish(scheduler).items():
        found.setdefault(number, []).extend(tokens(outputs))
    return found


@pytest.mark.parametrize(
    ("name", "joins"), [("qwen3_moe", True), ("granitemoehybrid", True), ("deepseek_v3", False)]
)
def test_prompts_and_streams_share_forwards(name: str, joins: bool, tmp_path: Path) -> None:
    """Streams join where that changes no bit: latents are expanded in prompts, not in steps."""
    generator = Generator(loaded(tmp_path, name), speculate="none")
    first, *others = prompts_of(5, 9, 30, 21)
    requests = [request_of(0, list(first.prompt), max_new_tokens=60), *others]
    expected = alone(generator, requests)
    scheduler = generator.scheduler(4, chunk_tokens=PART, pace=Pace(10.0))
    noted = Noted(scheduler)
    assert with_a_stream(scheduler, requests) == expected
    assert any(len(slots) > 1 for slots in noted.slots)
    assert scheduler._pool.may_join_prefill() == joins
    assert any(0 in slots and len(slots) > 1 for slots in noted.slots) == joins


def test_only_who_is_to_blame_fails(tmp_path: Path) -> None:
    generator = Generator(loaded(tmp_path, "qwen3_moe"), speculate="none")
    stream, one, other = prompts_of(5, 9, 11)
    requests = [
        request_of(0, list(stream.prompt), max_new_tokens=40), one,
        request_of(2, list(other.prompt), max_new_tokens=40),
    ]  # fmt: skip
    other = requests[2]
    expected = alone(generator, requests)
    bad = request_of(3, [9, BAD, 10], max_new_tokens=4)
    scheduler = generator.scheduler(4, chunk_tokens=64, pace=Pace(10.0))
    noted = Noted(scheduler)
    scheduler.add(requests[0])
    found: dict[int, list[int]] = {}
    failed: list[Failure] = []
    for step in range(200):
        coming = {8: [other], 14: [one, bad]}
        for request in coming.get(step, ()):
            scheduler.add(request)
        try:
            outputs = scheduler.step()
        except StepFailedError as error:
            outputs = error.token_outputs
            failed += error.failures
        for output in outputs:
            found.setdefault(output.request_id, []).append(output.token_id or 0)
        if not scheduler.has_work:
            break
    assert [failure.request_ids for failure in failed] == [(3,)]
    assert found == expected
    assert any(len(slots) == 4 for slots in noted.slots), "streams and prompts failed together"


def test_a_common_beginning_is_computed_once(tmp_path: Path) -> None:
    generator = Generator(loaded(tmp_path, "qwen3_moe"), speculate="none")
    beginning = [4 + i * 7 % 60 for i in range(40)]
    requests = [request_of(n, [*beginning, 70 + n, 80], max_new_tokens=5) for n in range(3)]
    expected = alone(Generator(generator.model, speculate="none"), requests)
    scheduler = generator.scheduler(4, chunk_tokens=256, pace=Pace(10.0))
    for request in requests:
        scheduler.add(request)
    assert {n: tokens(outputs) for n, outputs in finish(scheduler).items()} == expected
    assert scheduler.counts.prompt_tokens == len(beginning) + 3 * 2
    assert scheduler.counts.reused_tokens == 2 * len(beginning)


def test_pools_without_such_forwards_have_no_such_chunks() -> None:
    assert not SlotPool.prefills_together
    assert not SlotPool.may_join_prefill(None)  # type: ignore[arg-type]
