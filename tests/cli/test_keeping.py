"""Tests of the packed copies that commands keep: written once, found again, never incomplete."""

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tandem.cli.kept_copies import KeptCopies, Origin
from tandem.core.errors import ModelError
from tests.cli.terminal import Terminal
from tests.hf.tiny import save_tiny_checkpoint
from tests.programs import COMMAND, ENVIRONMENT, tandem

RUN = ("-p", "hello", "--max-new-tokens", "4", "--temperature", "0", "--expert-dtype", "int4")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save_tiny_checkpoint(tmp_path / "tiny"))


@pytest.fixture
def env(tmp_path: Path) -> Mapping[str, str]:
    return {**ENVIRONMENT, "TANDEM_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}


def copies(env: Mapping[str, str]) -> list[str]:
    done = tandem("models", "--json", env=env)
    assert done.returncode == 0, done.stderr
    return [model["name"] for model in json.loads(done.stdout)["models"]]


def test_the_next_start_reads_the_copy_and_says_the_same(
    model: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    first = tandem("run", model, *RUN, "--keep", env=env)
    assert first.returncode == 0, first.stderr
    assert "keeping a packed copy" in first.stderr
    (name,) = copies(env)
    assert name.startswith("tiny-")
    again = tandem("run", model, *RUN, "--keep", env=env)
    assert again.stdout == first.stdout
    assert "keeping" not in again.stderr
    assert copies(env) == [name]
    other = tandem("run", model, *RUN[:-1], "int8", "--keep", env=env)
    assert other.returncode == 0, other.stderr
    assert len(copies(env)) == 2
    removed = tandem("models", "rm", name, env=env)
    assert f"removed {name}" in removed.stdout
    assert name not in copies(env)
    assert not (tmp_path / "cache" / "packed" / name).exists()


def test_a_source_that_changed_is_converted_again(model: str, env: Mapping[str, str]) -> None:
    for file in (next(Path(model).glob("*.safetensors")), Path(model) / "config.json"):
        tandem("run", model, *RUN, "--keep", env=env)
        os.utime(file)
    again = tandem("run", model, *RUN, "--keep", env=env)
    assert "keeping a packed copy" in again.stderr
    assert len(copies(env)) == 3


def test_a_damaged_copy_is_noticed_and_written_again(
    model: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    first = tandem("run", model, *RUN, "--keep", env=env)
    (name,) = copies(env)
    file = next((tmp_path / "cache" / "packed" / name).glob("tandem-experts*"))
    os.truncate(file, file.stat().st_size // 2)
    again = tandem("run", model, *RUN, "--keep", env=env)
    assert again.stdout == first.stdout
    assert "keeping a packed copy" in again.stderr


def test_a_copy_with_a_damaged_header_is_made_again(
    model: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    first = tandem("run", model, *RUN, "--keep", env=env)
    (name,) = copies(env)
    file = next((tmp_path / "cache" / "packed" / name).glob("tandem-experts*"))
    with file.open("rb+") as stream:
        stream.write(b"\xff" * 16)
    doctor = tandem("doctor", model, env=env)
    assert doctor.returncode == 1
    assert f"tandem models rm {name}" in doctor.stdout
    again = tandem("run", model, *RUN, "--keep", env=env)
    assert again.stdout == first.stdout
    assert "the packed copy is damaged and is written again" in again.stderr
    assert copies(env) == [name]


def test_a_cache_that_cannot_be_written_keeps_nothing_and_answers(
    model: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "packed").write_text("in the way")
    done = tandem("run", model, *RUN, "--keep", env=env)
    assert done.returncode == 0
    assert done.stdout.strip()
    assert done.stderr.count("no packed copy is kept: ") == 1
    assert "keeping a packed copy" not in done.stderr  # a missing copy is not announced
    assert done.stderr.index("no packed copy") < done.stderr.index("first token")
    assert "Traceback" not in done.stderr


def test_without_a_terminal_or_a_flag_nothing_is_kept(
    model: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    assert tandem("run", model, *RUN, env=env).returncode == 0
    assert tandem("run", model, *RUN, "--no-keep", env=env).returncode == 0
    assert not (tmp_path / "cache" / "packed").exists()


def test_without_room_the_answer_comes_and_nothing_is_left(
    model: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    done = tandem("run", model, *RUN, "--keep", "--keep-limit", "1kB", env=env)
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "no packed copy is kept: it takes" in done.stderr
    assert "keeping a packed copy" not in done.stderr
    assert copies(env) == []


def test_a_limit_that_is_no_size_is_one_sentence(model: str, env: Mapping[str, str]) -> None:
    done = tandem("run", model, *RUN, "--keep-limit", "much", env=env)
    assert done.returncode == 2
    assert "--keep-limit is 'much'; expected a size" in done.stderr


def test_names_that_are_not_there_remove_nothing(model: str, env: Mapping[str, str]) -> None:
    tandem("run", model, *RUN, "--keep", env=env)
    (name,) = copies(env)
    done = tandem("models", "rm", name, "nothing", env=env)
    assert done.returncode == 2
    assert "no model 'nothing' on this machine" in done.stderr
    assert copies(env) == [name]


def test_on_a_terminal_the_question_comes_once(
    model: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    slow = "import tandem.cli.keeping as k; k._SLOW_SECONDS = 0.0\n"
    with Terminal(["run", model, *RUN], env=env, code=slow + COMMAND) as terminal:
        terminal.wait_for("[Y/n]")
        terminal.type("y\n")
        terminal.wait_for("keeping a packed copy")
        assert terminal.close() == 0
    shutil.rmtree(tmp_path / "cache" / "packed")
    with Terminal(["run", model, *RUN], env=env, code=slow + COMMAND) as terminal:
        terminal.wait_for("keeping a packed copy")
        assert terminal.close() == 0
        assert "[Y/n]" not in terminal.screen


def origin(name: str) -> Origin:
    return Origin(name, {}, name * 12)


def saver(num_bytes: int):  # type: ignore[no-untyped-def]
    def save(path: Path) -> None:
        path.mkdir()
        (path / "x.safetensors").write_bytes(bytes(num_bytes))
        (path / "tandem.safetensors.index.json").write_text("{}")

    return save


def test_the_longest_unused_go_when_the_limit_is_reached(tmp_path: Path) -> None:
    kept = KeptCopies(tmp_path, 250)
    for age, name in enumerate("abc"):
        assert kept.write(origin(name), 100, saver(100)) is not None
        os.utime(kept._note(origin(name).name), (age, age))
        if name == "b":
            assert kept.find(origin("a")) is not None  # now b is the least recently used
    assert [copy.source for copy in kept.all() if copy.source != "c"] == ["a"]
    with pytest.raises(ModelError, match="takes 300 B, the limit is 250 B"):
        kept.write(origin("d"), 300, saver(300))
    assert kept.find(origin("c")) is not None


def test_two_processes_do_not_write_the_same(tmp_path: Path) -> None:
    kept = KeptCopies(tmp_path, 1000)

    def save(path: Path) -> None:
        assert kept.write(origin("a"), 10, saver(10)) is None
        saver(10)(path)

    assert kept.write(origin("a"), 10, save) is not None


def test_a_writer_that_is_killed_leaves_nothing_that_counts(tmp_path: Path) -> None:
    kept = KeptCopies(tmp_path, 1000)
    child = os.fork()
    if child == 0:

        def save(path: Path) -> None:
            saver(10)(path)
            (tmp_path / "written").touch()
            time.sleep(60)

        kept.write(origin("a"), 10, save)
        os._exit(0)
    while not (tmp_path / "written").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert kept.find(origin("a")) is None
    assert kept.write(origin("a"), 10, saver(10)) is not None
    assert kept.find(origin("a")) is not None


def test_what_killed_writers_left_goes_when_another_copy_is_written(tmp_path: Path) -> None:
    kept = KeptCopies(tmp_path, 1000)
    kept.write(origin("a"), 10, saver(10))
    for left in (".b-bbbbbbbbbbbb.partial", "c-cccccccccccc"):  # half written; without a note
        saver(10)(tmp_path / left)
    kept.write(origin("d"), 10, saver(10))
    assert sorted(f.name[0] for f in tmp_path.iterdir() if f.is_dir()) == ["a", "d"]


def test_copies_do_not_go_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptCopies(tmp_path, 1000)
    kept.write(origin("a"), 10, saver(10))
    usage = type("Usage", (), {"free": 100, "total": 1000})  # of which 50 stay free
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match="takes 200 B"):
        kept.write(origin("b"), 200, saver(200))
    assert kept.find(origin("a")) is not None
    assert kept.write(origin("b"), 55, saver(55)) is not None
    assert kept.find(origin("a")) is None


def test_a_model_is_packed_to_the_disk_and_runs_from_there(
    model: str, env: Mapping[str, str]
) -> None:
    in_memory = tandem("run", model, *RUN, env=env)
    limited = (*RUN, "--expert-memory", "400KB")
    refused = tandem("run", model, *limited, env=env)
    assert refused.returncode == 2
    assert "--pack-to-disk writes it to" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert copies(env) == []
    packed = tandem("run", model, *limited, "--pack-to-disk", "--json", env=env)
    assert packed.returncode == 0, packed.stderr
    report = json.loads(packed.stdout.splitlines()[-1])
    assert report["text"] == in_memory.stdout.strip()
    assert report["expert_memory"]["hits"] > 0
    assert len(copies(env)) == 1
    again = tandem("run", model, *limited, env=env)
    assert again.stdout == in_memory.stdout
    assert "packing" not in again.stderr


def test_a_model_in_fp32_that_would_be_refused_is_not_packed(
    model: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    words = ("run", model, "-p", "hello", "--expert-memory", "400KB", "--expert-dtype", "fp32")
    for more in ((), ("--pack-to-disk",)):
        refused = tandem(*words, *more, env=env)
        assert refused.returncode == 2
        assert "this model's experts are plain (fp32)" in refused.stderr
        assert "pack-to-disk" not in refused.stderr
        assert "Traceback" not in refused.stderr
    assert not (tmp_path / "cache" / "packed").exists()
