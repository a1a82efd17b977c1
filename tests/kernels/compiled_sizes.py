"""What every Triton kernel takes of every GPU that is supported: prints a table (some minutes).

    python -m tests.kernels.compiled_sizes

All cases for all processors, where the tests give each case to one of them by turns.
"""

import json
import subprocess
import sys
from typing import Any

from tests.kernels.compile_triton import CASES
from tests.kernels.test_triton import SHARED_KIB

GPUS = (75, 80, 86, 89, 90, 120)


def compiled(*arguments: object) -> list[dict[str, Any]]:
    """Return what the compiler says, in a process of its own."""
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return [result for result in found if "kernel" in result]


def main() -> None:
    """Compile and print."""
    print("| compute capability | kernels | shared memory, most | of a card's | with spills |")
    print("|---|---|---|---|---|")
    for gpu in GPUS:
        found = compiled("tests.kernels.compile_triton", gpu, len(CASES))
        steps = compiled("tests.kernels.compile_triton_steps", gpu)
        found += steps
        most = max(result["shared_bytes"] for result in found) / 1024
        spilled = sum(result["spilled_bytes"] > 0 for result in found)
        limit = SHARED_KIB[gpu]
        print(
            f"| {gpu / 10} | {len(found)} | {most:.0f} KiB | {limit} KiB | {spilled} |", flush=True
        )


if __name__ == "__main__":
    main()
