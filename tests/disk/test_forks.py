"""Tests of a forked process with a model over a disk: it reports an error; the parent goes on."""

import gc
import os
import signal
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.core.errors import TandemError
from tests.disk.loading import ids, slots_of, with_share
from tests.disk.test_row_reader import read, table
from tests.programs import python

MESSAGE = "was forked from the one that loaded the model"


def result_in_a_fork(work: Callable[[], object]) -> str:
    """Return the result of a function in a forked process; empty if it had to be killed."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            work()
            os.write(writing, b"done")
        except TandemError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        output = pipe.read()
    os.waitpid(child, 0)
    return output


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 60])
def test_a_fork_of_a_model_over_a_disk_says_so_and_the_model_goes_on(
    packed: Path, in_memory: Any, share: float, count: int
) -> None:
    model = with_share(packed, share)
    native = slots_of(model).native
    with torch.inference_mode():
        model(ids(count))
        assert MESSAGE in result_in_a_fork(lambda: model(ids(count)))
        assert torch.equal(model(ids(count)).logits, in_memory(ids(count)).logits)
    assert MESSAGE in result_in_a_fork(lambda: tandem.Generator(model).generate([5, 6, 7]))
    for one in (native.counts, lambda: native.hold(0, 0), lambda: native.resident(0)):
        assert MESSAGE in result_in_a_fork(one)


def test_a_fork_says_so_whatever_threads_torch_has(packed: Path) -> None:
    done = python(
        "import os, sys, signal\n"
        "from tests.disk.loading import *\n"
        "torch.set_num_threads(2)\n"
        "model = with_share(Path(sys.argv[1]), 0.3, threads=4)\n"
        "square = torch.randn(512, 512)\n"
        "with torch.inference_mode():\n"
        "    model(ids(60)), square @ square\n"
        "    child = os.fork()\n"
        "    if child:\n"
        "        print(os.waitpid(child, 0)[1])\n"
        "        sys.exit()\n"
        "    signal.alarm(60)\n"
        "    try:\n"
        "        model(ids(60))\n"
        "    except tandem.core.errors.ModelError as error:\n"
        "        print(error)\n",  # and it ends normally, without the threads
        str(packed),
    )
    assert done.returncode == 0, done.stderr
    assert MESSAGE in done.stdout
    assert done.stdout.splitlines()[-1] == "0", done.stderr


@pytest.mark.parametrize("options", [{}, {"expert_memory": "1GB"}], ids=["memory", "disk"])
def test_a_model_ends_in_a_fork(packed: Path, options: dict[str, Any]) -> None:
    models = [tandem.load(packed, threads=4, **options)]
    reference = weakref.ref(models[0])
    with torch.inference_mode():
        models[0](ids(9))

    def end() -> None:
        models.clear()
        gc.collect()
        assert reference() is None

    assert result_in_a_fork(end) == "done"
    with torch.inference_mode():
        models[0](ids(9))


def test_rows_are_not_read_in_a_fork(tmp_path: Path) -> None:
    rows = torch.randint(0, 256, (300, 64), dtype=torch.uint8)
    tables = table(tmp_path / "rows", rows)
    assert MESSAGE in result_in_a_fork(lambda: read(tables, rows, torch.arange(9)))
    assert result_in_a_fork(tables.close) == "done"
    assert torch.equal(read(tables, rows, torch.arange(9)), rows[:9])
