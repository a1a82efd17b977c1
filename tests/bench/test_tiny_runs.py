"""Tests that each figure's command of docs/performance.md runs at tiny size, or has a reason.

`make test` runs the quick ones; `make test-figures` (a part of `make test-slow`) runs all.
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.report import FIGURES, last_object, read_rows
from safetensors.torch import load_file, save_file

from tandem.kernels import _native
from tandem.kernels._native import available_isas
from tests.cli.test_bench_model import trace_of_two_experts
from tests.conftest import REPOSITORY
from tests.loading.gguf_files import tiny_model, write_gguf
from tests.server.checkpoint import save_served_checkpoint

ROWS = read_rows(FIGURES)
COMMANDS = sorted({row.command for row in ROWS})
SHAPE = "olmoe"  # the smallest
LAYER = f"--shape {SHAPE} --layers 1 --vocabulary 512"

# How a figure's command becomes tiny, by its beginning: options that go behind its own, of which
# argparse takes the last, but before a `--`. Words in capitals are files: see FILES.
GGUF_LAYER = "--shape qwen3-30b-a3b --layers 1 --vocabulary 512 --quantisation Q4_0"
DISK = (
    f"--shape {SHAPE} --layers 2 --experts 16 --vocabulary 512 --limits 0 --expert-memory 60MB "
    "--steps 4 --warm-up 4 --prompt 8 --cold-prompt 8"
)
EMULATED = f"{LAYER} --device emulated --shares 0.5 --batches 1 --prompt-tokens 8"
TINY = {
    "python -m benchmarks.disk": f"{DISK} --systems slots",
    "python -m benchmarks.disk --limits 12 --systems fit": f"{DISK} --systems fit --fit-layers 1",
    "python -m benchmarks.disk --limits 12 8.5 --systems own": f"{DISK} --systems own-slots",
    "python -m benchmarks.generation.against_peers --systems packed": (
        f"{GGUF_LAYER} --systems packed --prompt 4 --steps 2 --rounds 1"
    ),
    "python -m benchmarks.generation.against_peers --systems packed llama.cpp --vocabulary": (
        f"{GGUF_LAYER} --systems packed --prompt 4 --steps 2 --rounds 1 --depth 8"
    ),
    "python -m benchmarks.generation.against_peers": (
        f"{GGUF_LAYER} --systems tandem --prompt 4 --steps 2 --rounds 1 --depth 0"
    ),
    "python -m benchmarks.generation.attention": "--depth 8",
    "python -m benchmarks.generation.next_turn": f"--shape {SHAPE} --layers 1 --tokens 32 --new 4",
    "python -m benchmarks.generation.sampling": "--vocabulary 100",
    "python -m benchmarks.generation.shares": (
        f"{LAYER} --over-layers 1 --prompt 4 --steps 2 --rounds 1"
    ),
    "python -m benchmarks.generation.speculation": "MODEL --rounds 1 --tokens 4",
    "python -m benchmarks.generation.step_overhead": "--layers 2",
    "python -m benchmarks.generation.verification": "--layers 2 --rounds 2",
    "python -m benchmarks.gpu": f"{EMULATED} --formats int4 --systems tandem --new-tokens 3",
    "python -m benchmarks.gpu.timeline": EMULATED,
    "python -m benchmarks.kernels.builds": "--rounds 1",
    "python -m benchmarks.kernels.isas": "--isas portable portable --pairs 1 --experts 8",
    "python -m benchmarks.kernels.peers": "--tokens 1",
    "python -m benchmarks.loading.first_load": "--rounds 1",
    "python -m benchmarks.loading.large_model load DIR": "--tokens 4",
    "python -m benchmarks.loading.large_model load FILE.gguf": "",
    "python -m benchmarks.loading.quantise": "--rounds 1",
    "python -m benchmarks.loading.speed_forecast": "--pairs 1 --tokens 4",
    "python -m benchmarks.loading.start_up": "--rounds 1",
    "python -m benchmarks.policy.graph_rules": "--limit 4",
    "python -m benchmarks.policy.host_costs": "--limit 100",
    "python -m benchmarks.policy.host_slots": "--tokens 20 --step 20",
    "python -m benchmarks.policy.prompts": "--prompt 16",
    "python -m benchmarks.policy.three_tiers": "--limit 70",
    "python -m benchmarks.runtime.coordinator_latency": "--layers 2 --steps 40",
    "python -m benchmarks.runtime.coordinator_stress": "--minutes 0.02",
    "python -m benchmarks.runtime.overhead": "--layers 1 --steps 2 --repetitions 2",
    "python -m benchmarks.server.agent": "--turns 2",
    "python -m benchmarks.server.fairness": "--layers 1 --tokens 64",
    "python -m benchmarks.server.hostile": "--model tiny --minutes 0.05 --clients 4",
    "python -m benchmarks.server.load": "--model MODEL --minutes 0.2 --scale 0.1",
    "python -m benchmarks.server.overhead": "--model SLOW --rounds 2",
    "python -m benchmarks.server.long_prompt": "--tokens 500 --layers 1",
    "python -m benchmarks.server.steadiness": "--model tiny --minutes 0.1 --clients 4",
    "python -m benchmarks.server.restart [": "--shape qwen3-30b-a3b --layers 1 --tokens 64",
    "tandem bench --shape": f"{LAYER} --prompt 4 --gen 2",
    "tandem bench --shape deepseek-v2-lite": f"{LAYER} --replay TRACE --prompt 4 --gen 2",
    "tandem bench kernels": "--tokens 1",
    "tandem profile": "",
    "tandem run": "MODEL --max-new-tokens 2",
}
LLAMA_CPP = "measures llama.cpp, which has to be installed, and nothing without it"
NOT_RUN = {
    "python -m benchmarks.generation.claims": LLAMA_CPP,
    "python -m benchmarks.gpu.llama_cpp": LLAMA_CPP,
    "python -m benchmarks.loading.against_llama_cpp_file": LLAMA_CPP,
    "python -m benchmarks.server.against": "starts guidellm and llama-server",
    "tandem doctor": "its stages have the sizes of released models; only a GPU is quick enough",
}
TEXT_IDS = range(4, 98)  # of `byte_tokenizer`: each is a character by itself
# Each takes under half a second of processor time.
QUICK = (
    "python -m benchmarks.generation.sampling",
    "python -m benchmarks.generation.step_overhead",
)
# What a reader puts in by hand; brackets are options that may be left out.
PLACEHOLDERS = {
    "SHAPE": SHAPE, "TYPE": "Q4_0", "ISA": "avx2", "DIR": "MODEL", "demo": "MODEL",
    "~/.cache/tandem/models/demo": "MODEL", "GCC.so": _native.__file__,
    "CLANG.so": _native.__file__, "F": "FOLDER", "G": "GGUF", "FILE.gguf": "GGUF",
}  # fmt: skip
# The fixture that makes each file or directory.
FILES = {
    "MODEL": "model", "SLOW": "slow_model", "GGUF": "gguf", "TRACE": "trace", "FOLDER": "tmp_path",
}  # fmt: skip


def beginning(command: str, of: dict[str, str]) -> str:
    """Return the longest key that a command begins with, or an empty string."""
    plain = re.sub(r"^TANDEM_ISA=\w+ ", "", command)
    return max((key for key in of if plain.startswith(key)), key=len, default="")


RUN = [command for command in COMMANDS if not beginning(command, NOT_RUN)]


def test_each_figure_s_command_runs_at_tiny_size_or_has_a_reason() -> None:
    unknown = [c for c in COMMANDS if not beginning(c, TINY) and not beginning(c, NOT_RUN)]
    assert unknown == []
    for table in (TINY, NOT_RUN):
        used = {beginning(command, table) for command in COMMANDS}
        assert table.keys() - used == set(), "no figure has this command any more"


def words_of(command: str) -> list[str]:
    """Return a figure's command at tiny size; files are keys of FILES."""
    tiny = TINY[beginning(command, TINY)]
    command, dashes, rest = command.replace("[", "").replace("]", "").partition(" -- ")
    return [
        prefix + equals + PLACEHOLDERS.get(word, word)
        for prefix, equals, word in map(_assignment, shlex.split(f"{command} {tiny}{dashes}{rest}"))
    ]


