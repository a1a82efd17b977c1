"""Tests that Tandem's loop gives the tokens of `generate`, for every architecture."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.core.errors import UnsupportedModelError
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.cuda.slots import why_no_cuda_slots
from tandem.decode.padded import PaddedBatch
from tandem.generate.generator import Generator
from tandem.hf.compat import cache_argument
from tests.architecture_sizes import FIRST_PLAIN_TOKEN, VOCABULARY
from tests.architectures import IS_OLDER, architectures, build_tiny_model, by_kind
from tests.conftest import two_threads
from tests.hf.tiny import as_generated

NEW_TOKENS = 9  # some from the model, some compared, the last ones from the recorded graph
# They generate in blocks, or not at all.
NOT_TOKEN_BY_TOKEN = {"diffusion_gemma", "openai_privacy_filter"}
# Their own code treats padding as part of a prompt, so they are compared alone.
READS_PADDING = {"deepseek_v4", "llama4", "minimax_m3_vl", "unlimited_ocr"}
# Transformers' own generate fails on text alone.
NOT_GENERATING_UPSTREAM = {"qwen3_omni_moe"}
# Older Transformers pass their convolutions' states differently: they run padded there.
NO_SLOTS_ON_THE_OLDEST = {"inkling"}


def prompts_of(lengths: list[int]) -> list[list[int]]:
    random = torch.Generator().manual_seed(7)
    return [
        torch.randint(FIRST_PLAIN_TOKEN, VOCABULARY, (n,), generator=random).tolist()
        for n in lengths
    ]


class Alone:
    """Computes a batch's sequences one by one, without padding."""

    def __init__(self, model: Any, prompts: list[list[int]]) -> None:
        self._rows = [PaddedBatch(model, [prompt], 0) for prompt in prompts]

    def prefill(self) -> Tensor:
        return torch.cat([row.prefill() for row in self._rows])

    def decode(self, tokens: list[int]) -> Tensor:
        rows = zip(self._rows, tokens, strict=True)
        return torch.cat([row.decode([token]) for row, token in rows])


def greedy_of_transformers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    written = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
    )
    new: list[list[int]] = written[:, width:].tolist()
    return new


def greedy_of_tandem(generator: Generator, prompts: list[list[int]]) -> list[list[int]]:
    answers = generator.generate(prompts, max_new_tokens=NEW_TOKENS, temperature=0)
    return [answer.token_ids for answer in answers]


# If the newest Transformers' loop agrees with Tandem's, the oldest one's need not run.
@pytest.mark.parametrize(
    "name", by_kind(set(architectures()) - NOT_TOKEN_BY_TOKEN - NOT_GENERATING_UPSTREAM)
)
def test_greedy_tokens_equal_those_of_generate(name: str, tmp_path: Path) -> None:
    model: Any = build_tiny_model(name)
    model.generation_config.eos_token_id = None  # so that every sequence generates them all
    ours = as_generated(model, tmp_path)
    assert why_no_cuda_slots(ours) is None
    generator = Generator(ours)
    prompts = prompts_of([7, 3])
    batches = [[prompt] for prompt in prompts] if name in READS_PADDING else [prompts]
    expected = [row for batch in batches for row in greedy_of_transformers(model, batch)]
    assert greedy_of_tandem(generator, prompts) == expected
    assert generator.why_padded is None


def verified(
    pool: CpuSlotPool, padded: PaddedBatch | Alone, steps: list[list[int]]
) -> list[tuple[Tensor, Tensor]]:
    """Verify four and three tokens in slots, take back one and two, then verify one more."""
    expected = [padded.decode(tokens) for tokens in steps]
    first, second = ([tokens[slot] for tokens in steps] for slot in (0, 1))
    for _ in range(3):  # the last ones from the recorded graph
        for slot in (0, 1):  # each time from the same beginning
            pool.copy(slot, slot + 4, len(pool.held(slot)))
        found = pool.verify({4: [*first, 50], 5: [second[0], 50, 51]}).clone()
        pool.keep(4, len(pool.held(4)) - 1)
        pool.keep(5, len(pool.held(5)) - 2)
        after = pool.decode({4: 60, 5: second[1]}).clone()
    assert pool.step.is_replaying, pool.step.why_not
    wanted = [*(logits[0] for logits in expected), expected[0][1], expected[1][1]]
    return [(torch.stack([*found[:3], found[4], after[1]]), torch.stack(wanted))]


@pytest.mark.seam
@pytest.mark.parametrize(
    "name",
    sorted(
        set(architectures())
        - NOT_TOKEN_BY_TOKEN
        - NOT_GENERATING_UPSTREAM
        - (NO_SLOTS_ON_THE_OLDEST if IS_OLDER else set())
    ),
)
def test_logits_in_slots_are_the_models(name: str, tmp_path: Path) -> None:
    """Prompts, a batch of other lengths, replayed steps, and a shared prefix."""
    model: Any = build_tiny_model(name)
    threads = two_threads()
    prompts = [*prompts_of([7, 3]), prompts_of([80])[0]]
    padded = Alone(model, prompts) if name in READS_PADDING else PaddedBatch(model, prompts, 0)
    pool = CpuSlotPool(as_generated(model, tmp_path), threads, 6)
    pairs = [(pool.prefill(dict(enumerate(prompts))), padded.prefill())]
    shared = pool.usable(2, 75)
    pool.copy(2, 3, shared)
    for tokens in prompts_of([3] * 6):
        pairs.append((pool.decode(dict(enumerate(tokens))).clone(), padded.decode(tokens)))
    pairs += verified(pool, padded, prompts_of([3] * 3))
    pairs.append((pool.prefill({3: prompts[2][shared:]}), pairs[0][1][2:]))
    assert shared > 0
    assert pool.step.is_replaying, pool.step.why_not
    for actual, expected in pairs:
        assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", sorted(NOT_TOKEN_BY_TOKEN & set(architectures())))
def test_other_models_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"cannot generate|call model\.generate"):
        Generator(build_tiny_model(name))


def test_a_padded_batch_leaves_no_offset_of_positions_on_a_model() -> None:
    """Otherwise the model's next forward would add the last batch's offset to its positions."""
    model: Any = build_tiny_model("qwen3_vl_moe")
    PaddedBatch(model, [[40, 41], [42, 43]], 0).prefill()
    cache = cache_argument(model)
    first = model(torch.tensor([[40, 41, 42]]), use_cache=True)
    second = model(torch.tensor([[43]]), use_cache=True, **{cache: first[cache]})
    whole = model(torch.tensor([[40, 41, 42, 43]]))
    torch.testing.assert_close(second.logits[0, -1], whole.logits[0, -1], rtol=1e-4, atol=1e-4)
