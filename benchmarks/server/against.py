"""`tandem serve` and llama-server behind one GGUF, by turns, driven by guidellm.

    python -m benchmarks.server.against --llama-server build/llama.cpp/bin/llama-server
    python -m benchmarks.server.against --layers 48 --at-once 1 4 8 --prompt-tokens 128
    python -m benchmarks.server.against --file ~/.cache/tandem/models/NAME.gguf --kind agent
    python -m benchmarks.server.against --rival "ollama=ollama-like {file} {port}"

Without `--file`, writes a GGUF of `--shape` with random weights and one token per byte, so that a
prompt has as many tokens as characters. Both servers get the same number of threads, and room for
all requests of `--at-once`. They never run at the same time; each answers one request before it is
measured. A ratio is the median over rounds, in each of which both servers take a turn.
`--kind shared`: prompts share their first half; `agent`: each prompt continues the one before.

guidellm has an environment of its own:

    python3 -m venv build/guidellm && build/guidellm/bin/pip install torch==2.13.0 guidellm

llama-server is built from the source of llama-cpp-python (its `vendor/llama.cpp`), without AMX,
with which experts crash it; leave out what your processor lacks:

    cmake -S llama.cpp -B build/llama.cpp -DLLAMA_BUILD_SERVER=ON -DLLAMA_CURL=OFF \\
      -DLLAMA_OPENSSL=OFF -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON \\
      -DGGML_BMI2=ON -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON -DGGML_AVX512_VNNI=ON \\
      -DGGML_AVX512_BF16=ON
    cmake --build build/llama.cpp --target llama-server
"""

import argparse
import contextlib
import itertools
import json
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.generation.gguf_file import SHAPES, random_gguf

_FILE = Path(__file__).parents[2] / "tests/data/wikitext_4096.txt"
# A token a character: a space would be three, and this name a token of its own in one server alone.
_TEXT = _FILE.read_bytes().decode("ascii", "ignore").replace(" ", "_").replace("<unk>", "unk")
_PATIENCE_SECONDS = 600
_SLACK_TOKENS = 64  # what a server puts around a prompt
_TANDEM = "tandem"
_LLAMA_SERVER = "llama-server"
# What guidellm calls a figure, what we call it, and by what its unit is divided.
_FIGURES = {
    "time_to_first_token_ms": ("first_token_seconds", 1e3),
    "inter_token_latency_ms": ("seconds_between_tokens", 1e3),
}


@dataclass(frozen=True)
class Cell:
    """A number of concurrent requests of one size."""

    kind: str
    at_once: int
    prompt_tokens: int
    output_tokens: int
    requests: int

    @property
    def context(self) -> int:
        """The tokens that a request may take."""
        return self.prompt_tokens + self.output_tokens + _SLACK_TOKENS


