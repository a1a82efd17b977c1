"""Tests of speculation: drafts, how many are verified, and unchanged answers."""

import gc
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.bench.routing_recording import recording
from tandem.core.errors import ConfigError
from tandem.experts.execution.recorder import RoutingRecorder
from tandem.experts.tracing.events import ExpertStatistics, LayerExecuted
from tandem.generate.answer import Answer
from tandem.generate.generator import Generator
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.generate.scheduler import Scheduler
from tandem.generate.speculation.speculation import Speculation
from tandem.hf.runtime import require_runtime
from tandem.policy.speculation.drafter import MOST_DRAFTED, Draft
from tandem.policy.speculation.free_drafts import FreeDrafts
from tandem.policy.speculation.plans import NextStep, Plan
from tandem.policy.speculation.prompt_lookup import EarlierAnswers, PromptLookup
from tandem.policy.speculation.step_shape import TouchedExperts
from tests.hf.tiny import loaded

NEW_TOKENS = 24
PENALTIES: dict[str, Any] = {
    "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": ((50, -1.0),),
}  # fmt: skip
PROMPTS = [[40 + i % 37 for i in range(length)] for length in (9, 30, 5, 61)]
RULES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.3, "seed": 3},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "seed": 4},
    {"temperature": 0.8, "min_p": 0.02, "repetition_penalty": 1.3, "seed": 5},
]


class Scripted(Speculation):
    """Drafts the known answers, with random errors and lengths."""

    def __init__(self, answers: Mapping[int, Sequence[int]]) -> None:
        """Store the requests' whole sequences, by slot."""
        super().__init__([])
        self.answers = answers
        self.chance = random.Random(7)

    def choose(
        self, histories: Mapping[int, Sequence[int]], rooms: Mapping[int, int], batch: int
    ) -> dict[int, Sequence[int]]:
        drafts: dict[int, Sequence[int]] = {}
        for slot, tokens in histories.items():
            known = next((one for one in self.answers.values() if one[: len(tokens)] == tokens), [])
            most = min(self.chance.randrange(0, 5), rooms[slot])
            draft = list(known[len(tokens) : len(tokens) + most])
            drafts[slot] = [t if self.chance.random() < 0.8 else 39 for t in draft]
        return drafts


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "glm_moe_dsa"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return loaded(tmp_path_factory.mktemp("models"), request.param)


def looking_up() -> Speculation:
    return Speculation([FreeDrafts(PromptLookup)])


def speculating(model: Any, speculation: Speculation) -> Generator:
    generator = Generator(model)
    generator.speculation = speculation
    return generator


# A rule's effect on scores does not depend on the model.
@pytest.mark.parametrize(
    ("model", "rule"),
    [*(("qwen3_moe", rule) for rule in RULES), ("gpt_oss", RULES[2]), ("glm_moe_dsa", RULES[0])],
    indirect=["model"],
)
def test_answers_are_those_without(model: Any, rule: dict[str, Any]) -> None:
    require_same_answers(model, rule)


@pytest.mark.parametrize("name", ["qwen3_5_moe", "lfm2_moe", "nemotron_h"])
def test_answers_of_models_with_states_are_those_without(name: str, tmp_path: Path) -> None:
    """Qwen's linear layer stays unpacked; recorded steps multiply it natively."""
    require_same_answers(loaded(tmp_path, name), RULES[-1])


def require_same_answers(model: Any, rule: dict[str, Any]) -> None:
    plain = Generator(model, speculate="none")
    for prompts in (PROMPTS[:1], PROMPTS):
        expected = plain.generate(prompts, max_new_tokens=NEW_TOKENS, **rule)
        whole = [[*p, *one.token_ids] for p, one in zip(prompts, expected, strict=True)]
        generator = speculating(model, Scripted(dict(enumerate(whole))))
        for _ in range(2):  # the second time from recorded steps, and from the slots' contents
            answers = generator.generate(prompts, max_new_tokens=NEW_TOKENS, **rule)
            assert texts(answers) == texts(expected)
            assert sum(one.accepted_tokens for one in answers) > NEW_TOKENS / 4
            assert all(one.accepted_tokens <= one.drafted_tokens for one in answers)


