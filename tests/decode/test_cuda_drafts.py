"""Tests of drafted tokens on a GPU: several of a slot in one captured step, on the CPU twin."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.generate.answer import Answer
from tandem.generate.generator import Generator
from tests.architectures import architectures, build_tiny_model, by_kind
from tests.decode.twin_capture import TwinCapture
from tests.generate.test_speculation import PROMPTS, RULES, Scripted, speculating, texts
from tests.hf.tiny import save_tiny_checkpoint

# Full attention; windows and sinks; latents; an indexer by positions, one by blocks; several
# windows; the gated delta rule; Kimi's and latents; Mamba 2 and 1; convolutions; compressed keys.
_NAMES = [
    "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v32", "qwen4_exp", "gemma4", "qwen3_5_moe",
    "kimi_linear", "nemotron_h", "jamba", "lfm2_moe", "deepseek_v4",
]  # fmt: skip
NAMES = [name for name in _NAMES if name in architectures()]
# These models' multi-token steps are also compared elsewhere.
_SLOW = {"deepseek_v4", "qwen4_exp", "kimi_linear"}
NEW_TOKENS = 16


def written(pool: CudaSlotPool, texts: dict[int, list[int]], most: int) -> dict[int, torch.Tensor]:
    """Decode texts in steps of up to `most` tokens per slot, some wrong; return all logits."""
    chance = random.Random(5)
    found = {slot: [pool.prefill({slot: text[:2]})] for slot, text in texts.items()}
    while any(len(found[slot]) < len(text) - 1 for slot, text in texts.items()):
        step, right = {}, {}
        for slot, text in texts.items():
            begin = len(found[slot]) + 1
            if begin < len(text) and (most == 1 or chance.random() < 0.8):
                tokens = text[begin : begin + chance.randrange(1, most + 1)]
                right[slot] = chance.randrange(1, len(tokens) + 1)
                step[slot] = [*tokens[: right[slot]], *[39] * (len(tokens) - right[slot])]
        if not step:
            continue
        logits = pool.verify(step).clone().split([*map(len, step.values())])
        for of_slot, slot in zip(logits, step, strict=True):
            found[slot] += [row[None] for row in of_slot[: right[slot]]]
            held = len(pool.held(slot))
            pool.keep(slot, held - len(step[slot]) + right[slot])
    return {slot: torch.cat(rows) for slot, rows in found.items()}


def require_alike(model: Any, num_tokens: int) -> None:
    """Compare multi-token steps with single-token steps, and the steps after them."""
    lines = {
        0: [40 + i % 7 for i in range(num_tokens)],
        2: [50 + i * 3 % 11 for i in range(num_tokens)],
    }
    plain, pool = (CudaSlotPool(model, 3, make_capture=TwinCapture) for _ in range(2))
    expected, found = written(plain, lines, 1), written(pool, lines, 4)
    for slot in lines:
        close(found[slot], expected[slot])
    assert any(step.replayed.is_replaying for step in pool._steps.by_size.values())
    pool.copy(2, 1, len(pool.held(2)))  # some of whose tokens must be repeated
    close(pool.decode({1: 44}), plain.decode({2: 44}))
    close(pool.prefill({0: [60, 61, 62]}), plain.prefill({0: [60, 61, 62]}))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "name",
    [
        *by_kind(set(NAMES) - _SLOW),
        *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(_SLOW & set(NAMES))),
    ],
)
def test_logits_are_those_of_one_token_after_the_other(name: str) -> None:
    require_alike(build_tiny_model(name), 36)


def test_so_they_are_by_the_kernels_with_one_graph_for_each_size(find_kernels: Any) -> None:
    values = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model: Any = build_tiny_model("qwen3_5_moe", values=values)
    pool = CudaSlotPool(model, 1, make_capture=TwinCapture, find_kernels=find_kernels)
    line = {0: [40, 41, 42, 43, 44, 45]}
    close(written(pool, line, 2)[0], written(CudaSlotPool(model, 1), line, 1)[0])
    sizes = [key[0] for key in pool._steps.by_size]
    assert len(sizes) == len(set(sizes)) > 1
    assert set(sizes) <= {1, 2}


@pytest.mark.parametrize(("name", "rule"), [("gpt_oss", RULES[3]), ("qwen3_5_moe", RULES[0])])
def test_answers_are_those_without(
    name: str, rule: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use batches of 1 and 4, with right and wrong drafts of random lengths."""
    model = tandem.load(save_tiny_checkpoint(tmp_path, name), dtype="float32")
    model.generation_config.eos_token_id = None

    def answers(generator: Generator, prompts: list[list[int]]) -> list[Answer]:
        pool = CudaSlotPool(model, len(prompts), make_capture=TwinCapture)
        monkeypatch.setattr(generator, "slot_pool", lambda *args, **options: pool)
        return generator.generate(prompts, max_new_tokens=NEW_TOKENS, **rule)

    for prompts in (PROMPTS[:1], PROMPTS):
        expected = answers(Generator(model, speculate="none"), prompts)
        whole = [[*p, *one.token_ids] for p, one in zip(prompts, expected, strict=True)]
        found = answers(speculating(model, Scripted(dict(enumerate(whole)))), prompts)
        assert texts(found) == texts(expected)
        assert sum(one.accepted_tokens for one in found) > NEW_TOKENS / 4
