"""Conversion between numbers and quantities as people write them: "8GiB", "300MB", "4GB/s"."""

import re

from tandem.core.errors import ConfigError

_POWERS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_BYTES = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)


def parse_bytes(text: str | int, *, name: str = "size") -> int:
    """Parse "8GiB", "300MB", "1.5g" or a plain number of bytes; negative sizes are refused."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _BYTES.fullmatch(str(text))
    if match is None:
        raise ConfigError(f"{name} is {text!r}; expected a size such as 8GiB, 300MB or 1000000")
    return int(float(match[1]) * _POWERS[(match[2] or "").lower()])


def parse_bandwidth(text: str | float, *, name: str = "bandwidth") -> float:
    """Parse "4GB/s" (or a number of bytes per second) to bytes per second; must be positive."""
    if isinstance(text, int | float):
        rate = float(text)
    else:
        try:
            rate = float(parse_bytes(re.sub(r"(?i)(/s|ps)\s*$", "", text), name=name))
        except ConfigError:
            raise ConfigError(f"{name} is {text!r}; expected a rate such as 16GB/s") from None
    if not rate > 0:
        raise ConfigError(f"{name} is {text!r}; expected a positive rate such as 16GB/s")
    return rate


def format_bytes(count: float) -> str:
    """Format a byte count with three digits in binary units: "1.58 GiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
