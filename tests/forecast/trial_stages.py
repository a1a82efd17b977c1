"""Stages that end in every way; a child process imports them, so they do not import torch."""

import os
import time
from pathlib import Path

from tandem.forecast.report.stages import NotHereError, StageResult


def works() -> StageResult:
    return StageResult("all is well", {"speed": 2.0})


def raises() -> StageResult:
    raise ValueError(f"no good in {Path.home()}\nsecond line")


def is_not_here() -> StageResult:
    raise NotHereError("there is none")


def crashes() -> StageResult:
    os.abort()


def hangs() -> StageResult:
    time.sleep(600)
    return StageResult("")


def tells_its_number(path: str) -> StageResult:
    whole = Path(path + ".part")
    whole.write_text(str(os.getpid()))
    whole.rename(path)
    return hangs()
