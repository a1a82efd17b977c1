"""What stands in a model that has been closed: every use of it is one sentence."""

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.executor import StatelessExecutor

CLOSED = "the model has been closed; load it again"


class ClosedExecutor(StatelessExecutor):
    """Computes nothing."""

    needs_steps = True  # so that a step is refused before the model's own layers run
    takes_drafts = True

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> NoReturn:
        """Raise `ConfigError`."""
        _refuse()

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        """Raise `ConfigError`."""
        _refuse()


def _refuse() -> NoReturn:
    raise ConfigError(CLOSED)
