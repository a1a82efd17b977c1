"""Tests that drafted tokens change no answer: every architecture, drafter, batch and device.

python -m tests.generate.test_speculation_matrix [--names NAME...] [--devices DEVICE...]

The whole matrix takes more than half an hour; the test runs a part with every drafter and device.

Each request of a batch has another rule: greedy, sampled, penalties, a grammar. Drafts have random
lengths, whether they pay or not.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from tandem.decode.cpu_slots import CpuSlotPool
from tandem.decode.cuda.slots import CudaSlotPool
from tandem.engine.constraint import Grammars
from tandem.generate.generator import Generator
from tandem.generate.request import Request
from tandem.generate.sampling import SamplingOptions
from tandem.generate.speculation.draft_model import DraftModel
from tandem.generate.speculation.drafters import DRAFTERS as WAYS
from tandem.generate.speculation.drafters import DraftParts
from tandem.generate.speculation.mtp import MtpDrafter
from tandem.generate.speculation.speculation import Speculation
from tandem.hf.runtime import require_runtime
from tandem.policy.speculation.drafter import PaidDrafter, SureDraft
from tandem.policy.speculation.plans import Drafts, NextStep, Plan
from tandem.policy.speculation.prompt_lookup import EarlierAnswers, PromptLookup
from tests.architecture_sizes import VOCABULARY
from tests.architectures import architectures
from tests.decode.test_mtp import MODELS, WithMtp
from tests.decode.twin_capture import TwinCapture
from tests.generate.test_architectures import NOT_GENERATING_UPSTREAM, NOT_TOKEN_BY_TOKEN
from tests.hf.tiny import byte_tokenizer, load_packed, save_tiny_checkpoint

NAMES = sorted(set(architectures()) - NOT_TOKEN_BY_TOKEN - NOT_GENERATING_UPSTREAM)
TWIN = "twin"  # captured steps of a GPU, on the CPU
DEVICES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "emulated": {"device": "emulated", "gpu_memory": "60KB"},
    TWIN: {"dtype": "float32", "expert_dtype": "auto", "dense_dtype": "auto"},
}
DRAFTERS = ("scripted", "lookup", "model", "mtp")
BATCHES = (1, 2, 3, 4)
NEW_TOKENS = 14
WORDS = [50, 61, 72, 50, 61, 83, 94]
PROMPTS = [WORDS * 2, [40, 41, *WORDS, 90, *WORDS], [77], [*range(40, 90), *WORDS[:3]]]
RULES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3, "seed": 3},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "seed": 4},
    {"temperature": 0.8, "min_p": 0.02, "repetition_penalty": 1.3, "seed": 5},
    {"temperature": 1.0, "seed": 6, "presence_penalty": 0.3, "frequency_penalty": 0.2,
     "logit_bias": ((50, -1.0),)},
    {"temperature": 0.9, "seed": 7},  # with a grammar
]  # fmt: skip
GRAMMAR = LLMatcher.grammar_from_regex("([a-h]{2}[0-9])*")


@cache
def _grammars() -> Grammars:
    return Grammars(byte_tokenizer(), VOCABULARY, [2])


def requests(batch: int) -> list[Request]:
    """Return a batch's requests, each with its own rule; which ones depends on the batch size."""
    rules = [(number + batch - 1) % len(RULES) for number in range(batch)]
    return [
        Request(
            request_id=number,
            prompt=tuple(PROMPTS[number]),
            options=SamplingOptions(max_new_tokens=NEW_TOKENS - number, **RULES[rule]),
            grammar=GRAMMAR if rule == 5 else None,
        )
        for number, rule in enumerate(rules)
    ]


@dataclass
class AnyLength:
    """A speculation policy that always drafts, with random lengths."""

    drafter: PaidDrafter
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    num_drafted: int = 0

    def plan(self, step: NextStep) -> Plan | None:
        most = {slot: min(self.chance.randrange(5), step.rooms[slot]) for slot in step.histories}
        most = {slot: count for slot, count in most.items() if count > 0}
        return Plan(2.0, 1.0, partial(self._drafts, step.histories, most)) if most else None

    def _drafts(self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int]) -> Drafts:
        found = self.drafter.draft({slot: histories[slot] for slot in most}, most, 0.0)
        tokens = {slot: draft.tokens[: most[slot]] for slot, draft in found.items()}
        drafts = {slot: some for slot, some in tokens.items() if len(some)}
        self.num_drafted += sum(map(len, drafts.values()))
        return drafts

    def forget(self, slot: int) -> None:
        """Do nothing."""


class Lookup:
    """Prompt look-up and earlier answers, half of which begin differently, for all sequences."""

    def __init__(self, wholes: Sequence[Sequence[int]]) -> None:
        self.earlier = EarlierAnswers()
        for number, whole in enumerate(wholes):
            self.earlier.add(whole if number % 2 == 0 else whole[-9:])

    def draft(
        self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int], least: float
    ) -> dict[int, SureDraft]:
        drafts = {}
        for slot, tokens in histories.items():
            drafts[slot] = SureDraft(PromptLookup(self.earlier).draft(tokens).tokens)
        return drafts


