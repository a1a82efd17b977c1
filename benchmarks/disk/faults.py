"""Sends requests to a model over a failing disk: no token may be wrong, and nothing may hang.

    python -m benchmarks.disk.faults --minutes 30 [--json]

A tiny packed model with slots for a third of its experts answers prompts, short and long, alone and
concurrently. Its reads are delayed, short, failing, or return other bytes; its files are replaced,
removed, overwritten and truncated (`benchmarks.disk.faults_worker`). As root, its control group
repeatedly runs short of memory: `memory.high` is lowered 10 s before `memory.max` (version 1: its
limit, in steps), and both are raised again; slots release memory and take it back.

Each answer must be bit-identical, or one sentence about a present fault. The exit status is 1 for
anything else, for a fault that no request reports, for a minute and a half without an answer, and
for a process that the system kills. Each fault occurs at least once (--minutes 0).
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.disk.memory_group import MemoryGroup, limited

import tandem
from tandem.bench.model_shapes import ModelShape
from tandem.bench.random_model import build_random_model
from tandem.hf.config import OffloadConfig

_LAYERS, _EXPERTS = 6, 32
_SHAPE = ModelShape(
    "qwen3_moe",
    {
        "hidden_size": 256, "num_hidden_layers": _LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts": _EXPERTS,
        "num_experts_per_tok": 4, "moe_intermediate_size": 128, "intermediate_size": 512,
        "vocab_size": 512, "max_position_embeddings": 512,
    },
)  # fmt: skip
_SLOTS_SHARE = 0.33
_HANG_SECONDS = 90.0
_LOAD_SECONDS = 600.0  # until the first answer, on a busy machine
_AMPLE_BYTES = 4 << 30
_LEFT_BYTES = 256 << 20  # beside what is used, when memory is short
# Of a period: how long there is plenty, the warning before the limit, how long it stays.
_AMPLE_SECONDS, _AHEAD_SECONDS, _SHORT_SECONDS = 12.0, 10.0, 8.0
_STEPS = 5

Lines = Sequence[Mapping[str, Any]]


class MemorySchedule:
    """Alternates between short and ample memory in a control group."""

    def __init__(self, group: MemoryGroup | None) -> None:
        """Start with ample memory; None: do nothing."""
        self._group = group
        self._begin: float | None = None
        self._low = _AMPLE_BYTES
        self.num_short = 0
        """How often memory ran short."""

    def advance(self, now: float) -> None:
        """Set the present limits; call it once at the beginning."""
        if self._group is None:
            return
        self._begin = now if self._begin is None else self._begin
        at = now - self._begin - _AMPLE_SECONDS
        if at < 0:
            return
        if self._low == _AMPLE_BYTES:
            self._low = self._group.used_bytes() + _LEFT_BYTES
        if at < _AHEAD_SECONDS:
            self._group.lower(self._low, _AMPLE_BYTES, at / _AHEAD_SECONDS, steps=_STEPS)
        elif at < _AHEAD_SECONDS + _SHORT_SECONDS:
            self._group.lower(self._low, _AMPLE_BYTES, 1.0, steps=_STEPS)
        else:
            self._group.raise_to(_AMPLE_BYTES)
            self._begin, self._low = now, _AMPLE_BYTES
            self.num_short += 1


def make_model(folder: Path) -> tuple[Path, str]:
    """Pack a random model; return its path, and the memory for its experts."""
    model = build_random_model(_SHAPE, OffloadConfig(expert_dtype="int8"), dense_dtype="none")
    packed = tandem.save(model, folder / "packed")
    sizes = [f.stat().st_size for f in packed.glob("tandem-experts-*.safetensors")]
    slot = max(sizes) // _EXPERTS
    shared = (min(32, _EXPERTS) + 4) * slot
    return packed, str(int(shared + _SLOTS_SHARE * sum(sizes)))


@contextmanager
def memory_group() -> Iterator[MemoryGroup | None]:
    """Create a group with ample memory; None, with a printed line, if that is not allowed."""
    try:
        with limited(_AMPLE_BYTES if os.geteuid() == 0 else None) as group:
            if group is None:
                print("memory stays ample: control groups are made by root", file=sys.stderr)
            yield group
    except OSError as error:
        if not isinstance(error, PermissionError):
            raise
        print(f"memory stays ample: no control group here ({error})", file=sys.stderr)
        yield None


def answers_of(
    job: Mapping[str, Any], group: MemoryGroup | None, schedule: MemorySchedule
) -> tuple[list[dict[str, Any]], str]:
    """Run the worker; return its report of each request, and its exit status."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.disk.faults_worker", json.dumps(job)],
        stdout=subprocess.PIPE, text=True, preexec_fn=None if group is None else group.enter,
    )  # fmt: skip
    lines_read: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process, lines_read), daemon=True).start()
    lines: list[dict[str, Any]] = []
    alive = time.monotonic()
    while True:
        if lines:  # loading takes more than what is used so far
            schedule.advance(time.monotonic())
        with suppress(queue.Empty):
            line = lines_read.get(timeout=0.5)
            alive = time.monotonic()
            if line is None:
                break
            lines.append(json.loads(line))
        patience = _HANG_SECONDS if lines else _LOAD_SECONDS
        if time.monotonic() - alive > patience:
            process.kill()
            process.wait()
            return lines, f"hung: no answer for {patience:.0f} s"
    code = process.wait()
    return lines, "" if code == 0 else f"ended with {code}"