def prompts(cell: Cell, seed: int) -> list[str]:
    """Return the requests' texts; other seeds give other texts."""
    text = itertools.cycle(_TEXT)
    for _ in range(seed * 7919 % len(_TEXT)):
        next(text)
    length = cell.prompt_tokens
    if cell.kind == "agent":
        whole = f"{seed:08d}" + "".join(itertools.islice(text, length))
        return [whole[: length * (n + 1) // cell.requests] for n in range(cell.requests)]
    beginning = "".join(itertools.islice(text, length // 2)) if cell.kind == "shared" else ""
    each = length - len(beginning) - 8
    return [
        f"{beginning}{seed * 1000 + n:08d}" + "".join(itertools.islice(text, max(0, each)))
        for n in range(cell.requests)
    ]


def command_of(name: str, words: list[str], options: argparse.Namespace, port: int) -> list[str]:
    """Return the command of a server with room for the largest cell."""
    most = max(options.at_once)
    context = max(cell.context for cell in cells(options))
    if name == _TANDEM:
        return [
            sys.executable, "-m", "tandem.cli.main", "serve", str(options.file), "--no-keep",
            "--port", str(port), "--threads", str(options.threads),
            "--max-running", str(most), "--max-waiting", "1024", *options.tandem_flags,
        ]  # fmt: skip
    if name == _LLAMA_SERVER:
        return [
            *words, "-m", str(options.file), "--port", str(port), "--host", "127.0.0.1",
            "-t", str(options.threads), "-np", str(most), "-c", str(context * most),
        ]  # fmt: skip
    values = {"file": str(options.file), "port": str(port)}
    return [word.format(**values) for word in words]


def unused_port() -> int:
    """Return a port that no program uses now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[tuple[str, int]]:
    """Start a server; yield its address and process id once it has answered a request."""
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end = time.monotonic() + _PATIENCE_SECONDS
            while not _answers(address):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    log_end = log.read().decode(errors="replace")[-2000:]
                    sys.exit(f"{shlex.join(command)} does not answer:\n{log_end}")
                time.sleep(0.5)
            yield address, process.pid
        finally:
            process.terminate()
            process.wait(_PATIENCE_SECONDS)


def _answers(address: str) -> bool:
    body = json.dumps({"prompt": "Hello", "max_tokens": 4, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urlopen(Request(f"{address}/v1/completions", body, headers), timeout=60) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):  # not yet
        return False


def memory_bytes(process: int) -> int:
    """Return the memory of a process and its children; shared pages count once (Pss)."""
    total, waiting = 0, [process]
    while waiting:
        number = waiting.pop()
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{number}/smaps_rollup").read_text(encoding="ascii").splitlines()
            total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
            for task in Path(f"/proc/{number}/task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="ascii").split())
    return total


def measure(generator: str, address: str, cell: Cell, seed: int, folder: Path) -> dict[str, Any]:
    """Let guidellm send a cell's requests; return its figures."""
    sent, output = folder / "requests.jsonl", folder / "output.json"
    lines = [
        json.dumps({"prompt": prompt, "output_tokens_count": cell.output_tokens})
        for prompt in prompts(cell, seed)
    ]
    sent.write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = subprocess.run(
        [
            generator, "run", "--disable-console",
            "--backend", f"kind=openai_http,target={address},request_format=/v1/completions",
            "--profile", f"kind=concurrent,streams={cell.at_once}",
            "--constraint", f"kind=max_requests,count={cell.requests}",
            "--data", f"kind=json_file,path={sent}", "--output", f"kind=json,path={output}",
        ],
        capture_output=True, text=True, check=False,
        env={"HF_HUB_OFFLINE": "1", "HOME": str(folder)},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{generator} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return figures(json.loads(output.read_text(encoding="utf-8"))["benchmarks"][0], cell)


def figures(found: dict[str, Any], cell: Cell) -> dict[str, Any]:
    """Return the selected figures of guidellm's report on a cell.

    "between tokens" is guidellm's inter-token latency: a mean per request.
    """
    totals = found["metrics"]["request_totals"]
    if totals["successful"] != cell.requests:
        sys.exit(f"of {cell.requests} requests {totals['successful']} were answered: {totals}")
    scheduled = found["scheduler_metrics"]
    seconds = scheduled["measure_end_time"] - scheduled["measure_start_time"]
    metrics = found["metrics"]
    prompt_tokens = metrics["prompt_token_count"]["successful"]["total_sum"]
    output_tokens = metrics["output_token_count"]["successful"]["total_sum"]
    kept: dict[str, Any] = {
        "output_tokens_per_second": output_tokens / seconds,
        "prompt_tokens_per_second": prompt_tokens / seconds,
        # Of all streams, while they are generated, without prompts.
        "decode_tokens_per_second": cell.at_once
        * 1e3
        / metrics["inter_token_latency_ms"]["successful"]["mean"],
    }
    for name, (ours, divisor) in _FIGURES.items():
        percentiles = metrics[name]["successful"]["percentiles"]
        kept[ours] = {p: percentiles[p] / divisor for p in ("p50", "p95", "p99")}
    return kept


def cells(options: argparse.Namespace) -> list[Cell]:
    """Return the cells in the order of measurement."""
    return [
        Cell(options.kind, at_once, prompt, options.output_tokens,
             options.requests or max(4, 2 * at_once))
        for prompt in options.prompt_tokens
        for at_once in ([1] if options.kind == "agent" else options.at_once)
    ]  # fmt: skip


def one_round(
    servers: dict[str, list[str]], options: argparse.Namespace, number: int
) -> dict[str, list[dict[str, Any]]]:
    """Measure each server in turn; return their figures, a dictionary for each cell."""
    found: dict[str, list[dict[str, Any]]] = {}
    order = list(servers) if number % 2 == 0 else list(servers)[::-1]
    for name in order:
        port = unused_port()
        with (
            tempfile.TemporaryDirectory() as folder,
            running(command_of(name, servers[name], options, port), port) as (address, process),
        ):
            found[name] = []
            for place, cell in enumerate(cells(options)):
                seed = number * 100 + place + 1
                kept = measure(options.guidellm, address, cell, seed, Path(folder))
                kept["memory_bytes"] = memory_bytes(process)
                found[name].append(kept)
                print(f"round {number + 1}, {name}, {cell}: {brief(kept)}", file=sys.stderr)
    return found


def brief(kept: dict[str, Any]) -> str:
    """Return a cell's figures as a line."""
    first, between = kept["first_token_seconds"], kept["seconds_between_tokens"]
    return (
        f"{kept['output_tokens_per_second']:.1f} tok/s "
        f"({kept['decode_tokens_per_second']:.1f} while written), "
        f"first token {first['p50']:.2f} s (95th {first['p95']:.2f}), "
        f"between tokens {1e3 * between['p50']:.0f} ms (95th {1e3 * between['p95']:.0f}, "
        f"99th {1e3 * between['p99']:.0f}), {kept['memory_bytes'] / 2**30:.1f} GiB"
    )


def summary(rounds: list[dict[str, list[dict[str, Any]]]], options: argparse.Namespace) -> Any:
    """Return each cell with the servers' medians and Tandem's ratios to the others."""
    found = []
    for place, cell in enumerate(cells(options)):
        of = {name: [turn[name][place] for turn in rounds] for name in rounds[0]}
        ratios = {
            name: {
                "output": _ratio(of, name, lambda kept: kept["output_tokens_per_second"]),
                "decode": _ratio(of, name, lambda kept: kept["decode_tokens_per_second"]),
                "first_token_p95": _ratio(
                    of, name, lambda kept: kept["first_token_seconds"]["p95"]
                ),
            }
            for name in of
            if name != _TANDEM
        }
        found.append({**vars(cell), "turns": of, "tandem_over": ratios})
    return found


def _ratio(
    of: dict[str, list[dict[str, Any]]], name: str, figure: Callable[[dict[str, Any]], float]
) -> float:
    pairs = zip(of[_TANDEM], of[name], strict=True)
    return statistics.median(figure(ours) / figure(theirs) for ours, theirs in pairs)


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; exits with a message if a program is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a GGUF file; default: one of --shape is written")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--quantisation", default="Q4_K_M")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--kind", choices=("plain", "shared", "agent"), default="plain")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128])
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, help="a cell; default: two a stream, at least four")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--guidellm", default="build/guidellm/bin/guidellm", metavar="PROGRAM")
    parser.add_argument("--llama-server", default=_LLAMA_SERVER, metavar="PROGRAM [OPTION ...]")
    parser.add_argument(
        "--rival", action="append", default=[], metavar="NAME=COMMAND",
        help="another server in place of llama-server, with {file} and {port}",
    )  # fmt: skip
    parser.add_argument("--tandem-flags", type=shlex.split, default=[])
    options = parser.parse_args(arguments)
    if shutil.which(options.guidellm) is None:
        parser.error(f"{options.guidellm} is not here; --help says how to install guidellm")
    options.file = options.file or random_gguf(
        options.directory, options.shape, options.layers, options.vocabulary, options.quantisation
    )
    return options


def rivals(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the other servers' names and commands."""
    named = dict(rival.split("=", 1) for rival in options.rival)
    named = named or {_LLAMA_SERVER: options.llama_server}
    for name, command in named.items():
        if not command or shutil.which(shlex.split(command)[0]) is None:
            sys.exit(f"{name}: no program {command!r}; --help says how llama-server is built")
    return {name: shlex.split(command) for name, command in named.items()}


def main(arguments: list[str] | None = None) -> None:
    """Measure in turns; the last line is JSON."""
    options = read_options(arguments)
    servers = {_TANDEM: [], **rivals(options)}
    rounds = [one_round(servers, options, number) for number in range(options.rounds)]
    found = summary(rounds, options)
    for cell in found:
        for name, ratio in cell["tandem_over"].items():
            print(
                f"{cell['kind']}, {cell['prompt_tokens']} tokens, {cell['at_once']} at once, "
                f"over {name}: output {ratio['output']:.2f}, decode {ratio['decode']:.2f}, "
                f"first token (95th) {ratio['first_token_p95']:.2f}"
            )
    print(json.dumps({"file": options.file.name, "rounds": options.rounds, "cells": found}))


if __name__ == "__main__":
    main()
