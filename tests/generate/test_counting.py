"""Tests that an answer's counters exclude trials and comparisons."""

from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.experts.tracing.events import ExpertStatistics
from tests.inside import runtime_in

PROMPT, NEW_TOKENS = [20, 21, 22, 23, 24], 9
LAYERS, TOP_K = 4, 2


@pytest.mark.parametrize("has_replay", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "float32", "expert_dtype": "int8"},
        {"device": "emulated", "gpu_memory": "150kB", "profile": "laptop-8gb"},
    ],
)
def test_each_token_is_counted_once(
    checkpoint: Path, options: dict[str, Any], has_replay: bool
) -> None:
    model = tandem.load(checkpoint, **options)
    counts = ExpertStatistics()
    runtime_in(model).executor.listeners.append(counts)
    generator = tandem.Generator(model, has_replay=has_replay)
    (answer,) = generator.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.0)
    steps = len(answer.token_ids) - 1  # the last token is not run through the model
    assert steps > 0
    assert counts.expert_rows == LAYERS * TOP_K * (len(PROMPT) + steps)
