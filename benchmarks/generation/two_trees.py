"""Two trees of Tandem in turns, each in its environment: start, prompt and decode of the demo.

    python -m benchmarks.generation.two_trees OLD NEW [--rounds 5] [--tokens 120]

Each tree runs `.venv/bin/tandem run` as a whole command. Prints medians, and the median of the new
tree's values over the old tree's, pair by pair.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

_TEXT = Path("src/tandem/demo/calibration.txt")
_WORDS = 700
_NAMES = ("seconds", "prefill_tokens_per_second", "decode_tokens_per_second")


def run(tree: Path, prompt: str, num_tokens: int) -> dict[str, float]:
    """Return a command's wall seconds, and the rates that it prints."""
    command = [str(tree / ".venv/bin/tandem"), "run", "demo", "-p", prompt, "--json",
               "--max-new-tokens", str(num_tokens), "--temperature", "0",
               "--speculate", "none"]  # fmt: skip
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - begin
    report = json.loads(done.stdout.splitlines()[-1])
    return {"seconds": seconds, **{name: report[name] for name in _NAMES[1:]}}


def main() -> int:
    """Run both in turns; the first round of each is not counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs=2, type=Path, metavar="TREE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=120)
    options = parser.parse_args()
    prompt = " ".join(_TEXT.read_text(encoding="utf-8").split()[:_WORDS])
    rounds = []
    for number in range(options.rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)  # who comes second is slower on some machines
        reports = {i: run(options.trees[i].absolute(), prompt, options.tokens) for i in order}
        rounds.append((reports[0], reports[1]))
    del rounds[0]
    for name in _NAMES:
        old, new = ([pair[i][name] for pair in rounds] for i in (0, 1))
        ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
        print(f"{name}: {statistics.median(old):.2f} and {statistics.median(new):.2f}, {ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