def _read(process: "subprocess.Popen[str]", lines_read: "queue.SimpleQueue[str | None]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines_read.put(line)
    lines_read.put(None)


def failures(lines: Lines, end: str, kills: int) -> list[str]:
    """Return the violations, one sentence each."""
    found = [end] if end else []
    if kills:
        found.append(f"the system killed {kills} processes for memory")
    for line in lines:
        is_allowed = line["outcome"] == "right" or (
            line["outcome"] == "sentence" and line["may_fail"]
        )
        if not is_allowed:
            found.append(f"{line['outcome']} while {line['fault']}: {line['said']}")
    reported = {line["fault"] for line in lines if line["outcome"] == "sentence"}
    unreported = {line["fault"] for line in lines if line["may_fail"]} - reported
    return found + [f"no request has heard of: {fault}" for fault in sorted(unreported)]


def table(lines: Lines) -> list[str]:
    """Return a table row for each fault."""
    rows = ["| fault | requests | right | a sentence | message |", "|---|---|---|---|---|"]
    for fault in dict.fromkeys(line["fault"] for line in lines):
        own = [line for line in lines if line["fault"] == fault]
        counts = Counter(line["outcome"] for line in own)
        message = next((line["said"] for line in own if line["said"]), "")
        rows.append(
            f"| {fault} | {len(own)} | {counts['right']} | {counts['sentence']} | {message} |"
        )
    return rows


def main() -> int:
    """Run, print, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--folder", type=Path, help="on the disk to be used")
    parser.add_argument("--json", action="store_true", help="last line: one JSON document")
    options = parser.parse_args()
    with TemporaryDirectory(dir=options.folder, prefix="tandem-faults-") as folder:
        packed, memory = make_model(Path(folder))
        job = {
            "folder": str(packed), "expert_memory": memory, "layers": _LAYERS,
            "seconds": 60 * options.minutes,
        }  # fmt: skip
        with memory_group() as group:
            schedule = MemorySchedule(group)
            lines, end = answers_of(job, group, schedule)
            kills = 0 if group is None else group.kills()
    bad = failures(lines, end, kills)
    resident = [line["resident"] for line in lines] or [0]
    print("\n".join(table(lines)))
    print(
        f"{len(lines)} requests, memory was short {schedule.num_short} times; slots held "
        f"{min(resident)} to {max(resident)} of {_LAYERS * _EXPERTS} experts"
    )
    for sentence in bad:
        print(f"FAILED: {sentence}")
    if options.json:
        outcomes = Counter(line["outcome"] for line in lines)
        print(json.dumps({"outcomes": outcomes, "times_short": schedule.num_short, "failed": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
