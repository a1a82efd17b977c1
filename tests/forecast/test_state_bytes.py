"""Tests of the memory of a model's states, windows, and mixers' projections."""

from pathlib import Path

import pytest

from tandem.bench.model_shapes import MODEL_SHAPES
from tandem.bench.random_model import empty_model_of
from tandem.decode.cpu_slots import CpuSlotPool
from tandem.forecast.sizes import model_sizes
from tandem.forecast.state_bytes import mixer_token_bytes, state_bytes_of
from tandem.hf.checkpoint import open_checkpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.load import empty_model
from tandem.kernels.dense import CpuThreads
from tests.architectures import build_tiny_model
from tests.loading.checkpoints import write_plain


@pytest.mark.seam
@pytest.mark.parametrize("name", ["qwen3_5_moe", "kimi_linear", "nemotron_h", "jamba", "lfm2_moe"])
def test_states_take_what_slots_make(name: str) -> None:
    model = build_tiny_model(name)
    pool = CpuSlotPool(model, CpuThreads(num_threads=1), 1, has_replay=False)
    pool.prefill({0: [40, 41]})
    assert state_bytes_of(empty_model(model.config)) == pool.cache.states.step_bytes > 0


def test_a_plan_counts_what_a_mixer_projects_a_token_to() -> None:
    mixed = empty_model_of(MODEL_SHAPES["qwen3.6-35b-a3b"].sample(4), 100)
    # Queries, keys and values, to which a fused projection adds gates of the values.
    assert mixer_token_bytes(mixed) == 11 * (2 * 2048 + 4096)
    fused = empty_model_of(MODEL_SHAPES["qwen3-next-80b-a3b"].sample(4), 100)
    assert mixer_token_bytes(fused) == 11 * (2 * 2048 + 2 * 4096)
    assert mixer_token_bytes(empty_model_of(MODEL_SHAPES["lfm2-8b-a1b"].sample(3), 100)) == 36_864
    assert mixer_token_bytes(empty_model_of(MODEL_SHAPES["olmoe"].sample(2), 100)) == 0


def test_windows_bound_what_their_layers_keep(tmp_path: Path) -> None:
    sizes = model_sizes(
        open_checkpoint(write_plain(tmp_path / "plain", "gpt_oss")), OffloadConfig()
    )
    assert sizes.kv.bytes_of(1000) == 1000 * sizes.kv.token_bytes
    more = sizes.kv.bytes_of(200_000) - sizes.kv.bytes_of(100_000)
    assert more == 100_000 * sizes.kv.token_bytes / 2  # every other layer has a window
