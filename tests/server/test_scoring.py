"""Tests of scored and echoed prompts, as lm-eval and others request them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tests.server.running import RunningServer

PROMPTS = [[40 + i * 7 % 50 for i in range(n)] for n in (5, 21, 2)]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_batch_of_prompts_of_tokens_is_scored_as_the_model_does(
    server: RunningServer, tiny_checkpoint: Path, max_tokens: int
) -> None:
    """As in lm-eval's local-completions, the last token is the answer's and is not read."""
    found = server.complete(PROMPTS, max_tokens=max_tokens, logprobs=1, echo=True).ok
    model: Any = tandem.load(str(tiny_checkpoint))
    for choice, prompt in zip(found["choices"], PROMPTS, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0].float()
        expected = torch.log_softmax(logits, -1)
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(prompt) + max_tokens}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        for i, token in enumerate(prompt[1:]):
            value = logprobs["token_logprobs"][i + 1]
            assert value == pytest.approx(float(expected[i, token]), abs=2e-3)
            best = max(logprobs["top_logprobs"][i + 1].values())
            assert best == pytest.approx(float(expected[i].max()), abs=2e-3)
            assert (value == best) == (int(expected[i].argmax()) == token)
    usage = found["usage"]
    assert usage["prompt_tokens"] == sum(map(len, PROMPTS))
    assert usage["completion_tokens"] == max_tokens * len(PROMPTS)


def test_an_echo_is_the_prompt_before_the_answer(server: RunningServer) -> None:
    fields: dict[str, Any] = {"prompt": ["abc", "xyz"], "max_tokens": 4}
    plain = [choice["text"] for choice in server.complete(**fields).ok["choices"]]
    echoed = [choice["text"] for choice in server.complete(**fields, echo=True).ok["choices"]]
    assert echoed == ["abc" + plain[0], "xyz" + plain[1]]
    for more in ({}, {"logprobs": 1}):
        streamed = server.complete(**fields, echo=True, stream=True, **more)
        assert streamed.streamed_texts == echoed


def test_no_tokens_are_no_tokens(server: RunningServer) -> None:
    (choice,) = server.complete(prompt="abc", max_tokens=0).ok["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("", "length", None)


def test_a_batch_of_what_may_run_and_wait_is_taken_on_whole(server: RunningServer) -> None:
    found = server.complete([[40 + i % 60] for i in range(80)], max_tokens=1).ok
    assert len(found["choices"]) == 80
