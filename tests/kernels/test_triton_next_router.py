"""Tests of the kernels that ask a router, in Triton's interpreter, against torch."""

from typing import Any

import pytest
import torch

from tandem.experts.execution.look_ahead_routers import SCORINGS, LookAheadRouter
from tandem.hf.lookahead.linear_routers import scored
from tests.kernels.interpreter import interpreted_module

pytest.importorskip("triton")

handing = interpreted_module("tandem.devices.cuda.handing")


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_bias_is_added_after_a_function_of_the_products(handing: Any, scoring: str) -> None:
    """Products may be so large that an exponential overflows."""
    random = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(24, 40, generator=random), torch.randn(2, 40, generator=random)
    residual, bias = torch.randn(40, generator=random), torch.randn(24, generator=random)
    weight[0], weight[1] = 40 * hidden[0].sign(), -40 * hidden[0].sign()
    words, floats = torch.zeros(6, dtype=torch.int32), torch.zeros(6)
    guess, guessed = torch.full((6,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    box = handing.MailboxTensors(
        words, words, words, words, floats, words.long(), guessed, guess, hidden, floats,
        handing.WaitWords(words, words),
    )  # fmt: skip
    index = torch.zeros(2, 3, dtype=torch.int64)
    router = LookAheadRouter(weight, bias, residual, scoring)
    handing.publish_guess(box, handing.NextRouter(router, hidden), index, 24)
    scores = scored((hidden + residual) @ weight.T, scoring) + bias
    assert guess.view(2, 3).sort().values.tolist() == scores.topk(3).indices.sort().values.tolist()
    assert guessed.tolist() == [1]
