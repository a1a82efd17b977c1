"""Tests of running out of threads and memory during a load: one sentence, exit code 2."""

import errno
from multiprocessing import Pipe
from pathlib import Path

import pytest

import tandem
from tandem.core.errors import CapacityError, capacity_errors
from tandem.engine.engine import run_engine
from tandem.engine.messages import EngineSettings
from tandem.foreign_types import PreTrainedModel, Tokenizer
from tests.hf.tiny import save_tiny_checkpoint
from tests.programs import COMMAND, IMPORTS, python

# This many more threads can start: each takes 2 GB of the address space for its stack.
LIMITED = """
import ctypes, resource, sys, torch
from pathlib import Path
def limit(num_threads):
    libc, attributes, stack = ctypes.CDLL(None), ctypes.create_string_buffer(256), 2 << 30
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(stack))
    assert libc.pthread_setattr_default_np(attributes) == 0
    lines = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_threads * stack + (stack >> 1),) * 2)
"""
RUN = LIMITED + "limit(int(sys.argv.pop(1)))\n" + COMMAND
WARM = IMPORTS + "import tandem.hf.load, tandem.cli.run, tandem.cli.session, torch._dynamo\n"
MESSAGE = "end other programs, or raise the limit"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    plain = save_tiny_checkpoint(folder / "plain", "qwen3_moe")
    tandem.pack(plain, folder / "packed", expert_dtype="int8")
    return folder


@pytest.mark.parametrize("num_threads", [0, 4, 11])
@pytest.mark.parametrize(
    "words",
    [("packed",), ("packed", "--expert-memory", "1MB"), ("plain", "--expert-dtype", "int4")],
    ids=["packed", "disk", "plain"],
)
def test_threads_that_run_out_while_a_model_loads_are_a_sentence(
    models: Path, words: tuple[str, ...], num_threads: int
) -> None:
    name, *options = words
    more = ("-p", "hello", "--max-new-tokens", "2", "--threads", "4", "--no-keep", *options)
    done = python(RUN, str(num_threads), "run", str(models / name), *more, imports=WARM)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 2), done.stderr
    assert (MESSAGE in done.stderr) == (done.returncode == 2), done.stderr


def test_threads_that_compute_and_do_not_start_are_a_sentence() -> None:
    done = python(
        LIMITED + "from tandem.core.errors import CapacityError\n"
        "from tandem.kernels.engine import start_engine\n"
        "limit(5)\n"
        "try:\n    start_engine(num_threads=64)\n"
        "except CapacityError as error:\n    print(error)\n",
        imports=WARM,
    )
    assert done.returncode == 0, done.stderr
    assert "only 6 of 64 compute threads can be started" in done.stdout


def test_weights_are_packed_by_the_threads_that_there_are() -> None:
    done = python(
        LIMITED + "from tandem.kernels.formats.packed import pack\n"
        "from tandem.kernels.formats.weight_format import find_format\n"
        "weight, fmt = torch.randn(2048, 2048), find_format('int8')\n"
        "right = pack(weight, fmt)\n"
        "torch.get_num_threads = lambda: 64  # torch's own threads stay one\n"
        "limit(5)\n"
        "print(torch.equal(pack(weight, fmt).data, right.data))\n",
        imports=WARM,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "no more memory"),
        (RuntimeError("can't start new thread"), "cannot start more threads"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), "no more memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no more memory"),
        (ImportError("lib.so: failed to map segment from shared object"), "no more memory"),
    ],
)
def test_what_libraries_say_of_memory_and_threads_is_a_sentence(
    error: Exception, message: str
) -> None:
    with pytest.raises(CapacityError, match=message), capacity_errors():
        raise error


@pytest.mark.parametrize(
    "error",
    [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), RuntimeError("a defect")],
)
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error.args[-1])), capacity_errors():
        raise error


def test_a_server_hears_of_threads_that_run_out() -> None:
    def load() -> tuple[PreTrainedModel, Tokenizer]:
        raise RuntimeError("can't start new thread")

    ours, theirs = Pipe()
    with pytest.raises(SystemExit):
        run_engine(load, EngineSettings(max_running=1, part_tokens=16), theirs)
    assert "cannot start more threads; end other programs" in ours.recv().message
