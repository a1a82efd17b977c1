"""Runs a program with llama-bench's options: llama.cpp's llama-bench, or that of a fork."""

import argparse
import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tandem.bench.peers.setting import Setting, Speeds


def parse_rival(text: str) -> tuple[str, list[str]]:
    """Parse `NAME=PROGRAM ARGUMENTS`; return the name and the command's words.

    Raises `ArgumentTypeError` if `PROGRAM` is not a file.
    """
    name, _, command = text.partition("=")
    words = shlex.split(command)
    if not name or not words or not Path(words[0]).is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} does not name a program; write NAME=PATH_TO_LLAMA_BENCH"
        )
    return name, words


class LlamaBench:
    """Runs a program like llama-bench once for each measurement.

    The model file stays in the page cache.
    """

    def __init__(self, command: Sequence[str], setting: Setting) -> None:
        """Store the program and the options of every measurement."""
        self._command, self._setting = list(command), setting

    def measure(self, depth: int) -> Speeds:
        """Return the program's speeds for a prompt and for decoding, both after `depth` tokens."""
        setting = self._setting
        words = [
            *self._command, "-m", str(setting.gguf), "-t", str(setting.threads), "-r", "1",
            "-p", str(setting.prompt), "-n", str(setting.steps), "-o", "json",
            *(["-d", str(depth)] if depth else []),  # older versions do not know -d
        ]  # fmt: skip
        done = subprocess.run(
            words, capture_output=True, text=True, errors="backslashreplace", check=False
        )
        if done.returncode != 0:
            last = done.stderr[-500:].strip() or "it wrote nothing to standard error"
            raise OSError(f"{self._command[0]} ended with {done.returncode}: {last}")
        try:
            rows = json.loads(done.stdout)
            prefill = next(float(row["avg_ts"]) for row in rows if row["n_gen"] == 0)
            decode = next(float(row["avg_ts"]) for row in rows if row["n_prompt"] == 0)
        except (ValueError, KeyError, TypeError, RecursionError, StopIteration):
            raise OSError(
                f"{self._command[0]} reports no prompt and generation: it wrote "
                f"{done.stdout[:60]!r}; expected llama-bench's JSON (-o json)"
            ) from None
        return Speeds(prefill, decode, 0.0, 0.0)
