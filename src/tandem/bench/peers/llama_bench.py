"""A program that takes llama-bench's options: llama.cpp's own, or that of a fork."""

import argparse
import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tandem.bench.peers.setting import Setting, Speeds


def parse_rival(text: str) -> tuple[str, list[str]]:
    """Read `NAME=PROGRAM ARGUMENTS`; returns the name and the command."""
    name, _, command = text.partition("=")
    words = shlex.split(command)
    if not name or not words or not Path(words[0]).is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} does not name a program; write NAME=PATH_TO_LLAMA_BENCH"
        )
    return name, words


class LlamaBench:
    """Runs the program for each measurement; the file stays in the page cache."""

    def __init__(self, command: Sequence[str], setting: Setting) -> None:
        """Take the program and what it is always given."""
        self._command, self._setting = list(command), setting

    def measure(self, depth: int) -> Speeds:
        """Return what it reports of a prompt and of a few tokens behind `depth` others."""
        setting = self._setting
        words = [
            *self._command, "-m", str(setting.gguf), "-t", str(setting.threads), "-r", "1",
            "-p", str(setting.prompt), "-n", str(setting.steps), "-o", "json",
            *(["-d", str(depth)] if depth else []),  # which older ones do not know
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"{self._command[0]} ended with {done.returncode}: {done.stderr[-500:]}")
        rows = json.loads(done.stdout)
        prefill = [row["avg_ts"] for row in rows if row["n_gen"] == 0]
        decode = [row["avg_ts"] for row in rows if row["n_prompt"] == 0]
        if not prefill or not decode:
            raise OSError(f"{self._command[0]} reports no prompt or no generation")
        return Speeds(prefill[0], decode[0], 0.0, 0.0)
