"""Restarts the fuzzer's child process until it has tried enough; exits with 1 on a finding."""

import argparse
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

KINDS = (
    "safetensors", "index", "config", "generation", "packed", "packed_index", "quantised", "gguf",
    "tokenizer", "tokenizer_config",
)  # fmt: skip
_OUT = Path("build/fuzz")
_SECONDS_EACH = 600  # for one input that waits; one that computes gets far less
# libFuzzer checks the system's peak memory, which a process inherits from its parent: a test
# run's may be larger than any limit here. The child limits the memory of each input itself.
_NO_LIMITS = ("-rss_limit_mb=0", "-malloc_limit_mb=0")


def fuzz(out: Path, kind: str, count: int, *, seed: int = 1, seconds: float = 0) -> Counter[str]:
    """Try `count` damaged files, or as many as `seconds` allow; return the answers by kind.

    Inputs that crash, hang or raise anything but a one-sentence error are written to `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    answers: Counter[str] = Counter()
    begin = time.monotonic()
    while (left := count - answers.total()) > 0:
        spent = time.monotonic() - begin
        if seconds and spent >= seconds:
            break
        # Two runs are libFuzzer's own: an empty input, and the undamaged file.
        limits = [f"-runs={left + 2}", f"-seed={seed}", f"-timeout={_SECONDS_EACH}"]
        if seconds:
            limits.append(f"-max_total_time={int(seconds - spent) + 1}")
        limits += [*_NO_LIMITS, f"-artifact_prefix={out}/"]
        report = out / f"{kind}.answers"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.fuzz.child", kind, str(out), *limits]
        with (out / f"{kind}.log").open("w") as log:
            status = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        if not report.exists():
            raise RuntimeError(f"the fuzzer did not start; see {out / kind}.log")
        for line in report.read_text().splitlines():
            number, _, answer = line.partition(" ")
            answers[answer] += int(number)
        if status:
            answers[f"{kind} found a process that ended with {status}"] += 1
            shutil.copy(out / "last", out / f"{kind}-end-{answers.total()}")
        seed += 1
        for left_over in out.glob("fuzz-*"):
            shutil.rmtree(left_over, ignore_errors=True)
    return answers


def main() -> int:
    """Fuzz one kind of file, or each in turn."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("kind", nargs="?", choices=("all", *KINDS))
    parser.add_argument("--count", type=int, default=10_000, help="damaged files of each kind")
    parser.add_argument("--seconds", type=float, default=0, help="of each kind, at most")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    finds = 0
    for kind in (options.kind,) if options.kind else KINDS:
        answers = fuzz(_OUT / kind, kind, options.count, seed=options.seed, seconds=options.seconds)
        for answer, number in sorted(answers.items()):
            print(number, answer)
            finds += number if " found " in answer else 0
    print(f"{finds} of them are no sentence" + (f"; see {_OUT}" if finds else ""))
    return int(finds > 0)


if __name__ == "__main__":
    sys.exit(main())
