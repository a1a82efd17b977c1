"""One line of `tandem doctor`."""

from dataclasses import dataclass
from typing import Literal

State = Literal["good", "slow", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    found: str
    remedy: str = ""
