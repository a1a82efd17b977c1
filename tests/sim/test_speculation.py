"""Tests of drafted tokens on traces: complete sequences, and wrong drafts only cost."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tandem.cli.main import main
from tandem.core.errors import ConfigError
from tandem.hardware.profiles import load_profile
from tandem.sim.speculation import SpeculationChoice, TraceSpeculation
from tandem.sim.steps import replay_steps
from tandem.sim.timeline import Timeline
from tandem.trace import RoutingTrace
from tests.sim.test_steps import trace

TRACE = str(Path(__file__).parents[2] / "data" / "traces" / "gpt-oss-20b.npz")
LENGTHS = [40, 25, 31]


def steps_of(
    one: RoutingTrace, drafter: str, length: str, batch: int = 1
) -> tuple[list[int], TraceSpeculation]:
    """Return the tokens of each decode step; a step takes a second plus .2 a draft."""
    profile = load_profile("laptop-8gb")
    clock = Timeline(profile, profile.shapes[0])
    decoding = TraceSpeculation(
        one, SpeculationChoice.parsed(drafter, length), clock, lambda n: 0.1
    )
    new_tokens = []
    for step in replay_steps(one, batch, 4, decoding):
        if not step.is_prefill:
            new_tokens.append(step.num_new)
            assert batch <= step.num_new <= len(step.tokens)
            clock.now += 1 + 0.2 * (len(step.tokens) - 1)
    return new_tokens, decoding


@pytest.mark.parametrize("length", ["0", "1", "3", "7", "auto"])
@pytest.mark.parametrize("drafter", ["mtp=0", "mtp=0.6", "sure-mtp=0.6", "mtp=1", "n-gram"])
def test_every_token_comes_once(drafter: str, length: str) -> None:
    new_tokens, decoding = steps_of(trace(LENGTHS), drafter, length)
    assert sum(new_tokens) == sum(LENGTHS) - 4 * len(LENGTHS)
    assert decoding.accepted == sum(new_tokens) - len(new_tokens)
    assert decoding.accepted <= decoding.drafted
    if drafter == "mtp=1" and length == "3":
        assert len(new_tokens) == 9 + 6 + 7  # 36, 21 and 27 tokens, four in a step
    if drafter == "mtp=0" or length == "0":
        assert decoding.accepted == 0


def test_look_up_finds_what_stood_before() -> None:
    one = dataclasses.replace(trace([60]), token_ids=np.tile(np.arange(10, dtype=np.int32), 6))
    new_tokens, decoding = steps_of(one, "n-gram", "3")
    assert decoding.accepted > 30
    assert max(new_tokens) == 4


def test_the_length_follows_what_it_costs() -> None:
    often, _ = steps_of(trace([900]), "mtp=0.95", "auto")
    never, decoding = steps_of(trace([900]), "mtp=0.05", "auto")
    assert len(often) < 400
    assert decoding.drafted < 80
    assert len(never) > 880


@pytest.mark.parametrize(
    ("drafter", "length", "message"),
    [
        ("lookup", "auto", "--speculate is 'lookup'; expected n-gram, mtp=ACCEPTANCE or sure-mtp"),
        ("mtp=2", "auto", "mtp=ACCEPTANCE got '2'; expected a number from 0 to 1"),
        ("mtp", "auto", "mtp=ACCEPTANCE got ''"),
        ("n-gram", "some", "--length got 'some'; expected a number from 0 to 7"),
    ],
)
def test_mistakes_are_one_sentence(drafter: str, length: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SpeculationChoice.parsed(drafter, length)
    assert message in str(raised.value)


def test_look_up_needs_token_ids() -> None:
    with pytest.raises(ConfigError, match="the trace has no token ids"):
        steps_of(dataclasses.replace(trace([9]), token_ids=None), "n-gram", "1")


def test_the_command_tells_what_was_drafted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", TRACE, "--limit", "60", "--speculate", "mtp=0.9", "--length", "2"]
    assert main([*words, "--json"]) == 0
    speculation = json.loads(capsys.readouterr().out.splitlines()[-1])["speculation"]
    assert speculation["tokens_per_step"] > 1.5
    assert speculation["accepted"] <= speculation["drafted"]
