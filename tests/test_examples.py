"""Tests of the programs in examples/, as a user starts them, with a tiny random model.

tests/server/test_clients.py runs the one that needs a server.
"""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.hf.tiny import save_tiny_checkpoint
from tests.programs import ENVIRONMENT, python

EXAMPLES = REPOSITORY / "examples"
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("examples") / "tiny")


def example(name: str, *words: object, cache: Path, stdin: str = "") -> list[str]:
    """Run an example to its end; return its output lines."""
    environment = {**ENVIRONMENT, "TANDEM_CACHE": str(cache), "HOME": str(cache)}
    done = python(RUN, str(EXAMPLES / name), *map(str, words), stdin=stdin, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_has_a_test() -> None:
    files = (Path(__file__), REPOSITORY / "tests" / "server" / "test_clients.py")
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    tested = set(re.findall(r'example\("(\S+)"', source))
    assert {file.name for file in EXAMPLES.glob("*.py")} == tested


def test_chat_answers_each_line(model: Path, tmp_path: Path) -> None:
    lines = example("chat.py", model, "--max-new-tokens", 6, stdin="hello\nmore\n", cache=tmp_path)
    assert len(lines) >= 2


def test_batch_answers_every_prompt(model: Path, tmp_path: Path) -> None:
    lines = example("batch.py", model, "one", "two", "--max-new-tokens", 6, cache=tmp_path)
    assert [line.split(" -> ")[0] for line in lines[:-1]] == ["one", "two"]
    assert re.fullmatch(r"\d+ tokens for 2 prompts in \S+ s", lines[-1])


def test_own_policy_is_simulated_and_runs_live(model: Path, tmp_path: Path) -> None:
    trace = REPOSITORY / "data" / "traces" / "gpt-oss-20b.npz"
    words = ("--tokens", 60, "--model", model, "--gpu-memory", "400kB")
    *simulated, live = example("own_policy.py", trace, *words, cache=tmp_path)
    assert [line.split(":")[0] for line in simulated] == ["lru", "second-miss", "next-use"]
    assert json.loads(live.removeprefix("live: "))


def test_a_trace_is_recorded_and_simulated(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\nand more\n")
    words = ("--trace", tmp_path / "t.npz", "--max-new-tokens", 6)
    lines = example("trace_and_simulate.py", model, prompts, *words, cache=tmp_path)
    assert [line.split()[:2] for line in lines[-6:]] == [
        [name, share] for name in ("lru", "next-use") for share in ("25%", "50%", "75%")
    ]
