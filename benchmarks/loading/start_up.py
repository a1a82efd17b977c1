"""The time of a start, from the command to the first token, beyond `import torch` alone.

    python -m benchmarks.loading.start_up [--rounds 5] [-- MODEL and flags of tandem run]

Both are whole processes, in turns. A first answer, which may convert and keep the model, is not
counted. The command's time ends with the first character of its answer. Byte code must have been
written, so PYTHONDONTWRITEBYTECODE must not be set. The last line is JSON: medians of all rounds;
processor time is of the whole process with an answer of eight tokens.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

PROMPT = ["-p", "Why is the sky blue?", "--max-new-tokens", "8", "--seed", "1", "--quiet"]


def main() -> None:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*", default=[], help="of tandem run")
    options = parser.parse_args()
    torch = [sys.executable, "-c", "import torch; print(1)"]
    run = [sys.executable, "-m", "tandem", "run", *options.flags, *PROMPT]
    if "PYTHONDONTWRITEBYTECODE" in os.environ:
        parser.error("PYTHONDONTWRITEBYTECODE is set: every start would compile all modules")
    until_first_output(run)
    taken = [(until_first_output(torch), until_first_output(run)) for _ in range(options.rounds)]
    for alone, command in taken:
        print("import torch {:.2f} s ({:.2f} s of processor time), ".format(*alone), end="")
        print("first token {:.2f} s ({:.2f} s in all)".format(*command))
    medians = [statistics.median(one[i][j] for one in taken) for i in (0, 1) for j in (0, 1)]
    names = (
        *("import_torch_seconds", "import_torch_processor_seconds"),
        *("first_token_seconds", "run_processor_seconds"),
    )
    over = statistics.median(command[0] - alone[0] for alone, command in taken)
    print(json.dumps(dict(zip(names, medians, strict=True)) | {"over_torch_seconds": over}))


def until_first_output(command: list[str]) -> tuple[float, float]:
    """Return the seconds until a process writes something, and its total processor time."""
    before = processor_seconds()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.read(1)
    seconds = time.perf_counter() - start
    process.stdout.read()
    if process.wait() != 0:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    return seconds, processor_seconds() - before


def processor_seconds() -> float:
    """Return the processor time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
