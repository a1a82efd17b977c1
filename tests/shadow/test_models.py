"""Tests of each kind of model on a simulated GPU, against the CPU's answers."""

from pathlib import Path

import pytest

from tandem.hf.machine import parts
from tandem.policy.assignment import IN_GRAPH
from tandem.policy.step_path import CAPTURE_SIZES
from tests.architectures import architectures
from tests.generate.test_architectures import (
    NOT_GENERATING_UPSTREAM,
    NOT_TOKEN_BY_TOKEN,
)
from tests.shadow.models import IS_WHOLE, require_same_on_gpu, require_same_without_slots

pytest.importorskip("triton")

# In `make test`; `make dry-gpu` has all.
KINDS = {
    "mixtral": 2,  # plain attention
    "deepseek_v32": 4,  # latents, an indexer, a first layer without experts
    "qwen3_5_moe": 4,  # states, and weights that a recording makes
}
"""Architectures with a number of layers for which all mechanisms occur between two hand-overs."""
# Text skips experts for images, or a norm follows the experts: their layers break the graph.
NOT_HANDED = {"ernie4_5_vl_moe", "muse_spark"}
# Layers that run twice magnify the experts' rounding: the tolerance of a captured step, a
# hundredth, with random weights.
TOO_ROUGH = {"inkling2_loop"}
# Kernels of a step beside the common ones.
STREAMS = {"multiply_streams", "weigh_streams"}
OWN = {
    "deepseek_v4": STREAMS
    | {"add_streams", "attend_window_parts", "compress_tokens", "rotate_pairs"}
    | {"store_index_keys", "score_prompt_keys", "select_index_keys"},
    "glm5_next": STREAMS | {"add_streams"},
    "hy_v4": STREAMS,
}
IN_SLOTS = set(architectures()) - NOT_GENERATING_UPSTREAM - NOT_TOKEN_BY_TOKEN


# In `make test`: one that generates in blocks, one without a cache.
FEW = ["diffusion_gemma", "openai_privacy_filter"]
WITHOUT_SLOTS = sorted(set(architectures()) - IN_SLOTS) if IS_WHOLE else FEW


@pytest.mark.parametrize("name", sorted(IN_SLOTS - TOO_ROUGH) if IS_WHOLE else KINDS)
def test_a_model_says_the_same_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Its decode steps are one graph each, and the host computes missing experts."""
    values = None if IS_WHOLE else {"num_hidden_layers": KINDS[name]}
    gpu = require_same_on_gpu(
        name, tmp_path, values=values, expert_dtype="mxfp4", on_gpu={"assignment": "ready-on-gpu"}
    )
    handed = set() if name in NOT_HANDED else {"publish", "combine"}
    assert {"graph", *handed, *OWN.get(name, ())} <= set(gpu.launched)


@pytest.mark.parametrize("rule", IN_GRAPH[1:] if IS_WHOLE else IN_GRAPH[1:2])
def test_a_model_that_fetches_and_copies_ahead_within_its_steps_says_the_same_on_a_gpu(
    rule: str, tmp_path: Path
) -> None:
    gpu = require_same_on_gpu(
        "mixtral", tmp_path, values={"num_hidden_layers": 2}, expert_dtype="mxfp4",
        on_gpu={"assignment": rule, "prefetch_count": 2},
    )  # fmt: skip
    assert {"graph", "publish", "take_fetched", "combine"} <= set(gpu.launched)


def test_a_model_that_asks_routers_within_its_steps_says_the_same_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that ask are launched on tensors of the device."""
    monkeypatch.setattr(
        parts, "settled", lambda settings, *_, **__: settings.with_predictions((), CAPTURE_SIZES)
    )
    gpu = require_same_on_gpu(
        "mixtral", tmp_path, values={"num_hidden_layers": 2}, expert_dtype="mxfp4",
        on_gpu={
            "assignment": "ready-on-gpu", "profile": "desktop-12gb", "look_ahead": True,
            "prediction": "regression",
        },
    )  # fmt: skip
    assert {"graph", "publish", "ask", "publish_guess", "combine"} <= set(gpu.launched)


@pytest.mark.filterwarnings("ignore:Triton is not installed")
@pytest.mark.parametrize("name", WITHOUT_SLOTS)
def test_a_model_without_slots_says_the_same_on_a_gpu(name: str, tmp_path: Path) -> None:
    require_same_without_slots(name, tmp_path)
