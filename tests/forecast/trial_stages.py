"""Stages that end in every way; a child process imports them, so they do not import torch."""

import os
import time
from pathlib import Path

from tandem.forecast.report.stages import NotHereError, Said


def works() -> Said:
    return Said("all is well", {"speed": 2.0})


def raises() -> Said:
    raise ValueError(f"no good in {Path.home()}\nsecond line")


def is_not_here() -> Said:
    raise NotHereError("there is none")


def crashes() -> Said:
    os.abort()


def hangs() -> Said:
    time.sleep(600)
    return Said("")


def tells_its_number(path: str) -> Said:
    whole = Path(path + ".part")
    whole.write_text(str(os.getpid()))
    whole.rename(path)
    return hangs()
