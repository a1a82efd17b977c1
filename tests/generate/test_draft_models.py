"""Tests of draft models: their tokens are drafts only, and rejected ones are forgotten."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.decode.cpu_slots import CpuSlotPool
from tandem.generate.generator import Generator
from tandem.generate.speculation.draft_model import DraftModel
from tandem.generate.speculation.small_model import load_small
from tandem.hf.dense import packed_layers
from tandem.policy.speculation.drafter import SureDraft
from tandem.policy.speculation.paid_drafts import PaidDrafts
from tandem.policy.speculation.plans import NextStep
from tandem.policy.speculation.step_costs import StepCosts
from tests.architecture_sizes import VOCABULARY
from tests.architectures import build_tiny_model
from tests.conftest import two_threads
from tests.generate.test_speculation import PROMPTS, texts
from tests.hf.tiny import loaded
from tests.loading.gguf_files import tiny_model, write_gguf

NEW_TOKENS = 30


@pytest.fixture(autouse=True)
def _each_step_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.policy.speculation.paid_drafts._TRIALS", 10**6)


@pytest.mark.parametrize("draft", ["qwen3_moe", "lfm2_moe"])
def test_answers_are_those_without(draft: str, tmp_path: Path) -> None:
    """A model that drafts for itself is always right; another kind of model hardly ever."""
    model = loaded(tmp_path / "model", "qwen3_moe")
    generator = Generator(model, draft=loaded(tmp_path / "draft", draft))
    for prompts in (PROMPTS[:1], PROMPTS):
        plain = Generator(model, speculate="none").generate(prompts, max_new_tokens=NEW_TOKENS)
        answers = generator.generate(prompts, max_new_tokens=NEW_TOKENS)
        assert texts(answers) == texts(plain)
        drafted = sum(answer.drafted_tokens for answer in answers)
        kept = sum(answer.accepted_tokens for answer in answers)
        assert drafted > NEW_TOKENS / 4
        is_right = kept > 0.8 * drafted  # some were looked up
        assert is_right == (draft == "qwen3_moe")


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
def test_what_is_written_ahead_is_forgotten(name: str) -> None:
    """Drafts depend only on the current sequences, not on earlier drafts."""
    model: Any = build_tiny_model(name)
    threads = two_threads()
    drafter = DraftModel(lambda n: CpuSlotPool(model, threads, n, has_replay=False), VOCABULARY)
    drafter.follow(CpuSlotPool(model, threads, 2))
    fresh = CpuSlotPool(model, threads, 1)
    sequences = {0: PROMPTS[0][:], 1: PROMPTS[1][:]}
    for new in (50, 51, 52):
        drafts = drafter.draft(sequences, {0: 3, 1: 2}, 0.0)
        for slot, tokens in sequences.items():
            fresh.keep(0, 0)
            logits, expected = fresh.prefill({0: tokens}), []
            for place in range(3 - slot):
                expected.append(int(logits.argmax()))
                most = float(logits.float().softmax(-1).max())
                assert drafts[slot].sureness[place] == pytest.approx(most, rel=1e-4)
                logits = fresh.decode({0: expected[-1]})
            assert drafts[slot].tokens == expected
            tokens += [new, new + 9]
    fewer = DraftModel(lambda n: CpuSlotPool(model, threads, n, has_replay=False), 1)
    fewer.follow(CpuSlotPool(model, threads, 1))
    unknown = fewer.draft({0: PROMPTS[0]}, {0: 2}, 0.0)[0]  # token ids that the model lacks
    assert unknown == ([], [])
    assert len(drafter.draft({0: PROMPTS[0]}, {0: 5}, 1.0)[0].tokens) == 1  # it is less confident


def test_dense_models_draft_too(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "draft")
    model = loaded(tmp_path / "model", "qwen3_moe")
    generator = Generator(model, draft=load_small(tmp_path / "draft"))
    plain = Generator(model, speculate="none").generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    answers = generator.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert texts(answers) == texts(plain)
    assert answers[0].drafted_tokens > 0


def test_a_gguf_file_drafts_with_its_own_codes(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "draft.gguf", tiny_model(), "Q8_0")
    draft = load_small(file)
    formats = {layer.packed.matrix.format.name for _, layer in packed_layers(draft)}
    assert formats == {"int8-g32"}  # as Q8_0 is stored
    model = loaded(tmp_path / "model", "qwen3_moe")
    plain = Generator(model, speculate="none").generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    answers = Generator(model, draft=draft).generate(PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert texts(answers) == texts(plain)
    assert answers[0].drafted_tokens > 0


class Scripted:
    """Drafts always the same token, right or wrong, with a given duration."""

    def __init__(self, token: int, seconds: float) -> None:
        self.token, self.seconds, self.now, self.num_drafts = token, seconds, 0.0, 0

    def draft(
        self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int], least: float
    ) -> dict[int, SureDraft]:
        self.num_drafts += 1
        self.now += self.seconds * max(most.values())
        if not self.token:
            return {}
        return {slot: SureDraft([self.token] * most[slot]) for slot in histories}


@pytest.mark.parametrize(
    ("token", "seconds", "most"),
    [(7, 0.05, 400), (8, 0.05, 20), (7, 5.0, 20), (0, 0.05, 20)],
    ids=["right", "nonsense", "dear", "nothing"],
)
def test_what_does_not_pay_is_seldom_drafted(
    token: int, seconds: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.policy.speculation.paid_drafts._TRIALS", 12)
    drafter, costs = Scripted(token, seconds), StepCosts()
    way = PaidDrafts(drafter, lambda: drafter.now)
    history, tokens_a_step = [7], []
    for _ in range(400):
        plan = way.plan(NextStep({0: history}, {0: 8}, 1, costs))
        is_taken = plan is not None and plan.gain > plan.least_gain
        draft = plan.drafts().get(0, ()) if plan is not None and is_taken else ()
        num_kept = len(draft) if token == 7 else 0
        costs.add(1 + len(draft), 1 + 0.2 * len(draft))
        history += [7] * (num_kept + 1)
        tokens_a_step.append(num_kept + 1)
    assert drafter.num_drafts <= most
    assert (sum(tokens_a_step[100:]) > 3 * 300) == (token == 7 and seconds < 1)


class Sure:
    """A drafter that knows the next tokens and is unsure of each fourth one."""

    def draft(
        self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int], least: float
    ) -> dict[int, SureDraft]:
        drafts = {}
        for slot, tokens in histories.items():
            places = range(len(tokens), len(tokens) + most[slot])
            estimates = [0.2 if place % 4 == 0 else 0.95 for place in places]
            drafts[slot] = SureDraft([8 if place % 4 == 0 else 7 for place in places], estimates)
        return drafts


@pytest.mark.parametrize("num_slots", [1, 2])
def test_only_tokens_that_are_likely_are_verified(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.policy.speculation.paid_drafts._TRIALS", 6)
    costs, way = StepCosts(), PaidDrafts(Sure(), lambda: 0.0)
    histories = {slot: [7] for slot in range(num_slots)}
    drafted = kept = 0
    for step in range(60):
        plan = way.plan(NextStep(histories, dict.fromkeys(histories, 8), num_slots, costs))
        drafts = {} if plan is None or not plan.is_worth else plan.drafts()
        num_drafted = sum(map(len, drafts.values()))
        costs.add(num_slots + num_drafted, 1 + 0.3 * num_drafted)
        for slot, tokens in histories.items():
            right = [*takewhile(lambda token: token == 7, drafts.get(slot, ()))]
            tokens += [7] * (len(right) + 1)
            drafted += len(drafts.get(slot, ())) if step > 10 else 0
            kept += len(right) if step > 10 else 0
    assert kept == drafted > 40 * num_slots
