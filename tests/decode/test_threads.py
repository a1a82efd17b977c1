"""Tests of a second thread that runs a model in Transformers while Tandem steps it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tandem
from tandem.decode.substitutions import attention
from tandem.decode.substitutions.attention import attention_forward
from tests.architectures import build_tiny_model

PROMPT = [(7 * i) % 90 + 10 for i in range(80)]  # long enough for native norms
NUM_NEW = 5
PATIENCE_SECONDS = 60


class Gate:
    """Wraps Tandem's attention and lets another thread run during a forward."""

    def __init__(self, meanwhile: Callable[[], Any]) -> None:
        self._meanwhile = meanwhile
        self.answers: list[Any] = []

    def __call__(self, module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.shape[2] == len(PROMPT) and not self.answers:
            other = threading.Thread(target=lambda: self.answers.append(self._meanwhile()))
            other.start()
            other.join(PATIENCE_SECONDS)
            assert not other.is_alive()
            assert self.answers, "the other thread raised"
        return attention_forward(module, query, *args, **kwargs)


def by_transformers(model: Any) -> tuple[list[int], Tensor]:
    """Return Transformers' own generated tokens, and the prompt's logits."""
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        written = model.generate(ids, max_new_tokens=NUM_NEW, do_sample=False)
        return written[0, len(PROMPT) :].tolist(), model(input_ids=ids).logits


# sdpa; eager, which Transformers registers under no name; a latent that is expanded
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
@pytest.mark.seam
def test_another_threads_generate_is_transformers_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = build_tiny_model(name)
    model.generation_config.eos_token_id = None
    expected_tokens, expected_logits = by_transformers(model)
    alone = tandem.Generator(model).generate([PROMPT], max_new_tokens=NUM_NEW)[0]
    gate = Gate(lambda: by_transformers(model))
    monkeypatch.setattr(attention, "attention_forward", gate)
    meanwhile = tandem.Generator(model).generate([PROMPT], max_new_tokens=NUM_NEW)[0]
    ((tokens, logits),) = gate.answers
    assert tokens == expected_tokens
    assert torch.equal(logits, expected_logits)
    assert meanwhile.token_ids == alone.token_ids
