"""Tests that host slots leave memory for the growth of keys and values, within bounds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import tandem
from tandem.cli.main import main
from tandem.core.errors import ConfigError
from tandem.experts.cache.host_slots import HostSlots
from tandem.experts.store import host_memory
from tandem.forecast.sizes import model_sizes
from tandem.hf.checkpoint import open_checkpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.kv_sizes import kv_sizes_of
from tests.disk.loading import packed_model, slots_of

FREE = 900_000


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_model(
        tmp_path_factory.mktemp("reserved"), num_experts=16, num_experts_per_tok=4,
        num_hidden_layers=3, max_position_embeddings=1 << 20,
    )  # fmt: skip


def slots_with(packed: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> HostSlots:
    """Load a model that does not fit, with memory reserved for keys and values only."""
    dense = model_sizes(open_checkpoint(packed), OffloadConfig()).total_dense_bytes
    monkeypatch.setattr("tandem.hf.packed_reading.available_bytes", lambda: FREE)
    # The slots come before the dense parts, on the CPU.
    monkeypatch.setattr("tandem.hf.disk_tier.available_bytes", lambda: FREE + dense)
    monkeypatch.setattr("tandem.hf.disk_tier._RESERVED_BYTES", 0)
    monkeypatch.setattr("tandem.hf.disk_tier._RESERVED_SHARE", 0.0)
    with pytest.warns(UserWarning, match="stay in memory"):
        return slots_of(tandem.load(packed, **options))


def test_slots_leave_what_keys_and_values_grow_to(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = model_sizes(open_checkpoint(packed), OffloadConfig()).kv.bytes_of(1)
    few = slots_with(packed, monkeypatch, context=1)
    many = slots_with(packed, monkeypatch, context=100, sequences=2)
    slot = few.slot_bytes
    assert few.num_bytes <= FREE - token < few.num_bytes + 3 * slot + 3  # a slot of each layer
    assert many.num_bytes <= FREE - 200 * token < many.num_bytes + 3 * slot + 3


def test_experts_keep_half_of_the_memory(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = slots_with(packed, monkeypatch, context=1 << 20, sequences=100)
    assert FREE // 2 - 3 * held.slot_bytes - 3 < held.num_bytes <= FREE // 2


def test_a_plan_shares_memory_out_as_the_load_does(
    packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = slots_with(packed, monkeypatch, context=100)
    dense = model_sizes(open_checkpoint(packed), OffloadConfig()).total_dense_bytes
    # The forecast times layers in the available memory.
    real = host_memory.available_bytes
    monkeypatch.setattr("tandem.forecast.speed_forecast.available_bytes", real)
    monkeypatch.setattr("tandem.experts.store.host_memory.available_bytes", lambda: FREE + dense)
    words = ["--context", "100", "--dense-dtype", "none", "--threads", "1", "--json"]
    assert main(["plan", str(packed), *words]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert planned["from_disk"]["resident_share"] == pytest.approx(loaded.share, abs=0.01)


@pytest.mark.parametrize("memory", ["0", "1B"])
def test_a_plan_refuses_the_memory_that_a_load_refuses(
    memory: str, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(packed), "--expert-memory", memory, "--threads", "1"]) == 2
    assert "and need at least" in capsys.readouterr().err


def test_memory_that_is_given_is_taken_whole(packed: Path) -> None:
    one, other = (
        slots_of(tandem.load(packed, expert_memory="700KB", context=context))
        for context in (1, 1 << 20)
    )
    assert one.num_slots == other.num_slots


def test_the_server_says_how_many_sequences_of_which_length_it_has(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[Any] = []
    monkeypatch.setattr(
        "tandem.server.serving.serve", lambda source, *_, **__: sources.append(source)
    )
    assert main(["serve", str(packed), "--context", "300", "--max-running", "7"]) == 0
    offload = sources[0].load_model.args[1]
    assert (offload.context, offload.sequences) == (300, 7)


def test_what_a_run_asks_for_is_not_saved_with_a_model(packed: Path) -> None:
    assert "context" not in OffloadConfig(context=5, sequences=2).to_dict()
    with pytest.raises(ConfigError, match="context is 0; expected a number of tokens"):
        tandem.load(packed, context=0)


def test_layers_with_a_window_keep_a_ring() -> None:
    config = AutoConfig.for_model(
        "gpt_oss", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        layer_types=["sliding_attention", "full_attention"], sliding_window=128,
    )  # fmt: skip
    layer = 2 * 2 * 8 * 2
    found = 3 * kv_sizes_of(config, torch.bfloat16).bytes_of(100_000)
    assert found == 3 * (100_000 + 1024) * layer
