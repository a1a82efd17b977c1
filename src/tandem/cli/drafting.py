"""Finds what a command drafts with: a small model, or the MTP layer of the model itself."""

import warnings
from dataclasses import dataclass
from pathlib import Path

from tandem.cli.model_choice import ModelChoice, find_model, load_tokenizer
from tandem.core.errors import TandemWarning
from tandem.engine.messages import DraftSources
from tandem.foreign_types import Tokenizer


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The model that a command runs, and the draft model, if any."""

    choice: ModelChoice
    draft: str | None
    quiet: bool

    def load(self, tokenizer: Tokenizer) -> DraftSources:
        """Return the arguments about drafting for the `Generator` of a model with this tokenizer.

        A draft model with another vocabulary is left out with a warning.
        """
        own = find_model(self.choice, quiet=self.quiet)
        sources: DraftSources = {"mtp_from": Path(own.model)}  # the model, not a packed copy
        if self.draft is None:
            return sources
        found = find_model(ModelChoice(model=self.draft), quiet=self.quiet)
        if load_tokenizer(found).get_vocab() != tokenizer.get_vocab():
            warnings.warn(
                f"{self.draft} has another vocabulary than {self.choice.model}, so it drafts "
                "nothing",
                TandemWarning,
                stacklevel=2,
            )
            return sources
        from tandem.generate.speculation.small_model import load_small

        return {**sources, "draft": load_small(Path(found.model))}