class Scripted:
    """Drafts the known answers with random errors."""

    def __init__(self, wholes: Sequence[Sequence[int]]) -> None:
        self.wholes = [[*whole] for whole in wholes]
        self.chance = random.Random(3)

    def draft(
        self, histories: Mapping[int, Sequence[int]], most: Mapping[int, int], least: float
    ) -> dict[int, SureDraft]:
        drafts = {}
        for slot, tokens in histories.items():
            known = next((w for w in self.wholes if w[: len(tokens)] == [*tokens]), [])
            coming = known[len(tokens) : len(tokens) + most[slot]]
            drafts[slot] = SureDraft([t if self.chance.random() < 0.8 else 39 for t in coming])
        return drafts


class Cells:
    """One architecture on one device, in the same slots: each step size is recorded once."""

    def __init__(self, name: str, device: str, folder: Path) -> None:
        self.name = name
        directory = folder / f"{name}-{device}"
        if name in MODELS:
            WithMtp(directory, name, 1 if name == "mellum" else 2)
        else:
            save_tiny_checkpoint(directory, name)
        self.model = load_packed(directory, **DEVICES[device])
        self.copy = load_packed(directory, **(DEVICES[TWIN] if device == TWIN else {}))
        self.threads = require_runtime(self.model).threads
        require_runtime(self.copy).share(self.threads)
        self.models = {"model": self._draft_model()}
        if name in MODELS:
            self.models["mtp"] = self._mtp_layers()
        generator = Generator(self.model, speculate="none")
        generator.speculation = Speculation([], [*self.models.values()])
        with pytest.MonkeyPatch.context() as patch:
            if device == TWIN:
                patch.setattr(generator, "slot_pool", self._twin_pool)
            self.scheduler = generator.scheduler(
                max(BATCHES), follow_grammar=_grammars().constraint
            )
        self.expected = {batch: self._answers(batch) for batch in BATCHES}

    def _twin_pool(self, num_slots: int, **options: Any) -> CudaSlotPool:
        return CudaSlotPool(self.model, num_slots, make_capture=TwinCapture, notes_hidden=True)

    def run(self, drafter: str, batches: Sequence[int] = BATCHES) -> int:
        """Compare all answers; return the number of drafted tokens."""
        drafted = 0
        for batch in batches:
            way = AnyLength(self._drafter(drafter, batch))
            self._speculation.ways = [way]
            assert self._answers(batch) == self.expected[batch], (self.name, drafter, batch)
            drafted += way.num_drafted
        assert drafted > 0, (self.name, drafter)
        return drafted

    @property
    def _speculation(self) -> Speculation:
        assert self.scheduler._speculation is not None
        return self.scheduler._speculation

    def _draft_model(self) -> DraftModel:
        return DraftModel(partial(CpuSlotPool, self.copy, self.threads), VOCABULARY)

    def _mtp_layers(self) -> DraftModel:
        drafter = WAYS.factory("mtp")(DraftParts(model=self.model, threads=self.threads))
        assert isinstance(drafter, MtpDrafter)
        return drafter

    def _drafter(self, name: str, batch: int) -> PaidDrafter:
        if name not in ("scripted", "lookup"):
            return self.models[name]
        answers = self.expected[batch]
        wholes = [[*PROMPTS[n], *(one[0] for one in answers[n])] for n in answers]
        return Scripted(wholes) if name == "scripted" else Lookup(wholes)

    def _answers(self, batch: int) -> dict[int, list[Any]]:
        """Answer the requests of a batch."""
        for request in requests(batch):
            self.scheduler.add(request)
        answers: dict[int, list[Any]] = {}
        while self.scheduler.has_work:
            for one in self.scheduler.step():
                answers.setdefault(one.request_id, []).append((one.token_id, one.finish_reason))
        return answers


def drafters_of(name: str) -> Iterator[str]:
    """Yield the drafters that an architecture supports."""
    yield from (one for one in DRAFTERS if one != "mtp" or name in MODELS)


@pytest.mark.parametrize(("name", "device"), [("deepseek_v3", "cpu"), ("qwen3_5_moe", "emulated")])
def test_answers_are_those_without(name: str, device: str, tmp_path: Path) -> None:
    cells = Cells(name, device, tmp_path)
    for batch, drafter in enumerate(drafters_of(name), 1):
        cells.run(drafter, [batch])


def main() -> None:
    """Run the whole matrix; return 1 if an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--devices", nargs="+", default=[*DEVICES])
    args = parser.parse_args()
    failed, num_cells, start = [], 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names:
            for device in args.devices:
                cells = Cells(name, device, Path(folder))
                for drafter in drafters_of(name):
                    num_cells += len(BATCHES)
                    try:
                        drafted = cells.run(drafter)
                        print(
                            f"{name:<24} {device:<9} {drafter:<9} {drafted:>5} drafted", flush=True
                        )
                    except Exception as error:
                        failed.append((name, device, drafter))
                        print(
                            f"{name:<24} {device:<9} {drafter:<9} FAILED: {error!r:.300}",
                            flush=True,
                        )
                cells.model.close()
                cells.copy.close()
    minutes = (time.perf_counter() - start) / 60
    print(
        f"{num_cells} cells of {len(args.names)} architectures, {len(failed)} failed, "
        f"{minutes:.0f} min"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
