"""An executor around another one, which observes or changes its calls."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from tandem.experts.cache.expert_cache import ExpertCache
from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.device import Device
from tandem.experts.execution.executor import DirectCall, Executor
from tandem.experts.tracing.events import Listener


class PassingExecutor:
    """Hands everything to the executor within. A subclass overrides `before` or `after`."""

    device: Device | None = None
    needs_steps = True
    takes_drafts = False  # a step is a token of each sequence to what records or forces routing

    def __init__(self, inner: Executor) -> None:
        """Stand before `inner`, with its store and its listeners."""
        self.inner = inner
        self.store = inner.store
        self.listeners: list[Listener] = inner.listeners

    @property
    def cache(self) -> ExpertCache | None:
        """The expert cache of the executor within."""
        return self.inner.cache

    @property
    def needs_hooks(self) -> bool:
        """Whether the executor within needs hooks."""
        return self.inner.needs_hooks

    def before(self, call: RoutedCall) -> RoutedCall:
        """Return the call that is computed."""
        return call

    def after(self, call: RoutedCall) -> None:
        """See the call that has been computed."""

    def begin_step(self, token_ids: Sequence[int], *, is_prefill: bool) -> None:
        """Announce the step."""
        self.inner.begin_step(token_ids, is_prefill=is_prefill)

    def execute(
        self,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        functions: ExpertFunctions,
    ) -> Tensor:
        """Compute a layer; see `Executor`."""
        call = self.before(RoutedCall(layer, hidden, top_k_index, top_k_weights))
        out = self.inner.execute(*call, functions)
        self.after(call)
        return out

    def settle(self) -> None:
        """Let the executor within do what waits."""
        self.inner.settle()

    def repeat_step(self, num_tokens: int) -> None:
        """Announce it to the executor within."""
        self.inner.repeat_step(num_tokens)

    def direct_call(self, call: RoutedCall, functions: ExpertFunctions) -> DirectCall | None:
        """Return None: `before` and `after` are part of each call."""
        return None

    def deferring(self) -> AbstractContextManager[None]:
        """Let the executor within defer."""
        return self.inner.deferring()

    def close(self) -> None:
        """Close the executor within."""
        self.inner.close()
