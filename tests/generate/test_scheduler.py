"""Tests of continuous batching: each request gets what it gets alone."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import tandem
from tandem.core.errors import ConfigError
from tandem.generate.pace import Pace
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.generate.scheduler import Scheduler
from tandem.generate.token_output import StepFailedError, TokenOutput
from tests.architecture_sizes import VOCABULARY
from tests.architectures import build_tiny_model
from tests.hf.tiny import byte_tokenizer

PART = 16


def request_of(number: int, prompt: list[int], **fields: Any) -> Request:
    own = {k: fields.pop(k) for k in Request.__dataclass_fields__ if k in fields}
    return Request(
        request_id=number, prompt=tuple(prompt), options=SamplingOptions(**fields), **own
    )


def finish(scheduler: Scheduler) -> dict[int, list[TokenOutput]]:
    found: dict[int, list[TokenOutput]] = {}
    while scheduler.has_work:
        for progress in scheduler.step():
            found.setdefault(progress.request_id, []).append(progress)
    return found


def tokens(progress: list[TokenOutput]) -> list[int]:
    return [one.token_id for one in progress if one.token_id is not None]


@pytest.fixture
def packed_generator() -> tandem.Generator:
    """A generator with packed linear layers, which are batch-invariant."""
    model: Any = build_tiny_model("mixtral")
    model.generation_config.eos_token_id = None
    return tandem.Generator(model, byte_tokenizer(), dense_dtype="bf16")


def random_requests(count: int) -> list[Request]:
    chance = random.Random(5)
    return [
        request_of(
            number,
            [
                chance.randrange(32, VOCABULARY)
                for _ in range(chance.choice((1, 3, 15, 16, 17, 40)))
            ],
            max_new_tokens=chance.randrange(1, 14),
            **({"temperature": 1.2, "seed": number} if number % 3 == 2 else {}),
        )
        for number in range(count)
    ]


@pytest.mark.every_isa(first_of="name")
@pytest.mark.parametrize(
    ("name", "max_running"),
    [("qwen3_moe", 3), ("gpt_oss", 3), ("gpt_oss", 1), ("deepseek_v2", 3), ("qwen3_next", 3)],
)
def test_a_request_gets_the_same_in_any_company(name: str, max_running: int) -> None:
    """The last architecture has states beside keys, so its requests take turns."""
    model: Any = build_tiny_model(name)
    generator = tandem.Generator(model)
    requests = random_requests(8)
    alone: dict[int, list[TokenOutput]] = {}
    for request in requests:
        scheduler = generator.scheduler(1, chunk_tokens=PART)
        scheduler.add(request)
        alone |= finish(scheduler)
    scheduler = generator.scheduler(max_running, chunk_tokens=PART)
    together: dict[int, list[TokenOutput]] = {}
    chance = random.Random(1)
    arriving = list(requests)
    while arriving or scheduler.has_work:
        while arriving and chance.random() < 0.4:
            scheduler.add(arriving.pop(0))
        for progress in scheduler.step() if scheduler.has_work else ():
            together.setdefault(progress.request_id, []).append(progress)
    for request in requests:
        number = request.request_id
        assert tokens(together[number]) == tokens(alone[number])
        (answer,) = generator.generate(list(request.prompt), request.options)
        assert tokens(alone[number]) == answer.token_ids
        assert together[number][-1].finish_reason == answer.finish_reason


def test_what_leaves_does_not_disturb_what_stays(generator: tandem.Generator) -> None:
    prompt = [40, 41, 42]
    (alone,) = generator.generate(prompt, max_new_tokens=20)
    scheduler = generator.scheduler(4, chunk_tokens=PART)
    scheduler.add(request_of(0, prompt, max_new_tokens=20))
    found = []
    for number in range(1, 12):
        scheduler.add(request_of(number, [50 + number] * number, max_new_tokens=50))
        found += [p for p in scheduler.step() if p.request_id == 0]
        if number > 3:
            assert scheduler.cancel(number - 3)
    while scheduler.num_running and len(found) < 20:
        found += [p for p in scheduler.step() if p.request_id == 0]
    assert tokens(found) == alone.token_ids


def test_cancelling_frees_the_row_before_the_next_step(generator: tandem.Generator) -> None:
    scheduler = generator.scheduler(1, chunk_tokens=PART)
    scheduler.add(request_of(1, [40] * 50, max_new_tokens=9))
    scheduler.add(request_of(2, [41], max_new_tokens=2))
    scheduler.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert scheduler.cancel(1)
    assert not scheduler.cancel(1)
    assert scheduler.num_running == 0
    assert [p.request_id for p in scheduler.step()] == [2]
    assert scheduler.cancel(2)
    assert not scheduler.has_work


def test_a_long_prompt_stops_neither_streams_nor_short_prompts(generator: tandem.Generator) -> None:
    scheduler = generator.scheduler(3, chunk_tokens=PART)
    scheduler.add(request_of(1, [40, 41], max_new_tokens=30))
    scheduler.step()
    scheduler.add(request_of(2, [50 + i % 9 for i in range(10 * PART)], max_new_tokens=1))
    scheduler.add(request_of(3, [60, 61], max_new_tokens=1))
    steps = [{p.request_id for p in scheduler.step()} for _ in range(11)]
    assert all(1 in step for step in steps), "the stream stood still"
    assert 3 in steps[1]
    assert 2 in steps[10]


@pytest.mark.every_isa
def test_prompts_are_completed_one_after_the_other(generator: tandem.Generator) -> None:
    scheduler = generator.scheduler(4, chunk_tokens=PART)
    for number in range(4):  # the last one is long
        length = PART + 8 if number < 3 else 12 * PART
        scheduler.add(request_of(number, [40 + number] * length, max_new_tokens=1))
    chunks: list[int] = []
    for number in range(1, 50):
        outputs = [one for one in scheduler.step() if one.token_id is not None]
        chunks += [number] * len(outputs)
    assert chunks[0] == 3, "two for the first prompt, one for the second between them"
    assert len(chunks) == 4, "the long prompt has its turns"


def test_a_long_prompt_lets_streams_through_in_shorter_parts(
    packed_generator: tandem.Generator,
) -> None:
    """The chunk lengths of a prompt do not change a bit of its answer."""
    long = request_of(
        2, [50 + i % 9 for i in range(4 * PART + 3)], max_new_tokens=6, num_top_logprobs=3,
        may_speculate=False,  # otherwise earlier answers would be drafted
    )  # fmt: skip
    alone = packed_generator.scheduler(2, chunk_tokens=PART)
    alone.add(long)
    expected = [alone.step() for _ in range(5)]
    assert [len(token_outputs) for token_outputs in expected] == [0, 0, 0, 0, 1]
    together = packed_generator.scheduler(2, chunk_tokens=PART)
    together.add(request_of(1, [40, 41], max_new_tokens=60))
    together.step()
    together.add(long)
    steps = [together.step() for _ in range(17)]
    assert all(steps[i][0].request_id == 1 for i in range(16)), "the stream stood still"
    assert [token_output.request_id for token_output in steps[16]] == [2, 1]
    assert [steps[16][0], *finish(together)[2]] == [*expected[4], *finish(alone)[2]]


def test_a_conversation_is_not_prefilled_again(generator: tandem.Generator) -> None:
    first = [40 + i for i in range(20)]
    scheduler = generator.scheduler(3, chunk_tokens=PART)
    scheduler.add(request_of(0, first, max_new_tokens=5))
    answer = tokens(finish(scheduler)[0])
    for other in range(2):  # other requests take the other slots
        scheduler.add(request_of(1 + other, [100 - other] * 6, max_new_tokens=2))
        finish(scheduler)
    longer = [*first, *answer, 77, 78]
    scheduler.add(request_of(9, longer, max_new_tokens=5))
    progress = finish(scheduler)[9]
    assert progress[0].reused_tokens == len(first) + len(answer) - 1
    assert tokens(progress) == generator.generate(longer, max_new_tokens=5)[0].token_ids


def test_a_beginning_in_a_busy_row_is_copied(generator: tandem.Generator) -> None:
    system = [40 + i for i in range(30)]
    scheduler = generator.scheduler(2, chunk_tokens=PART)
    scheduler.add(request_of(0, [*system, 90, 91], max_new_tokens=20))
    early = [progress for _ in range(4) for progress in scheduler.step()]
    scheduler.add(request_of(1, [*system, 95], max_new_tokens=6))
    found = finish(scheduler)
    found[0] = early + found[0]
    assert found[1][0].reused_tokens == len(system)
    for number, prompt in ((0, [*system, 90, 91]), (1, [*system, 95])):
        (alone,) = generator.generate(prompt, max_new_tokens=len(found[number]))
        assert tokens(found[number]) == alone.token_ids


def test_prompts_that_come_at_once_and_begin_alike_are_computed_once(
    generator: tandem.Generator,
) -> None:
    prompt = [40 + i % 50 for i in range(4 * PART + 5)]
    scheduler = generator.scheduler(3, chunk_tokens=PART)
    for number in range(3):
        scheduler.add(request_of(number, [*prompt, 90 + number], max_new_tokens=4))
    found = finish(scheduler)
    # The shared prefix once, and each one's last token.
    assert scheduler.counts.prompt_tokens == len(prompt) + 3
    assert sum(found[number][0].reused_tokens for number in range(3)) == 2 * len(prompt)
    for number in range(3):
        (alone,) = generator.generate([*prompt, 90 + number], max_new_tokens=4)
        assert tokens(found[number]) == alone.token_ids


def test_text_stop_strings_and_the_rest_are_the_generators(generator: tandem.Generator) -> None:
    (free,) = generator.generate("hello", max_new_tokens=30)
    prompt = byte_tokenizer()("hello")["input_ids"]
    scheduler = generator.scheduler(2, chunk_tokens=PART)
    scheduler.add(request_of(0, prompt, max_new_tokens=30))
    scheduler.add(request_of(1, prompt, max_new_tokens=30, stop=(free.text[4:7],)))
    found = finish(scheduler)
    assert "".join(p.text for p in found[0]) == free.text
    assert "".join(p.text for p in found[1]) == free.text.partition(free.text[4:7])[0]
    assert [found[n][-1].finish_reason for n in (0, 1)] == ["length", "stop"]


def test_logprobs_are_the_models(generator: tandem.Generator, model: Any) -> None:
    prompt = [40, 41, 42]
    scheduler = generator.scheduler(1, chunk_tokens=PART)
    scheduler.add(request_of(0, prompt, max_new_tokens=3, num_top_logprobs=4))
    progress = finish(scheduler)[0]
    ids = torch.tensor([[*prompt, *tokens(progress)]])
    with torch.no_grad():
        expected = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], -1)
    for one, row in zip(progress, expected, strict=True):
        assert one.logprob is not None
        assert one.logprob.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert [i for i, _ in one.logprob.top] == row.topk(4).indices.tolist()
        assert one.logprob.top[0][0] == one.token_id


class Spell:
    """A constraint that allows only given tokens, one after another."""

    def __init__(self, ids: str) -> None:
        self.ids = [int(token) for token in ids.split()]

    def restrict(self, scores: Tensor) -> Tensor:
        limited = torch.full_like(scores, float("-inf"))
        limited[:, self.ids[0]] = scores[:, self.ids[0]]
        return limited

    def accept(self, token: int) -> bool:
        assert token == self.ids.pop(0)
        return not self.ids


def test_a_constraint_rules_what_comes_and_ends_it(generator: tandem.Generator) -> None:
    scheduler = generator.scheduler(2, chunk_tokens=PART, follow_grammar=Spell)
    scheduler.add(request_of(0, [40], max_new_tokens=9, grammar="77 66 55"))
    scheduler.add(request_of(1, [41], max_new_tokens=4))
    found = finish(scheduler)
    assert tokens(found[0]) == [77, 66, 55]
    assert found[0][-1].finish_reason == "stop"
    (alone,) = generator.generate([41], max_new_tokens=4)
    assert tokens(found[1]) == alone.token_ids


def test_a_prompt_that_cannot_run_is_refused_at_once(generator: tandem.Generator) -> None:
    scheduler = generator.scheduler(1)
    with pytest.raises(ConfigError, match="is empty"):
        scheduler.add(request_of(0, []))
    assert not scheduler.has_work


class Breaks(Spell):
    """A constraint that fails at its second call."""

    def restrict(self, scores: Tensor) -> Tensor:
        if len(self.ids) == 1:
            raise RuntimeError("the constraint broke")
        return super().restrict(scores)


def test_where_nothing_follows_a_grammar_it_is_refused(generator: tandem.Generator) -> None:
    scheduler = generator.scheduler(1)
    scheduler.add(request_of(0, [40], grammar="77"))
    with pytest.raises(StepFailedError, match="leave the grammar out"):
        scheduler.step()
    assert not scheduler.has_work


def test_who_fails_alone_is_dropped_alone(generator: tandem.Generator) -> None:
    scheduler = generator.scheduler(2, chunk_tokens=PART, follow_grammar=Breaks)
    scheduler.add(request_of(0, [40], max_new_tokens=9, grammar="77 66"))
    scheduler.add(request_of(1, [41], max_new_tokens=6))
    found, failures = [], []
    while scheduler.has_work:
        try:
            found += scheduler.step()
        except StepFailedError as failed:
            found += failed.token_outputs
            failures += failed.failures
    assert [(failure.request_ids, str(failure.error)) for failure in failures] == [
        ((0,), "the constraint broke")
    ]
    assert tokens([p for p in found if p.request_id == 0]) == [77]
    (alone,) = generator.generate([41], max_new_tokens=6)
    assert tokens([p for p in found if p.request_id == 1]) == alone.token_ids


def test_lower_numbers_go_first(generator: tandem.Generator) -> None:
    scheduler = generator.scheduler(1, chunk_tokens=PART)
    for number, priority in enumerate((0, 5, 0, -1)):
        scheduler.add(request_of(number, [40 + number], max_new_tokens=2, priority=priority))
    assert list(finish(scheduler)) == [3, 0, 2, 1]


def test_a_paced_prompt_gives_what_it_gives_alone(packed_generator: tandem.Generator) -> None:
    """Chunks have any length, and other requests' tokens run between them."""
    long = request_of(
        2, [40 + i % 50 for i in range(120)], max_new_tokens=8, num_top_logprobs=3,
        may_speculate=False,
    )  # fmt: skip
    alone = packed_generator.scheduler(2, chunk_tokens=PART)
    alone.add(long)
    expected = finish(alone)[2]
    paced = packed_generator.scheduler(2, chunk_tokens=PART * 4, pace=Pace(0.01))
    paced.add(request_of(1, [50], max_new_tokens=100))
    for _ in range(3):
        paced.step()
    paced.add(long)
    found = finish(paced)[2]
    assert [token.token_id for token in found] == [token.token_id for token in expected]
    # The router's product in torch depends on the number of rows in its last bits.
    for one, other in zip(found, expected, strict=True):
        assert one.logprob is not None
        assert other.logprob is not None
        assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-4)
