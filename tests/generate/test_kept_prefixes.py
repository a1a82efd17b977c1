"""Tests of prompt prefixes on disk: found after a restart, within a limit, never damaged."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.generate.kept_prefixes import KeptPrefixes
from tandem.generate.scheduler import Scheduler
from tandem.generate.token_output import TokenOutput
from tandem.kv_cache import prefix_files
from tandem.kv_cache.prefix_files import SEGMENT_TOKENS, SEGMENTS_BETWEEN_STATES, PrefixFiles
from tests.architecture_sizes import VOCABULARY
from tests.architectures import build_tiny_model
from tests.generate.test_scheduler import finish, request_of, tokens
from tests.hf.tiny import save_tiny_checkpoint

NUM_SEGMENTS = 3
PROMPT = [32 + i * 7 % (VOCABULARY - 40) for i in range(NUM_SEGMENTS * SEGMENT_TOKENS + 30)]
OTHER = [33 + i * 5 % (VOCABULARY - 40) for i in range(300)]
LIMIT = 64 << 20


def long_model(name: str = "qwen3_moe") -> Any:
    model: Any = build_tiny_model(name)
    model.config.max_position_embeddings = 4096
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return long_model()


def scheduler_of(model: Any, directory: Path, *, limit: int = LIMIT, slots: int = 1) -> Scheduler:
    return tandem.Generator(model).scheduler(slots, kept=KeptPrefixes(directory, limit))


def ask(scheduler: Scheduler, prompt: list[int]) -> list[TokenOutput]:
    scheduler.add(request_of(1, prompt, max_new_tokens=6, temperature=0.0))
    (found,) = finish(scheduler).values()
    return found


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*"))


@pytest.fixture
def written(model: Any, tmp_path: Path) -> Path:
    """A directory with the stored prefixes of PROMPT."""
    scheduler = scheduler_of(model, tmp_path)
    ask(scheduler, PROMPT)
    scheduler.prefixes.close(30)
    assert len(files(tmp_path)) == NUM_SEGMENTS
    return tmp_path


def test_a_prompt_is_found_again_after_a_restart(model: Any, written: Path) -> None:
    expected = tokens(ask(tandem.Generator(model).scheduler(1), PROMPT))
    scheduler = scheduler_of(model, written)
    found = ask(scheduler, PROMPT)
    assert tokens(found) == expected
    assert found[-1].reused_tokens == NUM_SEGMENTS * SEGMENT_TOKENS
    assert scheduler.counts.read_tokens == NUM_SEGMENTS * SEGMENT_TOKENS
    assert scheduler.counts.prompt_tokens == len(PROMPT) - NUM_SEGMENTS * SEGMENT_TOKENS


@pytest.mark.parametrize(
    "name", ["gpt_oss", "gemma4", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"]
)
def test_layers_with_windows_index_keys_and_others_are_found_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short windows are written before they lose the positions."""
    monkeypatch.setattr("tandem.hf.kv_sizes.MARGIN_TOKENS", 256)
    model = long_model(name)
    expected = tokens(ask(tandem.Generator(model).scheduler(1, chunk_tokens=64), PROMPT))
    scheduler = scheduler_of(model, tmp_path)
    scheduler.add(request_of(1, PROMPT, max_new_tokens=6, temperature=0.0))
    while scheduler.has_work:
        scheduler.step()
        scheduler.prefixes.write_some()
    scheduler.prefixes.close(30)
    found = ask(scheduler_of(model, tmp_path), PROMPT)
    assert tokens(found) == expected
    assert found[-1].reused_tokens == NUM_SEGMENTS * SEGMENT_TOKENS