def texts(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


class EvenTokens:
    """A constraint with a state: even and odd tokens alternate."""

    def __init__(self, grammar: str) -> None:
        self.count = 0

    def restrict(self, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, (self.count % 2) :: 2] = -torch.inf
        return scores

    def accept(self, token: int) -> bool:
        self.count += 1
        return False


def requests() -> list[Request]:
    return [
        Request(
            request_id=number,
            prompt=tuple(prompt),
            options=SamplingOptions(
                max_new_tokens=NEW_TOKENS - number,
                temperature=1,
                seed=number,
                **(PENALTIES if number == 2 else {}),
            ),
            grammar="even and odd" if number == 0 else None,
            num_top_logprobs=2,
            may_speculate=number != 3,
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def finished(scheduler: Scheduler) -> dict[int, list[Any]]:
    for request in requests():
        scheduler.add(request)
    found: dict[int, list[Any]] = {}
    while scheduler.has_work:
        for one in scheduler.step():
            found.setdefault(one.request_id, []).append((one.token_id, one.text, one.logprob))
    return found


def test_constraints_and_log_probabilities_are_those_without(model: Any) -> None:
    plain = finished(Generator(model, speculate="none").scheduler(4, follow_grammar=EvenTokens))
    whole = {n: [*PROMPTS[n], *(token for token, *_ in plain[n])] for n in plain}
    scheduler = speculating(model, Scripted(whole)).scheduler(4, follow_grammar=EvenTokens)
    assert finished(scheduler) == plain
    assert scheduler.counts.accepted_tokens > NEW_TOKENS / 4
    assert scheduler.counts.decode_steps < NEW_TOKENS


def test_answers_with_an_expert_cache_are_those_without(tmp_path: Path) -> None:
    model = loaded(tmp_path, "qwen3_moe", device="emulated", gpu_memory="200KB")
    expected = Generator(model, speculate="none").generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    whole = [[*p, *one.token_ids] for p, one in zip(PROMPTS, expected, strict=True)]
    generator = speculating(model, Scripted(dict(enumerate(whole))))
    answers = generator.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert texts(answers) == texts(expected)
    assert sum(one.accepted_tokens for one in answers) > NEW_TOKENS / 4


def test_costs_follow_what_is_touched_and_resident(tmp_path: Path) -> None:
    model = loaded(tmp_path, "qwen3_moe", device="emulated", gpu_memory="200KB")
    listeners = require_runtime(model).executor.listeners
    num_before = len(listeners)
    generator = Generator(model)
    generator.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert generator.speculation is not None
    touched = generator.speculation.costs.shape
    assert isinstance(touched, TouchedExperts)
    assert touched._num_seen > NEW_TOKENS
    assert 0 < touched(1) < touched(4)
    assert len(listeners) == num_before + 1
    del generator, touched
    gc.collect()
    assert len(listeners) == num_before


def test_what_records_routing_sees_a_token_a_step(model: Any) -> None:
    with recording(model) as recorder:
        recorder.begin_sequences()
        generator = speculating(model, Scripted({0: [*PROMPTS[0], *[40] * 50]}))
        generator.prepare()
        recorder.begin_sequences()
        (answer,) = generator.generate(PROMPTS[0], max_new_tokens=8)
        trace = recorder.trace("tiny")
    assert answer.drafted_tokens == 0
    assert len(trace.experts) >= len(PROMPTS[0]) + 7


def test_a_recorder_that_hears_of_drafts_has_what_was_kept(tmp_path: Path) -> None:
    """`--explain` with an expert cache records the same routing with and without drafts."""
    model = loaded(tmp_path, "qwen3_moe", device="emulated", gpu_memory="200KB")
    runtime, found = require_runtime(model), []
    inner = runtime.executor
    (plain,) = Generator(model, speculate="none").generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    script = {0: [*PROMPTS[0], *plain.token_ids]}
    for speculation in (None, Scripted(script)):
        generator = Generator(model, speculate="none")
        recorder = RoutingRecorder(inner, hears_of_drafts=True)
        with runtime.using(recorder):
            generator.prepare()
            generator.speculation = speculation
            if speculation is not None:
                speculation.on_kept = recorder.keep
            recorder.begin_sequences()
            (answer,) = generator.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
        found.append(recorder.trace("tiny"))
    assert answer.accepted_tokens > NEW_TOKENS / 4
    assert answer.drafted_tokens > answer.accepted_tokens
    for trace in found:
        assert trace.token_ids is not None
        assert trace.token_ids.tolist() == script[0][:-1]
        assert np.array_equal(trace.experts, found[0].experts)


@dataclass
class Known:
    """A drafter that always offers the same number of tokens of a known text."""

    text: Sequence[int]
    count: int

    def plan(self, step: NextStep) -> Plan:
        """Draft the tokens, whatever they cost."""
        drafts = {
            slot: self.text[len(tokens) : len(tokens) + min(self.count, step.rooms[slot])]
            for slot, tokens in step.histories.items()
        }
        return Plan(2.0, 1.0, lambda: {slot: draft for slot, draft in drafts.items() if draft})

    def forget(self, slot: int) -> None:
        """Do nothing."""


@pytest.mark.parametrize("is_right", [True, False])
def test_bytes_that_drafts_save_are_counted(model: Any, is_right: bool) -> None:
    (plain,) = Generator(model, speculate="none").generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    text = [*PROMPTS[0], *(plain.token_ids if is_right else [39] * NEW_TOKENS)]
    generator = speculating(model, Speculation([Known(text, 3)]))
    executor, speculation = require_runtime(model).executor, generator.speculation
    assert speculation is not None
    generator.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)  # records the steps
    speculation.experts, before = ExpertStatistics(), speculation.counts.copy()
    shared = 0

    def add_shared(event: LayerExecuted) -> None:
        nonlocal shared
        if event.num_tokens in (2, 3, 4):
            each = event.touched_bytes // event.num_active_experts
            assert event.chosen is not None
            assert event.num_active_experts == len(event.chosen.unique())
            shared += (event.chosen.numel() - len(event.chosen.unique())) * each

    executor.listeners += [speculation.experts, add_shared]
    (answer,) = generator.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    executor.listeners.remove(speculation.experts)
    executor.listeners.remove(add_shared)
    saved = speculation.counts.since(before).saved_bytes
    assert answer.token_ids == plain.token_ids
    if is_right:
        assert saved == shared > 0
    else:
        assert saved < 0


def test_prompt_lookup_finds_the_latest_and_longest() -> None:
    lookup = PromptLookup()
    assert lookup.draft([1]).tokens == ()
    assert lookup.draft([1, 2, 3, 9, 2, 3]).tokens == [9, 2, 3]
    assert lookup.draft([1, 2, 3, 9, 2, 3, 7, 1, 2, 3]).tokens == [9, 2, 3, 7, 1, 2, 3]
    assert lookup.draft([1, 2, 3, 9, 2, 3, 7, 1, 2, 3, 5, 6]) == Draft((), ())
    long = list(range(100, 130))
    found = PromptLookup().draft([*long, 1, *long[:20]])
    assert found == Draft(long[20 : 20 + MOST_DRAFTED], [3] * MOST_DRAFTED)


def test_earlier_answers_are_looked_up() -> None:
    chance = random.Random(2)
    answer = [chance.randrange(1000) for _ in range(200)]
    way = FreeDrafts(partial(PromptLookup, EarlierAnswers()))
    speculation = Speculation([way])
    for _ in range(40):
        speculation.costs.add(1, 1.0)
    prompt = [1, 2, 3]
    assert len(grown(speculation, [*prompt, *answer], CHEAP)) > 180
    speculation.forget(0)
    again = grown(speculation, [4, *prompt, *answer], CHEAP)
    assert len(again) < 100
    way.forget(7)  # which never drafted


def test_earlier_answers_are_bounded() -> None:
    earlier = EarlierAnswers(most_tokens=25)
    for first in (100, 200, 300):
        earlier.add(range(first, first + 10))
    assert earlier.find([9, 300, 301, 302]) == (tuple(range(300, 310)), 3)
    assert earlier.find([100, 101, 102]) == ((), 0)
    earlier.add([300, 301, 302, 7])  # the latest place is found, and stays when the older goes
    earlier.add(range(400, 420))
    assert earlier.find([300, 301, 302])[0] == (300, 301, 302, 7)
    assert earlier.find([301, 302, 303]) == ((), 0)
    earlier.add(range(1000))
    assert len(earlier._ends) == 25 - 3
    assert earlier.find([300, 301, 302]) == ((), 0)


def test_steps_are_counted_by_drafted_tokens() -> None:
    speculation = looking_up()
    assert speculation.counts.line() == "no step could have verified drafted tokens"
    before = speculation.counts.copy()
    text = [*range(50)] * 4
    drafted = grown(speculation, text, CHEAP)
    counts = speculation.counts.since(before)
    assert counts.steps.total() == len(drafted)
    assert counts.num_drafting == sum(n > 0 for n in drafted)
    assert re.search(r"steps verified drafted tokens: .*7 \(", counts.line())
    assert "there was nothing to draft" in counts.line()
    grown(dear := looking_up(), text, DEAR)
    assert dear.counts.num_unpaid > 50


def grown(speculation: Speculation, text: Sequence[int], seconds: dict[int, float]) -> list[int]:
    """Let one request generate a text; return the number of drafted tokens of each step."""
    at, drafted = 1, []
    while at < len(text):
        draft = speculation.choose({0: text[:at]}, {0: len(text) - at - 1}, 1).get(0, ())
        num_kept = next((i for i, t in enumerate(draft) if t != text[at + i]), len(draft))
        speculation.costs.add(1 + len(draft), seconds[1 + len(draft)])
        drafted.append(len(draft))
        at += num_kept + 1
    return drafted


CHEAP = {size: 1 + 0.2 * (size - 1) for size in range(1, 9)}
DEAR = {size: float(size) for size in range(1, 9)}


def test_drafts_are_verified_where_that_pays() -> None:
    chance = random.Random(1)
    new = [chance.randrange(1000) for _ in range(400)]
    again = [*new[:200], *new[:200]]
    assert max(grown(looking_up(), new, CHEAP)) == 0
    quoting = grown(looking_up(), again, CHEAP)
    assert len(quoting) < 200 + 50
    assert sum(grown(looking_up(), again, DEAR)) < 40  # tried, measured, left alone


def test_drafts_are_judged_without_being_verified() -> None:
    way = FreeDrafts(PromptLookup)
    speculation = Speculation([way])
    misleading = [x for i in range(60) for x in (5, 6, 100 + i)]
    grown(speculation, misleading, DEAR)
    draft = PromptLookup().draft([*misleading, 5, 6])
    assert way.acceptance.chances(draft.evidence)[0] < 0.1


def test_a_request_gets_no_more_than_it_has_room_for() -> None:
    speculation = looking_up()
    text = [*range(50)] * 4
    grown(speculation, text, CHEAP)
    assert len(speculation.choose({0: text}, {0: 2}, 1).get(0, ())) <= 2
    assert not speculation.choose({0: text}, {0: 0}, 1)


def test_unknown_drafters_are_refused(model: Any) -> None:
    assert Generator(model, speculate="none").speculation is None
    with pytest.raises(ConfigError, match="unknown drafter 'lokup'; did you mean 'lookup'"):
        Generator(model, speculate="lokup")
