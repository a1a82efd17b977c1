"""Tests that recorded decode steps of real architectures stay as native as they are.

`native_operations.json` has the expected numbers: a step's calls (native programs, and operations
left to torch), and the count of each operation, native or not. `pytest
tests/recording/test_native_operations.py --write-docs` writes them again; review its diff.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.generate.generator import Generator
from tandem.recording.coverage import coverage_of
from tests.architectures import IS_OLDER, architectures, build_tiny_model, by_kind
from tests.generate.test_architectures import (
    NO_SLOTS_ON_THE_OLDEST,
    NOT_GENERATING_UPSTREAM,
    NOT_TOKEN_BY_TOKEN,
)

TABLE = Path(__file__).with_name("native_operations.json")
COMMAND = "pytest tests/recording/test_native_operations.py --write-docs"
MOST_CALLS = 30  # of a step
PADDED_ON_THE_OLDEST = {"ernie4_5_moe", *NO_SLOTS_ON_THE_OLDEST}
FAILING = {"deepseek_v4"} if IS_OLDER else set()  # in Transformers' own code, in bf16
ARCHITECTURES = sorted(
    set(architectures()) - NOT_TOKEN_BY_TOKEN - NOT_GENERATING_UPSTREAM - FAILING
)
TOKENS = 6  # of an answer: some steps are recorded and compared

Step = dict[str, Any]


def step_of(name: str) -> Step | None:
    """Return a summary of a tiny model's decode step, loaded as by users; None: it is padded."""
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_model(name).save_pretrained(folder)
        model: Any = tandem.load(
            folder, dtype="bfloat16", expert_dtype="int8", dense_dtype="int8", threads=1
        )
    model.generation_config.eos_token_id = None
    generator = Generator(model)
    generator.generate([40, 41, 42], max_new_tokens=TOKENS, temperature=0)
    recorded = generator.recorded_graph
    if recorded is None:
        assert generator.why_padded is not None, generator.why_slower
        return None
    coverage = coverage_of(recorded)
    left = {entry.operation: entry.calls for entry in coverage.not_native}
    return {
        "calls": coverage.num_calls,
        "native": coverage.native,
        "torch": dict(sorted(left.items())),
    }


def differences(was: Step, now: Step) -> Iterator[str]:
    """Describe what a step has lost, then other differences."""
    for name in sorted(was["native"].keys() | now["native"].keys()):
        before, after = was["native"].get(name, 0), now["native"].get(name, 0)
        if after < before:
            yield f"{name} is no longer native: {after} times where it was {before}"
        elif after > before:
            yield f"{name} is native {after} times where it was {before}"
    for name in sorted(was["torch"].keys() | now["torch"].keys()):
        before, after = was["torch"].get(name, 0), now["torch"].get(name, 0)
        if after != before:
            yield f"{name} is left to torch {after} times where it was {before}"
    if now["calls"] != was["calls"]:
        yield f"a step makes {now['calls']} calls where it made {was['calls']}"


def written(table: dict[str, Step]) -> str:
    """Return the table as text with one line for each kind, for readable diffs."""
    steps = []
    for name, step in table.items():
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in step.items()]
        steps.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(steps) + "\n}\n"


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> dict[str, Step]:
    if request.config.getoption("--write-docs"):
        steps = {name: step for name in ARCHITECTURES if (step := step_of(name)) is not None}
        TABLE.write_text(written(steps), encoding="utf-8")
    read: dict[str, Step] = json.loads(TABLE.read_text(encoding="utf-8"))
    return read


@pytest.mark.seam
@pytest.mark.parametrize("name", by_kind(ARCHITECTURES))
def test_a_decode_step_is_as_native_as_it_was(name: str, table: dict[str, Step]) -> None:
    step = step_of(name)
    if step is None:
        assert IS_OLDER, f"{name}: steps are no longer replayed, they run padded"
        assert name in PADDED_ON_THE_OLDEST
        return
    assert step["calls"] <= MOST_CALLS
    found = list(differences(table[name], step))
    if IS_OLDER:  # its code does a little less, or leaves a little more to torch
        lost = {op for op, n in step["torch"].items() if n > table[name]["torch"].get(op, 0)}
        found = [line for line in found if "no longer" in line and line.split()[0] in lost]
    assert not found, "\n  ".join([f"{name}:", *found, f"if that is meant: {COMMAND}"])


def test_a_profile_changes_no_answer() -> None:
    model: Any = build_tiny_model("mixtral")
    model.generation_config.eos_token_id = None
    profiled, other = Generator(model), Generator(model)
    answers = []
    for generator in (profiled, other):
        first = generator.generate([40, 41, 42], max_new_tokens=9)[0].token_ids
        if generator is profiled:
            assert generator.recorded_graph is not None
            coverage_of(generator.recorded_graph)
        second = generator.generate([40, 41, 42, *first, 50], max_new_tokens=9)[0].token_ids
        answers.append(first + second)
    assert answers[0] == answers[1]


def test_the_table_names_what_is_tested(table: dict[str, Step]) -> None:
    assert set(table) >= set(ARCHITECTURES)
    assert IS_OLDER or list(table) == ARCHITECTURES


def test_a_loss_is_named() -> None:
    was = {"calls": 11, "native": {"rms_norm": 9, "topk": 4}, "torch": {"cos": 1}}
    now = {"calls": 31, "native": {"rms_norm": 9}, "torch": {"cos": 1, "topk": 4}}
    assert list(differences(was, now)) == [
        "topk is no longer native: 0 times where it was 4",
        "topk is left to torch 4 times where it was 0",
        "a step makes 31 calls where it made 11",
    ]
    assert list(differences(was, was)) == []
