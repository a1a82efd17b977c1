"""Threads and memory that run out while a model loads are one sentence, and the exit code is 2."""

from multiprocessing import Pipe
from pathlib import Path

import pytest

import tandem
from tandem.engine.engine import run_engine
from tandem.engine.messages import EngineSettings
from tandem.foreign_types import PreTrainedModel, Tokenizer
from tests.hf.tiny import save_tiny_checkpoint
from tests.programs import COMMAND, IMPORTS, python

# Of address space on top of what is taken: a thread's stack takes 8 MB.
LIMITED = """
import torch
import resource, sys
from pathlib import Path
def limit(megabytes):
    lines = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (taken + (megabytes << 20),) * 2)
"""
RUN = LIMITED + "limit(int(sys.argv.pop(1)))\n" + COMMAND
WARM = IMPORTS + "import tandem.hf.load, tandem.cli.run, tandem.cli.session, torch._dynamo\n"
SAID = "end other programs, or raise the limit"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    plain = save_tiny_checkpoint(folder / "plain", "qwen3_moe")
    tandem.pack(plain, folder / "packed", expert_dtype="int8")
    return folder


@pytest.mark.parametrize("megabytes", [8, 24, 64, 160])
@pytest.mark.parametrize(
    "words",
    [("packed",), ("packed", "--expert-memory", "1MB"), ("plain", "--expert-dtype", "int4")],
    ids=["packed", "disk", "plain"],
)
def test_what_runs_out_while_a_model_loads_is_a_sentence(
    models: Path, words: tuple[str, ...], megabytes: int
) -> None:
    name, *options = words
    more = ("-p", "hello", "--max-new-tokens", "2", "--threads", "4", "--no-keep", *options)
    done = python(RUN, str(megabytes), "run", str(models / name), *more, imports=WARM)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2), done.stderr
    assert (SAID in done.stderr) == (done.returncode == 2), done.stderr


def test_threads_that_compute_and_do_not_start_are_a_sentence() -> None:
    done = python(
        LIMITED + "from tandem.core.errors import CapacityError\n"
        "from tandem.kernels.engine import start_engine\n"
        "limit(30)\n"
        "try:\n    start_engine(num_threads=64)\n"
        "except CapacityError as error:\n    print(error)\n",
        imports=WARM,
    )
    assert done.returncode == 0, done.stderr
    assert "of 64 threads that compute only" in done.stdout


def test_weights_are_packed_by_the_threads_that_there_are() -> None:
    done = python(
        LIMITED + "from tandem.kernels.formats.packed import pack\n"
        "from tandem.kernels.formats.weight_format import find_format\n"
        "weight, fmt = torch.randn(2048, 2048), find_format('int8')\n"
        "right = pack(weight, fmt)\n"
        "torch.get_num_threads = lambda: 64  # torch's own threads stay one\n"
        "limit(30)\n"
        "print(torch.equal(pack(weight, fmt).data, right.data))\n",
        imports=WARM,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


def test_a_server_hears_of_threads_that_run_out() -> None:
    def load() -> tuple[PreTrainedModel, Tokenizer]:
        raise RuntimeError("can't start new thread")

    ours, theirs = Pipe()
    with pytest.raises(SystemExit):
        run_engine(load, EngineSettings(max_running=1, part_tokens=16), theirs)
    assert "starts no more threads; end other programs" in ours.recv().message
