"""Tests of traces cut into steps: each token at most once, full batches, prompts first."""

import numpy as np
import pytest

from tandem.core.errors import ConfigError
from tandem.policy.plan import LayerLoad
from tandem.sim.steps import LoadReader, replay_steps
from tandem.trace import RoutingTrace, TraceMeta


def trace(lengths: list[int]) -> RoutingTrace:
    tokens = sum(lengths)
    first = np.arange(tokens * 2).reshape(tokens, 2, 1) % 4
    experts = np.concatenate((first, (first + 1) % 4), axis=2).astype(np.uint8)
    return RoutingTrace(
        meta=TraceMeta(model="tiny", n_moe_layers=2, n_experts=4, top_k=2, predictors=("gate",)),
        experts=experts,
        seq_offsets=np.concatenate(([0], np.cumsum(lengths))),
        weights=np.full(experts.shape, 0.25, np.float16),
        token_ids=np.arange(tokens, dtype=np.int32),
        predicted=experts[:, :, None, :],
    )


def test_one_sequence_after_another_covers_every_token() -> None:
    steps = list(replay_steps(trace([3, 2]), 1, prompt=0))
    assert [step.tokens.tolist() for step in steps] == [[0], [1], [2], [3], [4]]


def test_prompts_run_at_once_and_slots_are_refilled() -> None:
    steps = list(replay_steps(trace([3, 5, 4]), 2, prompt=2))
    assert [(step.tokens.tolist(), step.is_prefill) for step in steps] == [
        ([0, 1, 3, 4], True),
        ([2, 5], False),
        ([8, 9], True),
        ([6, 10], False),
        ([7, 11], False),
    ]


def test_long_sequences_are_cut_when_there_are_too_few() -> None:
    steps = list(replay_steps(trace([8]), 4, prompt=0))
    assert [step.tokens.tolist() for step in steps] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(ConfigError, match="batch is 9; expected at most 8"):
        list(replay_steps(trace([8]), 9, prompt=0))


def test_loads_count_tokens_and_weights_per_expert() -> None:
    reader = LoadReader(trace([4]))
    single, double = list(replay_steps(trace([4]), 1, 0))[1], next(replay_steps(trace([4]), 2, 0))
    assert reader.loads(single)[0] == LayerLoad(0, (2, 3), (1, 1), (0.25, 0.25), ([2, 3],))
    first = reader.loads(double)[0]  # tokens 0 and 2, which both chose experts 0 and 1
    assert first == LayerLoad(0, (0, 1), (2, 2), (0.5, 0.5), [[0, 1], [0, 1]])
    assert reader.token_ids(double) == (0, 2)


def test_hints_are_the_traces_predictions() -> None:
    reader = LoadReader(trace([4]))
    hints = reader.hints(next(replay_steps(trace([4]), 2, 0)))
    assert hints[1][0].source == "gate"
    assert hints[1][0].load == LayerLoad(1, (1, 2), (2, 2))
