"""An executor that wraps another executor, and observes or changes its calls."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.executor import Executor
from tandem.policy.plan import LayerLoad


class PassingExecutor(Executor):
    """Forwards steps and calls to the wrapped executor.

    A subclass overrides `before` to change calls, or `after` to observe them. Direct calls are not
    forwarded.
    """

    needs_steps = True
    takes_drafts = False  # recording and forcing expect one token per sequence in a step

    def __init__(self, inner: Executor) -> None:
        """Wrap `inner`, and share its store, cache and listeners."""
        super().__init__(inner.store)
        self.inner, self.cache, self.listeners = inner, inner.cache, inner.listeners

    @property
    def asks_ahead(self) -> bool:
        """Whether the wrapped executor runs routers ahead."""
        return self.inner.asks_ahead

    def before(self, call: RoutedCall) -> RoutedCall:
        """Return the call that the wrapped executor computes in place of `call`."""
        return call

    def after(self, call: RoutedCall) -> None:
        """Observe a call after it was computed."""

    def expect(self, known: Sequence[LayerLoad]) -> None:
        """Announce the known loads to the wrapped executor."""
        self.inner.expect(known)

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Announce the step to the wrapped executor."""
        self.inner.begin_step(token_ids, is_prefill=is_prefill)

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        """Compute a call; see `execute`."""
        call = self.before(call)
        out = self.inner.execute(*call, functions)
        self.after(call)
        return out

    def catch_up(self) -> None:
        """Let the wrapped executor report pending events."""
        self.inner.catch_up()

    def settle(self) -> None:
        """Let the wrapped executor finish pending work."""
        self.inner.settle()

    def repeat_step(self, num_tokens: int) -> None:
        """Announce to the wrapped executor that the last step's tokens are computed again."""
        self.inner.repeat_step(num_tokens)

    def deferring(self) -> AbstractContextManager[None]:
        """Return the wrapped executor's context in which layers may defer work."""
        return self.inner.deferring()

    def close(self) -> None:
        """Close the wrapped executor."""
        self.inner.close()
