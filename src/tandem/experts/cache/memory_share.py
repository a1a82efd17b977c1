"""How much of a device's memory a user gives: a size, a fraction, or all that is free; no torch."""

import dataclasses

from tandem.core.errors import ConfigError
from tandem.core.units import parse_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryShare:
    """How much of a device Tandem may use; both None: what is free, less a margin."""

    num_bytes: int | None = None
    fraction: float | None = None


def parse_gpu_memory(value: object) -> MemoryShare:
    """Parse "8GiB", a number of bytes, "0.5" (a fraction of the device), "50%" or "auto"."""
    text = str(value).strip()
    if text == "auto":
        return MemoryShare()
    wanted = "expected a size such as 8GiB, a fraction such as 0.5, or auto"
    if isinstance(value, float) or _is_fraction(text):
        fraction = float(text.rstrip("%")) / (100.0 if text.endswith("%") else 1.0)
        if not 0.0 < fraction <= 1.0:
            raise ConfigError(f"gpu_memory is {value!r}; {wanted}")
        return MemoryShare(fraction=fraction)
    try:
        return MemoryShare(num_bytes=parse_bytes(text, name="gpu_memory"))
    except ConfigError:
        raise ConfigError(f"gpu_memory is {value!r}; {wanted}") from None


def _is_fraction(text: str) -> bool:
    number = text.rstrip("%")
    if not (text.endswith("%") or "." in text):
        return False
    try:
        float(number)
    except ValueError:
        return False
    return True
