"""Answers requests over a disk with faults: `python -m benchmarks.disk.faults_worker JOB`.

Prints a line of JSON for each request. First all answers are computed in memory. Then the model is
loaded with slots for a third of its experts and answers again, with one fault after another and a
few requests without a fault in between, until the time is over and each fault has occurred.
"""

import contextlib
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `import tandem` sets it, here too late

import torch

import tandem
from tandem.checkpoint.packed import experts_file
from tandem.core.errors import TandemError
from tandem.hf.runtime import require_runtime

_CUT, _DAMAGED = -1, -2  # of a read, as csrc/disk/reader_pool.hpp numbers them
_EVERY = 61  # pieces of reads, of which one has the fault: some requests meet it, some do not
_DELAY_SECONDS = 0.02
_WITH_FAULT, _WITHOUT = 6, 3  # requests
_NEW_TOKENS = 12
# Prompts of each request: a step's, one with reads ahead, several sequences beside each other.
_REQUESTS = ((5,), (60,), (3, 20, 45), (33,))
_FILE_LAYER = 1  # whose file is replaced


class Fault(NamedTuple):
    """A temporary fault, and whether requests may fail because of it."""

    name: str
    apply: Callable[[], AbstractContextManager[None]]
    may_fail: bool


def main() -> None:
    """Run a job."""
    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    in_memory = tandem.Generator(tandem.load(folder))
    expected = [_answers(in_memory, n) for n in range(len(_REQUESTS))]
    generator = tandem.Generator(tandem.load(folder, expert_memory=job["expert_memory"]))
    slots = require_runtime(generator.model).host_slots
    assert slots is not None
    native, file = slots.native, folder / experts_file(_FILE_LAYER)
    end, number = time.monotonic() + job["seconds"], 0
    while True:
        for fault in faults(native, file):
            for is_there in (True, False):
                with fault.apply() if is_there else contextlib.nullcontext():
                    for _ in range(_WITH_FAULT if is_there else _WITHOUT):
                        outcome, message = _outcome(generator, number % len(_REQUESTS), expected)
                        number += 1
                        line = {
                            "fault": fault.name if is_there else "none",
                            "may_fail": is_there and fault.may_fail,
                            "outcome": outcome,
                            "said": message,
                            "resident": _num_resident(native, job["layers"]),
                        }
                        print(json.dumps(line), flush=True)
        if time.monotonic() > end:
            break
    os._exit(0)


def _answers(generator: tandem.Generator, number: int) -> list[Any]:
    """Return the tokens of a request's answers, and the bits of its last scores."""
    model = generator.model
    draw = torch.Generator().manual_seed(number)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [
        torch.randint(vocabulary, (count,), generator=draw).tolist() for count in _REQUESTS[number]
    ]
    found = generator.generate(prompts, max_new_tokens=_NEW_TOKENS, ignore_eos=True)
    with torch.inference_mode():
        scores = model(torch.tensor(prompts[:1])).logits[0, -1]
    return [answer.token_ids for answer in found] + [scores.tolist()]


def _num_resident(native: Any, num_layers: int) -> int:
    return sum(len(native.resident(layer)) for layer in range(num_layers))


def _outcome(
    generator: tandem.Generator, number: int, expected: list[list[Any]]
) -> tuple[str, str]:
    try:
        found = _answers(generator, number)
    except TandemError as error:
        text = str(error)
        return ("sentence" if text and "\n" not in text else "no sentence"), text
    except Exception as error:  # what a user must never see
        return "other error", repr(error)
    if found == expected[number]:
        return "right", ""
    return "wrong", f"request {number}: {_difference(found, expected[number])}"


def _difference(found: list[Any], expected: list[Any]) -> str:
    """Describe from where on answers differ, and by how much their scores do."""
    parts = []
    for row, (ours, right) in enumerate(zip(found[:-1], expected[:-1], strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(ours, right, strict=False)) if a != b), None)
        if ours != right:
            parts.append(f"answer {row} from token {at} on")
    most = max(abs(a - b) for a, b in zip(found[-1], expected[-1], strict=True))
    return ", ".join([*parts, f"scores by {most:.3g}"])


def faults(native: Any, file: Path) -> list[Fault]:
    """Return all faults, for some slots and one of the files that they read."""

    def reads(error: int, delay: float = 0.0) -> Callable[[], AbstractContextManager[None]]:
        return lambda: _bad_reads(native, error, delay)

    return [
        Fault("reads delayed", reads(0, _DELAY_SECONDS), may_fail=False),
        Fault("reads short", reads(_CUT), may_fail=True),
        Fault("reads failing", reads(errno.EIO), may_fail=True),
        Fault("bytes damaged", reads(_DAMAGED), may_fail=True),
        Fault("file replaced", lambda: _replaced(file), may_fail=False),
        Fault("file removed", lambda: _removed(file), may_fail=False),
        Fault("file overwritten", lambda: _changed(file, _overwrite), may_fail=True),
        Fault("file cut", lambda: _changed(file, _cut), may_fail=True),
    ]


@contextlib.contextmanager
def _bad_reads(native: Any, error: int, delay: float) -> Iterator[None]:
    native.fail(error, _EVERY, delay)
    try:
        yield
    finally:
        native.fail(0, 0, 0.0)


@contextlib.contextmanager
def _removed(file: Path) -> Iterator[None]:
    away = file.with_name("away")
    file.rename(away)
    try:
        yield
    finally:
        away.rename(file)


@contextlib.contextmanager
def _replaced(file: Path) -> Iterator[None]:
    with _removed(file):
        file.write_bytes(bytes(file.with_name("away").stat().st_size))
        yield


@contextlib.contextmanager
def _changed(file: Path, change: Callable[[Path], None]) -> Iterator[None]:
    """Change a file in place, and restore its bytes."""
    kept = file.with_name("kept")
    shutil.copyfile(file, kept)
    change(file)
    try:
        yield
    finally:
        with kept.open("rb") as source, file.open("r+b") as target:
            shutil.copyfileobj(source, target)
        kept.unlink()


def _overwrite(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size * 7 // 8)
        stream.write(bytes(file.stat().st_size // 8))


def _cut(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


if __name__ == "__main__":
    main()
