"""Tests of continuous batching: when answers end, and log probabilities of prompts."""

from typing import Any

import pytest
import torch

import tandem
from tests.architectures import build_tiny_model
from tests.generate.test_scheduler import PART, Spell, finish, request_of, tokens

PROMPT = [40 + i * 7 % 50 for i in range(2 * PART + 5)]


@pytest.mark.seam
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_logprobs_of_a_prompt_are_the_models(name: str) -> None:
    """The second architecture has states beside keys, so its prompts run padded."""
    model: Any = build_tiny_model(name)
    model.generation_config.eos_token_id = None
    scheduler = tandem.Generator(model).scheduler(2, chunk_tokens=PART)
    for number in range(2):  # the second finds the first one's keys, and must not go on with them
        scheduler.add(
            request_of(
                number, PROMPT, max_new_tokens=2, num_top_logprobs=3, has_prompt_logprobs=True
            )
        )
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].float(), -1)
    for token_outputs in finish(scheduler).values():
        assert [token_output.prompt_logprobs is None for token_output in token_outputs] == [
            False,
            True,
        ]
        first, *others = token_outputs[0].prompt_logprobs or ()
        assert first is None
        assert len(others) == len(PROMPT) - 1
        for found, token, row in zip(others, PROMPT[1:], expected, strict=False):
            assert found is not None
            assert found.token_id == token
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert [i for i, _ in found.top] == row.topk(3).indices.tolist()


def test_a_prompt_alone_is_computed_and_nothing_is_chosen(generator: tandem.Generator) -> None:
    scheduler = generator.scheduler(1, chunk_tokens=PART)
    fields: dict[str, Any] = {"num_top_logprobs": 0, "has_prompt_logprobs": True}
    scheduler.add(request_of(0, PROMPT, is_prompt_only=True, **fields))
    scheduler.add(request_of(1, [50], max_new_tokens=1))
    found = finish(scheduler)
    (token_output,) = found[0]
    assert (token_output.token_id, token_output.generated_tokens, token_output.finish_reason) == (
        None,
        0,
        "length",
    )
    assert len(token_output.prompt_logprobs or ()) == len(PROMPT)
    assert len(tokens(found[1])) == 1


def test_an_end_of_sequence_is_ignored_or_put_off(
    model: Any, generator: tandem.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    (free,) = generator.generate(PROMPT, max_new_tokens=12)
    end_id = free.token_ids[3]
    ends: list[dict[str, Any]] = [
        {"stop_token_ids": (end_id,)},
        {"stop_token_ids": (end_id,), "min_tokens": 7},
        {"ignore_eos": True},
        {},
    ]
    monkeypatch.setattr(model.generation_config, "eos_token_id", free.token_ids[0])
    scheduler = generator.scheduler(3, chunk_tokens=PART)
    for number, end in enumerate(ends):
        scheduler.add(request_of(number, PROMPT, max_new_tokens=12, **end))
    found = finish(scheduler)
    assert tokens(found[3]) == free.token_ids[:1], "the model's own end"
    assert tokens(found[2]) == free.token_ids
    assert len(found[1]) >= 7
    assert not {end_id, free.token_ids[0]} & {*tokens(found[1])[:7]}


def test_a_stop_string_waits_for_the_least_length(generator: tandem.Generator) -> None:
    (free,) = generator.generate(PROMPT, max_new_tokens=20)
    scheduler = generator.scheduler(1, chunk_tokens=PART)
    stop = (free.text[:2],)
    scheduler.add(request_of(0, PROMPT, max_new_tokens=20, stop=stop, min_tokens=10))
    assert len(finish(scheduler)[0]) >= 10


def test_a_grammar_has_the_last_word_about_the_end(generator: tandem.Generator) -> None:
    scheduler = generator.scheduler(1, chunk_tokens=PART, follow_grammar=Spell)
    end: dict[str, Any] = {"min_tokens": 9, "stop_token_ids": (66,)}
    scheduler.add(request_of(0, PROMPT, grammar="77 66 55", **end))
    assert tokens(finish(scheduler)[0]) == [77, 66]


def test_a_generator_takes_what_the_server_takes(generator: tandem.Generator) -> None:
    biased = ((66, 100.0),)
    (answer,) = generator.generate(PROMPT, logit_bias=biased, stop_token_ids=(66,), min_tokens=4)
    assert answer.token_ids.index(66) == 4
    (repeated,) = generator.generate(PROMPT, logit_bias=biased, max_new_tokens=5)
    assert repeated.token_ids == [66] * 5
    (varied,) = generator.generate(
        PROMPT, logit_bias=biased, max_new_tokens=5, presence_penalty=200.0
    )
    assert varied.token_ids.count(66) == 1
