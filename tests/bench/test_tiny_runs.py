"""Each figure of docs/performance.md: its command runs at tiny size, or a table says why not.

`make test` runs those that take no time; `make test-figures` (a part of `make test-slow`) runs all.
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.report import FIGURES, last_object, read_rows
from safetensors.torch import load_file, save_file

from tandem.kernels import _native
from tests.conftest import REPOSITORY
from tests.server.checkpoint import save_served_checkpoint

ROWS = read_rows(FIGURES)
COMMANDS = sorted({row.command for row in ROWS})
SHAPE = "olmoe"  # the smallest
LAYER = f"--shape {SHAPE} --layers 1 --vocabulary 512"

# How a figure's command becomes tiny, by its beginning: options that go behind its own, of which
# argparse takes the last. MODEL is a tiny model with a tokenizer.
TINY = {
    "python -m benchmarks.generation.against_peers --systems tandem --quantisation": (
        f"{LAYER} --prompt 4 --steps 2 --rounds 1"
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
    "python -m benchmarks.kernels.builds": "--rounds 1",
    "python -m benchmarks.kernels.peers --format bf16 ": "--tokens 1",
    "python -m benchmarks.loading.first_load": "--rounds 1",
    "python -m benchmarks.loading.large_model load DIR": "--tokens 4",
    "python -m benchmarks.loading.quantise": "--rounds 1",
    "python -m benchmarks.loading.speed_forecast": "--pairs 1 --tokens 4",
    "python -m benchmarks.loading.start_up --rounds 4": "",
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
    "python -m benchmarks.server.restart [": "--shape qwen3-30b-a3b --layers 1 --tokens 64",
    "python -m benchmarks.server.restart ~": "--tokens 64",
    "tandem bench --shape": f"{LAYER} --prompt 4 --gen 2",
    "tandem bench kernels": "--tokens 1",
    "tandem profile": "",
    "tandem run": "MODEL --max-new-tokens 2",
}
LLAMA_CPP = "compares with llama.cpp, which has to be installed"
GPU = "needs a GPU"
MEMORY = "holds a process to gigabytes of memory, which it fills, and drops the page cache"
NOT_RUN = {
    "TANDEM_ISA=ISA python -m benchmarks.generation.against_peers": LLAMA_CPP,
    "TANDEM_ISA=avx2 python -m benchmarks.generation.against_peers": LLAMA_CPP,
    "TANDEM_ISA=amx": "needs a processor with AMX",
    "python -m benchmarks.disk": MEMORY,
    "python -m benchmarks.generation.against_peers": LLAMA_CPP,
    "python -m benchmarks.generation.claims": LLAMA_CPP,
    "python -m benchmarks.gpu": GPU,
    "python -m benchmarks.kernels.peers --format bf16,": "compares with kt-kernel",
    "python -m benchmarks.kernels.peers --format int8": LLAMA_CPP,
    "python -m benchmarks.loading.against_llama_cpp_file": LLAMA_CPP,
    "python -m benchmarks.loading.large_model load FILE.gguf": "reads a file of 6 or 18 GB",
    "python -m benchmarks.loading.start_up --rounds 3": "starts with 18 GB of weights",
    "python -m benchmarks.server.against": "starts guidellm and llama-server",
    "python -m benchmarks.server.overhead --only release": "needs answers that last seconds",
    "python -m benchmarks.server.overhead --rounds": "a tiny model's tokens come at one instant",
    "tandem bench --shape deepseek-v2-lite": "follows a trace of all 26 layers, 10 GB",
    "tandem doctor": GPU,
}
# Under half a second of a processor each.
QUICK = (
    "python -m benchmarks.generation.sampling",
    "python -m benchmarks.generation.step_overhead",
)
# What a reader puts in by hand; brackets are options that may be left out.
PLACEHOLDERS = {
    "SHAPE": SHAPE, "TYPE": "Q4_0", "ISA": "avx2", "DIR": "MODEL", "demo": "MODEL",
    "~/.cache/tandem/models/demo": "MODEL", "GCC.so": _native.__file__,
    "CLANG.so": _native.__file__,
}  # fmt: skip


def beginning(command: str, of: dict[str, str]) -> str:
    """Return the longest key that a command begins with; nothing if there is none."""
    plain = re.sub(r"^TANDEM_ISA=avx2 (?=tandem)", "", command)
    return max((key for key in of if plain.startswith(key)), key=len, default="")


RUN = [command for command in COMMANDS if not beginning(command, NOT_RUN)]


def test_each_figure_s_command_runs_at_tiny_size_or_has_a_reason() -> None:
    unknown = [c for c in COMMANDS if not beginning(c, TINY) and not beginning(c, NOT_RUN)]
    assert unknown == []
    for table in (TINY, NOT_RUN):
        used = {beginning(command, table) for command in COMMANDS}
        assert table.keys() - used == set(), "no figure has this command any more"


def words_of(command: str, model: str) -> list[str]:
    """Return a figure's command at tiny size."""
    tiny = TINY[beginning(command, TINY)]
    words = shlex.split(f"{command.replace('[', '').replace(']', '')} {tiny}")
    words = [PLACEHOLDERS.get(word, word) for word in words]
    return [model if word == "MODEL" else word for word in words]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny checkpoint in bf16 with a tokenizer."""
    return str(save_bf16_checkpoint(tmp_path_factory.mktemp("figures") / "model"))


def save_bf16_checkpoint(directory: Path) -> Path:
    """Write a tiny checkpoint in bf16: speeds of fp32 experts are not forecast."""
    save_served_checkpoint(directory)
    for file in directory.glob("*.safetensors"):
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "bfloat16"}
    path.write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.mark.parametrize("command", [c for c in RUN if c.startswith(QUICK)])
def test_a_quick_command_runs(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, name, *flags = words_of(command, "")
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
    command: str, model: str, tmp_path: Path
) -> None:
    words, environment = words_of(command, model), os.environ | {"TANDEM_CACHE": str(tmp_path)}
    if words[0].startswith("TANDEM_ISA="):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    words = [sys.executable, "-m", *(words if words[0] == "tandem" else words[2:])]
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for row in ROWS:
        if row.command == command and row.template:
            assert row.filled(last_object(done.stdout))
