"""Tests of `tandem compare`: its findings, when first choices count, and its output."""

import json
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.bench.peers import finding
from tandem.bench.peers.comparison import agreement
from tandem.bench.peers.finding import LLAMA_CPP, Peer, find_peer
from tandem.bench.peers.setting import Choice, Setting, Speeds
from tandem.cli import compare
from tandem.cli.main import main
from tandem.core.errors import ConfigError


class Steady:
    """A system that always gives the same answer."""

    def __init__(self, setting: Setting, speed: float = 100.0, last: int = 7) -> None:
        self._speed, self._last = speed, last

    def measure(self, depth: int) -> Speeds:
        return Speeds(self._speed, self._speed / 10, 0.0, 0.0)

    def choices(self, ids: Sequence[int]) -> list[Choice]:
        return [*(Choice(i, 1.0) for i in ids[:-1]), Choice(self._last, 0.25)]


class Slow(Steady):
    """A system of half the speed that disagrees about the last tokens."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, speed=50.0, last=8)


class Broken(Steady):
    """A system that cannot load the file."""

    def __init__(self, setting: Setting) -> None:
        raise OSError("no such architecture")


def program(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_llama_cpp_is_found_in_path_beside_its_programs_or_as_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "_library_version", lambda: None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        find_peer(path=str(tmp_path))
    built, linked = tmp_path / "built", tmp_path / "linked"
    built.mkdir()
    linked.mkdir()
    bench = program(built, "llama-bench")
    (linked / "llama-cli").symlink_to(program(built, "llama-cli"))
    for path in (built, linked):
        assert find_peer(path=str(path)) == Peer(LLAMA_CPP, (str(bench),), has_library=False)
    fork = find_peer(f"{built} -rtr 1", path=str(tmp_path))
    assert fork.command == (str(bench), "-rtr", "1")
    with pytest.raises(ConfigError, match="there is no program 'nothing'"):
        find_peer("nothing", path=str(tmp_path))
    monkeypatch.chdir(built)
    assert find_peer("./llama-bench", path=str(tmp_path)).command == (str(bench),)
    for command, message in (("", "--with is empty"), ("a 'b", "No closing quotation")):
        with pytest.raises(ConfigError, match=message):
            find_peer(command, path=str(tmp_path))
    monkeypatch.setattr(finding, "_library_version", lambda: "0.3")
    found = find_peer(path=str(tmp_path))
    assert (found.command, found.has_library) == ((), True)


def test_first_choices_count_where_the_others_two_best_are_apart() -> None:
    theirs = [Choice(1, 0.5), Choice(2, 0.05), Choice(3, 0.2), Choice(4, 3.0)]
    ours = [Choice(1, 0.1), Choice(9, 0.1), Choice(9, 0.1), Choice(4, 0.0)]
    found = agreement(ours, theirs)
    assert (found.num_tokens, found.num_sure, found.num_agreed) == (4, 3, 2)
    assert found.line.endswith("by at most 0.20.")
    assert agreement([], []).num_sure == 0


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compare, "_makers", lambda: (Steady, Slow))
    monkeypatch.setattr(compare, "_text_ids", lambda found, count: list(range(count)))
    monkeypatch.setattr(finding, "find_peer", lambda command: Peer("other", (), has_library=True))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_systems_take_turns_and_the_result_can_be_pasted(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(file), "--json", "--rounds", "2", "--tokens", "9"]) == 0
    shown = capsys.readouterr()
    *rows, _, paragraph, last = shown.out.splitlines()
    assert rows[-1] == "| other | 0 | 50.0, 5.0 | 2.00, 2.00 |  |"
    assert "(2.00 and 2.00 times as many)" in paragraph
    assert "agree after 8 of 9 tokens" in paragraph
    assert "round 2 of 2, other" in shown.err
    report: dict[str, Any] = json.loads(last)
    assert [cell["system"] for cell in report["speeds"]] == ["tandem", "other"]
    assert report["agreement"]["num_agreed"] == 8
    assert min(report["memory_bytes"].values()) > 1 << 20


def test_a_program_is_timed_and_the_library_says_what_it_would_choose(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"n_prompt": 9, "n_gen": 0, "avg_ts": 25.0}, {"n_prompt": 0, "n_gen": 4, "avg_ts": 5.0}]
    script = program(file.parent, "llama-bench")
    script.write_text(
        f"#!/bin/sh\necho \"$@\" > {file.parent}/arguments\necho '{json.dumps(rows)}'\n"
    )
    peer = Peer("fork", (str(script), "-rtr", "1"), has_library=True)
    monkeypatch.setattr(finding, "find_peer", lambda command: peer)
    words = ["compare", str(file), "-q", "--rounds", "1", "--tokens", "9", "--threads", "2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "| fork | 0 | 25.0, 5.0 | 4.00, 2.00 |  |" in shown
    assert "agree after 8 of 9 tokens" in shown
    assert (file.parent / "arguments").read_text().startswith("-rtr 1 -ngl 0 -m ")
    monkeypatch.setattr(finding, "find_peer", lambda command: replace(peer, has_library=False))
    assert main(words) == 0
    assert "pip install llama-cpp-python" in capsys.readouterr().out


def test_a_system_that_cannot_load_is_named(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "_makers", lambda: (Steady, Broken))
    assert main(["compare", str(file), "-q"]) == 2
    assert "stopped: other: OSError: no such architecture" in capsys.readouterr().err
    (file.parent / "config.json").write_text("{}")
    assert main(["compare", str(file.parent), "-q"]) == 2
    assert "is not a GGUF file" in capsys.readouterr().err
