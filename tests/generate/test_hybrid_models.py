"""Tests of models with states beside keys and values: batches, and reused prefixes."""

from typing import Any

import pytest

import tandem
from tandem.generate.generator import Generator
from tests.hf.tiny import save_tiny_checkpoint

PROMPTS = [[40 + i % 50 for i in range(n)] for n in (5, 90, 150)]
TURN = [90, 91, 92]


@pytest.fixture(scope="module", params=["qwen3_5_moe", "lfm2_moe", "nemotron_h"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", request.param)
    model = tandem.load(folder, expert_dtype="int8-g32", threads=1)
    model.generation_config.eos_token_id = None
    return model


def answers(generator: Generator, *prompts: list[int]) -> list[list[int]]:
    return [answer.token_ids for answer in generator.generate(list(prompts), max_new_tokens=8)]


def test_prompts_together_are_answered_as_alone(model: Any) -> None:
    assert answers(Generator(model), *PROMPTS) == [
        answers(Generator(model), prompt)[0] for prompt in PROMPTS
    ]


def test_turns_and_edits_reuse_what_was_computed(model: Any) -> None:
    generator = Generator(model)
    first = PROMPTS[2]
    (continuation,) = answers(generator, first)
    turns = [
        [*first, *continuation, *TURN],
        [*first[:146], *TURN],
        [*first, *continuation, *TURN, 93],
    ]
    for prompt in turns:
        answer = generator.generate(prompt, max_new_tokens=8)[0]
        assert answer.token_ids == answers(Generator(model), prompt)[0]
        assert answer.reused_tokens >= 142