def _assignment(word: str) -> tuple[str, str, str]:
    """Split `TANDEM_ISA=value` at the equals sign, and no other word."""
    name, equals, value = word.partition("=")
    return (name, equals, value) if name == "TANDEM_ISA" else ("", "", word)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in bf16 with a tokenizer."""
    return save_bf16_checkpoint(tmp_path_factory.mktemp("figures") / "model")


@pytest.fixture(scope="session")
def slow_model(temporary: Path) -> Path:
    """A checkpoint whose decode steps take milliseconds, so that its tokens arrive one by one."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_hidden_layers": 4}
    return save_bf16_checkpoint(temporary / "slow", **sizes)


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model(), "Q4_0")


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of one layer of SHAPE."""
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    trace_of_two_experts(path, 1)
    return path


@pytest.fixture(scope="session")
def temporary() -> Iterator[Path]:
    """The temporary directory of all commands, which share large files; removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def save_bf16_checkpoint(directory: Path, **values: int) -> Path:
    """Write a tiny checkpoint in bf16 (experts in fp32 have no speed forecast) that writes text."""
    save_served_checkpoint(directory, **values)
    for file in directory.glob("*.safetensors"):
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
        if (head := tensors.get("lm_head.weight")) is not None:
            head[: TEXT_IDS.start] = head[TEXT_IDS.stop :] = 0  # never the likeliest
        save_file(tensors, file, metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.mark.parametrize("command", [c for c in RUN if c.startswith(QUICK)])
def test_a_quick_command_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, name, *flags = words_of(command)
    monkeypatch.setattr(sys, "argv", [name, *flags])
    assert not importlib.import_module(name).main()
    assert capsys.readouterr().out


TOO_TINY = (
    pytest.param("benchmarks.policy.host_costs --limit 4", "raise --limit"),
    pytest.param(
        "benchmarks.runtime.coordinator_latency --layers 1 --steps 0",
        "raise --steps",
        marks=pytest.mark.slow,
    ),
)


@pytest.mark.parametrize(("command", "advice"), TOO_TINY)
def test_a_benchmark_of_too_little_says_what_to_raise(
    command: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *flags = command.split()
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 2
    assert advice in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.parametrize("command", [c for c in RUN if not c.startswith(QUICK)])
def test_a_command_runs_and_ends_with_what_its_rows_show(
    command: str, temporary: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    words = [
        str(request.getfixturevalue(FILES[word])) if word in FILES else word
        for word in words_of(command)
    ]
    environment = os.environ | {"TANDEM_CACHE": str(tmp_path), "TMPDIR": str(temporary)}
    if words[0].startswith("TANDEM_ISA="):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
        if value not in available_isas():
            pytest.skip(f"this processor has no {value}")
    words = [sys.executable, "-m", *(words if words[0] == "tandem" else words[2:])]
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for row in ROWS:
        if row.command == command and row.template:
            assert row.filled(last_object(done.stdout))
