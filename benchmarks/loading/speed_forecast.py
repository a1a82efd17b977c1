"""Compares `tandem plan`'s speed forecast for a packed checkpoint with a load.

    python -m benchmarks.loading.large_model write DIR
    python -m benchmarks.loading.speed_forecast DIR --pairs 3

Each pair is a new forecast and a load after it, in processes of their own. The memory's read rate
is measured before, between and after them: where a host's memory changes its speed from minute to
minute, a plain ratio says more about the host than about the forecast. "at equal memory speed" are
ratios of bytes, each side divided by its own minute's rate. The last line is JSON.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandem.bench.generation import measure_machine
from tandem.bench.kernels import KernelBench
from tandem.kernels.cpu import detect_cpu

# The forecast's name of a figure, the load's, and whether more of it is faster.
FIGURES = (
    ("decode_tokens_per_second", "decode_tokens_per_second", True),
    ("time_to_first_token_seconds", "prefill_seconds", False),
    ("first_time_to_first_token_seconds", "first_prefill_seconds", False),
    ("first_tokens_per_second", "first_tokens_per_second", True),
)


class Pair(NamedTuple):
    """A forecast, a load, and the memory's gigabytes per second around each."""

    forecast: dict[str, Any]
    load: dict[str, Any]
    gigabytes_during_forecast: float
    gigabytes_during_load: float

    def ratio(self, of_forecast: str, of_load: str, is_speed: bool) -> float:
        """Return how many times faster than the load the forecast is."""
        ratio = float(self.forecast[of_forecast]) / float(self.load[of_load])
        return ratio if is_speed else 1 / ratio

    @property
    def memory_ratio(self) -> float:
        """How many times faster the memory was during the forecast."""
        return self.gigabytes_during_forecast / self.gigabytes_during_load


def run_pair(directory: Path, tokens: int) -> Pair:
    """Forecast, load, and measure the memory around them."""
    before = _read_rate()
    plan = ["-m", "tandem.cli.main", "plan", str(directory), "--refresh", "--json"]
    forecast = _last_line(plan)
    if reason := forecast.get("speed_unknown"):
        raise SystemExit(f"tandem plan gives no speed for this model: {reason}")
    between = _read_rate()
    load = ["-m", "benchmarks.loading.large_model", "load", str(directory)]
    loaded = _last_line([*load, "--tokens", str(tokens), "--dense-dtype", "auto"])
    after = _read_rate()
    return Pair(forecast, loaded, (before + between) / 2, (between + after) / 2)


def _read_rate() -> float:
    """Return the memory's gigabytes per second; the buffer is freed afterwards."""
    bench = KernelBench(num_threads=detect_cpu().num_threads)
    return measure_machine(bench).read_gigabytes_per_second


def _last_line(arguments: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run pairs; print each, their medians, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    flags = parser.parse_args()
    pairs = []
    for number in range(flags.pairs):
        pair = run_pair(flags.directory, flags.tokens)
        pairs.append(pair)
        print(
            f"pair {number + 1}: memory {pair.gigabytes_during_forecast:.1f} GB/s during the "
            f"forecast, {pair.gigabytes_during_load:.1f} during the load"
        )
        for of_forecast, of_load, is_speed in FIGURES:
            ratio = pair.ratio(of_forecast, of_load, is_speed)
            print(
                f"  {of_forecast}: forecast {pair.forecast[of_forecast]:.2f}, load "
                f"{pair.load[of_load]:.2f}; {ratio:.2f} times as fast, "
                f"{ratio / pair.memory_ratio:.2f} at equal memory speed",
                flush=True,
            )
    print(json.dumps({"pairs": len(pairs)} | _medians(pairs)))


def _medians(pairs: Sequence[Pair]) -> dict[str, dict[str, float]]:
    """Return for each figure the medians of forecasts and loads, and of the ratios."""
    found = {}
    for of_forecast, of_load, is_speed in FIGURES:
        ratios = [pair.ratio(of_forecast, of_load, is_speed) for pair in pairs]
        equal = [r / pair.memory_ratio for r, pair in zip(ratios, pairs, strict=True)]
        found[of_forecast] = {
            "forecast": statistics.median(float(pair.forecast[of_forecast]) for pair in pairs),
            "load": statistics.median(float(pair.load[of_load]) for pair in pairs),
            "ratio": statistics.median(ratios),
            "ratio_at_equal_memory_speed": statistics.median(equal),
        }
    return found


if __name__ == "__main__":
    main()