def test_what_was_pushed_out_of_its_slot_comes_back(model: Any, tmp_path: Path) -> None:
    scheduler = scheduler_of(model, tmp_path)
    first = ask(scheduler, PROMPT)
    while scheduler.prefixes.has_unwritten:
        scheduler.prefixes.write_some()
    ask(scheduler, OTHER)
    again = ask(scheduler, [*PROMPT[:600], *OTHER])
    assert again[-1].reused_tokens == 600 // SEGMENT_TOKENS * SEGMENT_TOKENS
    assert tokens(ask(scheduler, PROMPT)) == tokens(first)


def test_a_prompt_is_read_between_the_tokens_of_others(model: Any, written: Path) -> None:
    expected = tokens(ask(tandem.Generator(model).scheduler(1), PROMPT))
    scheduler = scheduler_of(model, written, slots=2)
    scheduler.add(request_of(1, OTHER, max_new_tokens=40, temperature=0.0))
    for _ in range(4):
        scheduler.step()
    scheduler.add(request_of(2, PROMPT, max_new_tokens=6, temperature=0.0))
    found = finish(scheduler)
    assert tokens(found[2]) == expected
    assert found[2][-1].reused_tokens == NUM_SEGMENTS * SEGMENT_TOKENS


@pytest.mark.parametrize("kind", ["flipped", "cut", "empty", "gone"])
def test_a_damaged_file_is_dropped_with_a_line_and_computed_again(
    model: Any, written: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens(ask(tandem.Generator(model).scheduler(1), PROMPT))
    scheduler = scheduler_of(model, written)
    for file in files(written):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        if kind == "gone":
            file.unlink()
        else:
            file.write_bytes({"flipped": bytes(data), "cut": bytes(data[:-9])}.get(kind, b""))
    with caplog.at_level(logging.WARNING, "tandem.kv_cache"):
        found = ask(scheduler, PROMPT)
    assert tokens(found) == expected
    assert found[-1].reused_tokens == 0
    assert len(caplog.records) == (0 if kind == "gone" else 1)
    scheduler.prefixes.close(30)


def test_other_weights_find_nothing(model: Any, written: Path) -> None:
    other = long_model()
    with torch.no_grad():
        other.model.layers[-1].self_attn.k_proj.weight[0, 0] += 1.0
    assert ask(scheduler_of(other, written), PROMPT)[-1].reused_tokens == 0


WITH_STATES = ("qwen3_5_moe", "lfm2_moe", "nemotron_h", "deepseek_v4")


@pytest.fixture(scope="module", params=WITH_STATES)
def model_with_states(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    values = {"max_position_embeddings": 4096}
    folder = save_tiny_checkpoint(
        tmp_path_factory.mktemp("models") / "tiny", request.param, **values
    )
    model = tandem.load(folder, expert_dtype="int8-g32", threads=1)
    model.generation_config.eos_token_id = None
    return model


STATES_TOKENS = SEGMENT_TOKENS * SEGMENTS_BETWEEN_STATES


def test_states_are_found_again_where_they_were_kept(
    model_with_states: Any, tmp_path: Path
) -> None:
    """The prompt continues from the state at its middle."""
    model = model_with_states
    expected = tokens(ask(tandem.Generator(model).scheduler(1, chunk_tokens=100), PROMPT))
    scheduler = scheduler_of(model, tmp_path)
    assert tokens(ask(scheduler, PROMPT)) == expected
    scheduler.prefixes.close(30)
    assert len(files(tmp_path)) == NUM_SEGMENTS + NUM_SEGMENTS // SEGMENTS_BETWEEN_STATES
    again = scheduler_of(model, tmp_path)
    found = ask(again, PROMPT)
    assert tokens(found) == expected
    assert found[-1].reused_tokens == STATES_TOKENS
    # restored states equal computed ones
    found = ask(again, [*PROMPT[: STATES_TOKENS + 5], *OTHER])
    assert found[-1].reused_tokens == STATES_TOKENS
    other = ask(tandem.Generator(model).scheduler(1), [*PROMPT[: STATES_TOKENS + 5], *OTHER])
    assert tokens(found) == tokens(other)


@pytest.mark.parametrize(
    ("model_with_states", "lost"),
    [
        *((name, "states") for name in WITH_STATES),
        (WITH_STATES[0], "segment"),  # segments are looked up in the same way, whatever the states
    ],
    indirect=["model_with_states"],
)
def test_lost_states_are_computed_again(model_with_states: Any, lost: str, tmp_path: Path) -> None:
    model = model_with_states
    expected = tokens(ask(tandem.Generator(model).scheduler(2), PROMPT))
    scheduler = scheduler_of(model, tmp_path)
    ask(scheduler, PROMPT)
    scheduler.prefixes.close(30)
    disk = scheduler.prefixes._disk
    assert disk is not None
    kept = disk.files
    keys = kept.keys(PROMPT)
    again = scheduler_of(model, tmp_path, slots=2)
    again.add(request_of(2, OTHER, max_new_tokens=40, temperature=0.0))
    again.step()
    again.add(request_of(1, PROMPT, max_new_tokens=6, temperature=0.0))
    again.add(request_of(3, PROMPT[:STATES_TOKENS], max_new_tokens=2, temperature=0.0))
    key = kept.states_key(keys[1]) if lost == "states" else keys[1]
    file = kept._path(key)
    file.write_bytes(file.read_bytes()[:-1])
    found = finish(again)
    assert tokens(found[1]) == expected
    assert found[1][-1].reused_tokens == 0


def test_models_that_keep_them_elsewhere_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = long_model()
    monkeypatch.setattr("tandem.decode.cpu_slots.CpuSlotPool.moving", None)
    with caplog.at_level(logging.WARNING, "tandem.kv_cache"):
        scheduler = scheduler_of(model, tmp_path)
    assert "are not kept on disk" in caplog.text
    ask(scheduler, OTHER[:200])
    assert not scheduler.prefixes.write_some()
    assert scheduler.prefixes.num_bytes_on_disk == 0


def test_files_stay_within_their_limit_and_the_least_used_go_first(tmp_path: Path) -> None:
    kept = PrefixFiles(tmp_path, 3500, b"model")
    keys = kept.keys(range(5 * SEGMENT_TOKENS))
    for key in keys[:3]:
        kept.offer(key, memoryview(bytearray(1000)))
    kept.close(30)
    kept = PrefixFiles(tmp_path, 3500, b"model")
    assert kept.read(keys[0]) is not None
    kept.offer(keys[3], memoryview(bytearray(1000)))
    kept.close(30)
    assert [kept.has(key) for key in keys] == [True, False, True, True, False]
    assert kept.num_bytes <= 3500
    assert PrefixFiles(tmp_path, 1500, b"other model").num_bytes <= 1500


def test_keys_are_of_all_tokens_before(tmp_path: Path) -> None:
    kept = PrefixFiles(tmp_path, 1000, b"model")
    tokens = list(range(600))
    keys = kept.keys(tokens)
    assert len(keys) == 2
    assert kept.keys(tokens, keys[:1]) == keys
    assert kept.keys([*tokens[:300], 5, *tokens[301:]])[0] == keys[0]
    assert not set(kept.keys([1, *tokens[1:]])) & set(keys)
    assert PrefixFiles(tmp_path, 1000, b"other").keys(tokens) != keys


def test_a_full_disk_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(path: str, flags: int) -> int:
        raise OSError(28, "No space left on device")

    kept = PrefixFiles(tmp_path, 10_000, b"model")
    monkeypatch.setattr(prefix_files, "_open_private", no_room)
    with caplog.at_level(logging.WARNING, "tandem.kv_cache"):
        for key in kept.keys(range(2 * SEGMENT_TOKENS)):
            kept.offer(key, memoryview(bytearray(10)))
        kept.close(30)
    assert [record.getMessage() for record in caplog.records] == [
        "keys and values are no longer written to disk: No space left on device"
    ]
    assert not kept.takes_more
