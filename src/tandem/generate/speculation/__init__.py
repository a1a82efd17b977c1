"""Speculation: drafted tokens are verified together, and kept up to the first rejected token."""

from tandem.core.errors import ConfigError

# The values of the option. `drafters`, which imports torch, finds out what there is to draft with.
SPECULATE = ("auto", "lookup", "mtp", "none")


def require_one_drafter(speculate: str, draft: str | None) -> None:
    """Raise `ConfigError` if a draft model is given and `speculate` is "mtp" or "none"."""
    if draft is not None and speculate in ("mtp", "none"):
        raise ConfigError(
            f"--draft names a model that drafts, and --speculate {speculate} says otherwise; give "
            "one of the two"
        )
