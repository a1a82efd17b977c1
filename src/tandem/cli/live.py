"""`tandem run --live`: shows which experts an answer uses, where they are, and the answer's speed.

The panel is drawn in the last lines of a terminal, below the answer, with escape sequences that
every terminal knows. Each line shows some layers, and each cell some of their experts: the darker
the cell, the more its experts were used lately.
"""

import shutil
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from tandem.core.errors import ConfigError
from tandem.experts.tracing.cache_statistics import CacheStatistics, LayerCounts
from tandem.experts.tracing.events import LayerExecuted

if TYPE_CHECKING:
    from tandem.foreign_types import PreTrainedModel

_ROWS, _MOST_CELLS = 8, 64
_LEAST_LINES = 2 * _ROWS  # lines of a terminal
_SHADES = " .:-=+*#%@"
_KEPT = 0.9  # share of a use that is left at the layer's next call
_SECONDS_BETWEEN = 0.1  # between two drawings


def require_terminal(out: TextIO) -> None:
    """Raise `ConfigError` unless `out` is a terminal with room for the panel."""
    if not out.isatty() or shutil.get_terminal_size().lines < _LEAST_LINES:
        raise ConfigError(
            f"--live draws on a terminal of {_LEAST_LINES} lines or more, and standard error is no "
            "such terminal; leave --live out"
        )


class ExpertHeat:
    """Counts the experts' recent uses in the cells of a grid that fits the terminal."""

    def __init__(self, counts: dict[int, int], *, width: int) -> None:
        """Make a grid at most `width` cells wide; `counts` is each MoE layer's expert count."""
        self._layers = sorted(counts)
        self._counts = counts
        self._num_rows = min(_ROWS, len(self._layers))
        self._row_of = {
            layer: place * self._num_rows // len(self._layers)
            for place, layer in enumerate(self._layers)
        }
        self.width = min(width, _MOST_CELLS, max(counts.values(), default=1))
        self._heat = [[0.0] * self.width for _ in range(self._num_rows)]

    def __call__(self, event: LayerExecuted) -> None:
        """Count the experts that a layer used; earlier uses in the layer's line of cells fade."""
        if event.layer not in self._row_of:
            return
        row = self._heat[self._row_of[event.layer]]
        row[:] = [heat * _KEPT for heat in row]
        for expert in _experts_of(event):
            row[min(self.width - 1, expert * self.width // self._counts[event.layer])] += 1.0

    def lines(self) -> list[str]:
        """Return the lines of cells, each with the number of its first layer."""
        most = max((heat for row in self._heat for heat in row), default=0.0) or 1.0
        firsts = {row: layer for layer, row in reversed(self._row_of.items())}
        return [
            f"layer {firsts[number]:>3} {''.join(_shade(heat / most) for heat in row)}"
            for number, row in enumerate(self._heat)
        ]


def _experts_of(event: LayerExecuted) -> list[int]:
    """Return the experts that a layer used in one call; padding tokens use none."""
    if event.load is not None:
        return list(event.load.experts)
    if event.chosen is None:
        return []
    return [expert for expert in event.chosen.unique().tolist() if expert >= 0]


def _shade(share: float) -> str:
    return _SHADES[min(len(_SHADES) - 1, int(share * len(_SHADES)))]


class LivePanel:
    """Prints an answer and draws a panel below it: a context manager for one answer."""

    def __init__(
        self,
        model: "PreTrainedModel",
        out: TextIO,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare a panel on `out`; raises `ConfigError` if `out` is not a terminal with room."""
        from tandem.hf.runtime import require_runtime

        require_terminal(out)
        size = shutil.get_terminal_size()
        runtime = require_runtime(model)
        self._out, self._clock, self._size = out, clock, size
        self._executor, self._slots = runtime.executor, runtime.host_slots
        counts = {number: layer.arrivals.num_experts for number, layer in enumerate(runtime.store)}
        self._heat = ExpertHeat(counts, width=size.columns - 11)
        self._cache = CacheStatistics()
        self._num_lines = len(self._heat.lines()) + 1
        self._tokens, self._first, self._drawn = 0, 0.0, 0.0

    def __enter__(self) -> Self:
        """Start counting experts, and reserve the terminal's last lines for the panel."""
        self._executor.listeners += [self._heat, self._cache]
        above = self._size.lines - self._num_lines
        self._out.write("\n" * self._num_lines + f"\x1b[{self._num_lines}A")
        self._out.write(f"\x1b7\x1b[1;{above}r\x1b8")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Draw the panel once more, restore the terminal, and stop counting."""
        self._draw()
        self._out.write(f"\x1b[r\x1b[{self._size.lines};1H\n")
        self._out.flush()
        for listener in (self._heat, self._cache):
            self._executor.listeners.remove(listener)

    def show(self, text: str) -> None:
        """Print a piece of the answer on standard output, and redraw the panel now and then."""
        print(text, end="", flush=True)
        now = self._clock()
        self._first = self._first or now
        self._tokens += 1
        if now - self._drawn >= _SECONDS_BETWEEN:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        self._executor.catch_up()
        first = self._size.lines - self._num_lines + 1
        lines = [*self._heat.lines(), self._summary()]
        placed = (f"\x1b[{first + i};1H\x1b[2K{line}" for i, line in enumerate(lines))
        self._out.write(f"\x1b7{''.join(placed)}\x1b8")
        self._out.flush()

    def _summary(self) -> str:
        """Return a line with the answer's speed and the shares of experts on device, CPU, disk."""
        seconds = self._clock() - self._first if self._first else 0.0
        speed = (self._tokens - 1) / seconds if self._tokens > 1 and seconds > 0 else 0.0
        parts = [f"{self._tokens} pieces, {speed:.1f} a second"]
        counts = sum(self._cache.layers.values(), LayerCounts())
        if counts.active:
            on_device = counts.on_device / counts.active
            parts.append(f"experts on the device {on_device:.0%}, on the CPU {1 - on_device:.0%}")
        if self._slots is not None:
            missed = 1 - self._slots.statistics().hit_rate
            parts.append(f"read from the disk {missed:.0%}")
        return " | ".join(parts)[: self._size.columns - 1]
