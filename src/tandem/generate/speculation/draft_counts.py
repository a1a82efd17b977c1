"""Counts decode steps by their number of drafted tokens, or by the reason for having none."""

from collections import Counter
from dataclasses import dataclass, field, replace

from tandem.experts.tracing.events import ExpertStatistics


@dataclass(slots=True)
class DraftCounts:
    """Totals over decode steps that could have verified drafted tokens."""

    steps: Counter[int] = field(default_factory=Counter)
    """Number of drafted tokens that a step verified -> number of such steps."""
    num_unpaid: int = 0
    """Steps without drafted tokens because verifying the available drafts would not have paid."""
    saved_bytes: int = 0
    """Bytes of expert weights that drafting saved because accepted tokens shared experts, minus the
    bytes that only rejected tokens used; 0 if bytes are not counted."""

    @property
    def num_drafting(self) -> int:
        """The number of steps that verified drafted tokens."""
        return self.steps.total() - self.steps[0]

    def add(self, num_drafted: int, *, is_unpaid: bool) -> None:
        """Record a step that verifies `num_drafted` tokens.

        `is_unpaid` tells that the step verifies none because the available drafts would not pay.
        """
        self.steps[num_drafted] += 1
        self.num_unpaid += is_unpaid

    def add_read(self, read: ExpertStatistics, before: ExpertStatistics, kept: float) -> None:
        """Record the expert bytes that a step with drafted tokens has read.

        `read` and `before` are the statistics after and before the step; `kept` is the share of its
        tokens that were kept.
        """
        separate = read.separate_bytes - before.separate_bytes
        self.saved_bytes += round(separate * kept) - (read.touched_bytes - before.touched_bytes)

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """Return these counts minus an earlier copy of them."""
        return DraftCounts(
            self.steps - before.steps,
            self.num_unpaid - before.num_unpaid,
            self.saved_bytes - before.saved_bytes,
        )

    def copy(self) -> "DraftCounts":
        """Return a copy of the counts."""
        return replace(self, steps=self.steps.copy())

    def line(self) -> str:
        """Return the counts as a line of text."""
        with_some = {drafted: n for drafted, n in sorted(self.steps.items()) if drafted}
        num_none = self.steps[0]
        parts = []
        if with_some:
            sizes = ", ".join(f"{drafted} ({n})" for drafted, n in with_some.items())
            parts.append(f"{self.num_drafting} steps verified drafted tokens: {sizes}")
        if num_none:
            parts.append(
                f"{num_none} steps had none: in {self.num_unpaid} it would not have paid, in "
                f"{num_none - self.num_unpaid} there was nothing to draft"
            )
        return "; ".join(parts) or "no step could have verified drafted tokens"
