"""Captured steps that hand their layers over to the host while the whole graph runs.

The host launches all of a step's graphs at once, and answers the layers through a mailbox.
"""

import warnings
from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor

from tandem.core.errors import TandemWarning
from tandem.devices.cuda.handed_steps import HandedSteps
from tandem.experts.execution.batch import ExpertFunctions
from tandem.experts.execution.executor import Executor
from tandem.experts.execution.forced_routing import ForcedRouting
from tandem.experts.execution.hybrid_executor import HybridExecutor
from tandem.policy.step_path import MAX_GRAPH_TOKENS


class HandedGraph:
    """The `GraphLayers` of one captured step that hands each layer over to the host."""

    def __init__(
        self,
        executor: HybridExecutor,
        steps: HandedSteps,
        num_tokens: int,
        forced: ForcedRouting | None = None,
    ) -> None:
        """Take `steps`, the captured steps of `executor`, and the step's number of tokens.

        If `forced` is given, its routing replaces the routers' choices.
        """
        self._executor, self._steps, self._num_tokens = executor, steps, num_tokens
        self._forced = forced
        self._layers = steps.layers(num_tokens)

    def __call__(
        self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor, functions: ExpertFunctions
    ) -> Tensor:
        """Queue a layer and return its result; `RuntimeError` if it cannot be handed over."""
        if self._forced is not None:
            index, weights = self._forced.choices(layer, self._num_tokens, index.device)
        result = self._layers(layer, hidden, index, weights, functions)
        if result is None:  # a graph break in such a step would be planned, in the middle of it
            raise RuntimeError(f"MoE layer {layer} is not as it was when the model was loaded")
        return result

    def take_router_input(self, layer: int, hidden: Tensor) -> bool:
        """Keep a layer's router input, to run the next layer's router ahead on it; return True."""
        self._layers.take_router_input(layer, hidden)
        return True

    def around(self) -> AbstractContextManager[None]:
        """Return a context manager; the coordinator answers the step that runs inside it."""
        return self._executor.captured_step(partial(self._steps.begin, self._num_tokens))

    def give_up(self, error: Exception) -> bool:
        """Warn, and let all later captures break at experts; return True, to try that at once."""
        self._steps.is_given_up = True
        first_line = str(error).partition("\n")[0]
        warnings.warn(
            f"decode steps are captured with a break at the experts of each layer: {first_line}",
            TandemWarning,
            stacklevel=2,
        )
        return True


def handed_graph(executor: Executor | None, num_tokens: int) -> HandedGraph | None:
    """Return the object that hands over a step's layers; None if they must be graph breaks.

    None also for an executor that passes calls on to another executor, because it sees or changes
    each call. The exception is `ForcedRouting` with the model's own number of experts per token,
    which announces the routing before a step.
    """
    forced = executor if isinstance(executor, ForcedRouting) else None
    inner = executor if forced is None else forced.inner
    if not isinstance(inner, HybridExecutor) or num_tokens > MAX_GRAPH_TOKENS:
        return None
    if forced is not None and forced.top_k != inner.cache.geometry.top_k:
        return None
    steps = inner.captured
    if not isinstance(steps, HandedSteps) or steps.is_given_up:
        return None
    return HandedGraph(inner, steps, num_tokens, forced)
