"""Tests of attention with sinks and softcaps on the GPU's KV cache: results and memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.kernels.attention import AttentionForm, Segment
from tandem.kv_cache.attention_call import AttentionCall
from tandem.kv_cache.cuda import attention
from tandem.kv_cache.cuda.cache import StaticKvCache

NUM_TOKENS, MOST_BYTES = 200, 1 << 17


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                self.num_bytes = max(self.num_bytes, result.nbytes)
        return results


def read_prompt(window: int, softcap: float, sinks: Tensor | None) -> tuple[Tensor, int]:
    """Attend a prompt and one more token; return the results and the largest tensor's bytes."""
    generator = torch.Generator().manual_seed(0)
    form = AttentionForm(
        num_heads=8, num_kv_heads=2, key_dim=16, value_dim=16, scale=0.25, window=window,
        softcap=softcap,
    )  # fmt: skip
    cache = StaticKvCache(1, NUM_TOKENS + 1, torch.device("cpu"))

    def attend(count: int) -> Tensor:
        query = torch.randn(8, count, 16, generator=generator)
        key, value = torch.randn(2, 2, count, 16, generator=generator)
        cache.expect(0)
        found = cache.attend(AttentionCall(form, query, key, value, sinks))
        return found.view(count, 8 * 16).view(count, 8, 16)  # as models' code reads it

    cache.begin(Segment(0, 0, NUM_TOKENS))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        prompt = attend(NUM_TOKENS)
    cache.commit()
    cache.begin_decode({0: 1}, 1)
    return torch.cat([prompt, attend(1)]), largest.num_bytes


@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"),
    [(0, 0.0, True), (64, 0.0, True), (0, 30.0, False), (32, 30.0, True)],
)
def test_scores_of_a_prompt_are_never_in_memory_as_a_whole(
    window: int, softcap: float, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = torch.linspace(-2, 3, 8) if has_sinks else None
    whole, _ = read_prompt(window, softcap, sinks)
    monkeypatch.setattr(attention, "_MOST_SCORE_BYTES", MOST_BYTES)
    found, most_bytes = read_prompt(window, softcap, sinks)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    scores = 4 * 8 * NUM_TOKENS * NUM_TOKENS
    assert scores > 8 * MOST_BYTES
    assert most_bytes <= 1.05 * MOST_BYTES + 8 * 4 * 300  # a sink for each query beside
