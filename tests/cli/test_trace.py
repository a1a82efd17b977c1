"""Tests of `tandem trace record` as a user starts it."""

import json
from pathlib import Path

import pytest

from tandem.cli.prompts import read_prompts
from tandem.core.errors import FileFormatError
from tandem.hardware.profiles import save_profile
from tandem.trace import read_trace
from tests.experts.machines import make_machine
from tests.hf.tiny import save_tiny_checkpoint
from tests.programs import ENVIRONMENT, tandem


def test_records_a_trace_on_the_emulated_device(tmp_path: Path) -> None:
    model = save_tiny_checkpoint(tmp_path / "tiny")
    save_profile(make_machine().profile, tmp_path / "machine.json")
    (tmp_path / "prompts.txt").write_text("hello\n\nwhat is it?\nand more\n")
    words = ["trace", "record", str(model), "--json"]
    words += ["--prompts", str(tmp_path / "prompts.txt"), "-o", str(tmp_path / "t.npz")]
    words += ["--device", "emulated", "--gpu-memory", "150kB", "--limit", "2"]
    words += ["--profile", str(tmp_path / "machine.json"), "--max-new-tokens", "5"]
    done = tandem(*words, env={**ENVIRONMENT, "TANDEM_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    trace = read_trace(tmp_path / "t.npz")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["sequences"] == trace.num_sequences == 2
    assert report["tokens"] == trace.num_tokens
    assert trace.weights is not None
    assert trace.token_ids is not None


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.txt", "a\n\nb\n", ["a", "b"]),
        ("p.json", '["a", {"text": "b"}]', ["a", "b"]),
        ("p.json", '{"prompts": [{"prompt": "a"}]}', ["a"]),
        ("p.jsonl", '{"question": "a"}\n"b"\n', ["a", "b"]),
    ],
)
def test_prompts_are_read(tmp_path: Path, name: str, content: str, prompts: list[str]) -> None:
    (tmp_path / name).write_text(content)
    assert read_prompts(tmp_path / name) == prompts


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.txt", "\n", "found no prompt"),
        ("p.json", "{", "not JSON"),
        ("p.json", "3", "found int; expected one prompt per line"),
        ("p.json", "[3]", "found the prompt 3; expected a text"),
        ("no.txt", None, "found no such file"),
    ],
)
def test_files_without_prompts_are_refused(
    tmp_path: Path, name: str, content: str | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(FileFormatError, match=sentence):
        read_prompts(tmp_path / name)


def test_prompts_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(FileFormatError, match=r"p\.txt: byte 3 is not UTF-8"):
        read_prompts(tmp_path / "p.txt")
