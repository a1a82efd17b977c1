"""Tandem and llama.cpp on the same shape with random weights, in turn.

    python -m benchmarks.generation.against_llama_cpp --layers 4 --vocabulary 32000
    python -m benchmarks.generation.against_llama_cpp --shape qwen3.6-35b-a3b --layers 8
    python -m benchmarks.generation.against_llama_cpp --layers 48 --one-at-a-time --rounds 1

Each system is a process of its own, which stands still while the other is timed. A model of which
two do not fit into memory is measured `--one-at-a-time`. The file for llama.cpp is kept in
`--directory` and used again. Needs the packages gguf and llama-cpp-python.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import gettempdir

from benchmarks.generation.gguf_file import SHAPES, write_random_gguf
from benchmarks.generation.systems import SYSTEMS, Setting, Speeds

from tandem.bench.model_shapes import find_shape
from tandem.kernels.cpu import detect_cpu

_READY_SECONDS = 600
_MEASURE_SECONDS = 600


class SystemProcess:
    """One system in a process that stands still but while it is asked."""

    def __init__(self, name: str, setting: Setting) -> None:
        """Start it and wait until its model is in memory."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, setting), daemon=True)
        self._process.start()
        theirs.close()
        self._receive(_READY_SECONDS)
        self._signal(signal.SIGSTOP)

    def measure(self, depth: int) -> Speeds:
        """Return the speeds at a depth."""
        self._signal(signal.SIGCONT)
        self._connection.send(depth)
        speeds = self._receive(_MEASURE_SECONDS)
        self._signal(signal.SIGSTOP)
        assert isinstance(speeds, Speeds)
        return speeds

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _receive(self, seconds: float) -> object:
        if not self._connection.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        found = self._connection.recv()
        if isinstance(found, str):
            raise OSError(found)
        return found


def _serve(connection: Connection, name: str, setting: Setting) -> None:
    """Answer until the process is ended."""
    try:
        system = SYSTEMS[name](setting)
        connection.send(True)
        while True:
            connection.send(system.measure(connection.recv()))
    except EOFError:
        return
    except Exception as error:  # whatever a system raises is reported by the other side
        connection.send(f"{name}: {type(error).__name__}: {error}")


@contextmanager
def running(names: list[str], setting: Setting) -> Iterator[dict[str, SystemProcess]]:
    """Start systems; end them afterwards."""
    processes: dict[str, SystemProcess] = {}
    try:
        for name in names:
            processes[name] = SystemProcess(name, setting)
        yield processes
    finally:
        for process in processes.values():
            process.close()


def measure_rounds(
    groups: list[list[str]], setting: Setting, depths: list[int], rounds: int
) -> dict[str, dict[int, list[Speeds]]]:
    """Measure the systems of each group in turn, depth by depth."""
    found: dict[str, dict[int, list[Speeds]]] = {}
    for names in groups:
        with running(names, setting) as processes:
            found |= {name: {depth: [] for depth in depths} for name in names}
            for depth, _, name in itertools.product(depths, range(rounds), names):
                speeds = processes[name].measure(depth)
                found[name][depth].append(speeds)
                print(f"{name:10} depth {depth:6}: {line(speeds)}", flush=True)
    return found


def line(speeds: Speeds) -> str:
    """Return speeds for people."""
    text = f"prefill {speeds.prefill:7.1f} tok/s, decode {speeds.decode:6.1f} tok/s"
    if speeds.decode_ceiling:
        text += (
            f"  ({speeds.prefill / speeds.prefill_ceiling:.0%} and "
            f"{speeds.decode / speeds.decode_ceiling:.0%} of the ceilings)"
        )
    return text


def median(speeds: list[Speeds]) -> Speeds:
    """Return the median of each speed."""
    columns = zip(*(tuple(asdict(s).values()) for s in speeds), strict=True)
    return Speeds(*(statistics.median(column) for column in columns))


def main() -> None:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, help="default: the shape's own")
    parser.add_argument("--depth", type=int, nargs="+", default=[0])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=detect_cpu().num_threads)
    parser.add_argument("--expert-dtype", default="int4")
    parser.add_argument("--dense-dtype", default="int4")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--quantisation", default="Q4_0", help="of the GGUF: Q4_0, Q8_0, BF16")
    parser.add_argument("--flash-attention", action="store_true", help="llama.cpp's; slower here")
    parser.add_argument("--one-at-a-time", action="store_true")
    parser.add_argument("--only", choices=list(SYSTEMS))
    parser.add_argument("--directory", type=Path, default=Path(gettempdir()))
    options = parser.parse_args()
    vocabulary = options.vocabulary or find_shape(options.shape).values["vocab_size"]
    name = f"{options.shape}-{options.layers}-{vocabulary}-{options.quantisation}.gguf"
    setting = Setting(
        shape=options.shape, layers=options.layers, vocabulary=vocabulary, threads=options.threads,
        prompt=options.prompt, steps=options.steps, expert_dtype=options.expert_dtype,
        dense_dtype=options.dense_dtype, kv_dtype=options.kv_dtype,
        gguf=options.directory / name, has_flash_attention=options.flash_attention,
    )  # fmt: skip
    names = [options.only] if options.only else list(SYSTEMS)
    if "llama.cpp" in names and not setting.gguf.exists():
        partial = setting.gguf.with_suffix(".partial")
        shape = find_shape(setting.shape).sample(setting.layers)
        write_random_gguf(partial, shape, setting.vocabulary, options.quantisation)
        partial.replace(setting.gguf)
    groups = [[name] for name in names] if options.one_at_a_time else [names]
    found = measure_rounds(groups, setting, options.depth, options.rounds)
    report: list[dict[str, object]] = []
    for depth in options.depth:
        medians = {name: median(found[name][depth]) for name in names}
        for name, speeds in medians.items():
            report.append({"system": name, "depth": depth, **asdict(speeds)})
        if len(medians) == len(SYSTEMS):
            ours, theirs = medians["tandem"], medians["llama.cpp"]
            shares = [system.decode / ours.decode_ceiling for system in (ours, theirs)]
            print(
                f"depth {depth}: Tandem over llama.cpp: prefill "
                f"{ours.prefill / theirs.prefill:.2f}, decode {ours.decode / theirs.decode:.2f}; "
                f"decode, share of the ceiling: {shares[0]:.0%} and {shares[1]:.0%}"
            )
    print(json.dumps({"shape": options.shape, "layers": options.layers, "speeds": report}))


if __name__ == "__main__":
    main()
