"""Captured steps that hand their layers over to the host while the whole graph runs.

The host makes no call between two layers.
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
    """Computes the layers of one captured step of a fixed number of tokens."""

    def __init__(
        self,
        executor: HybridExecutor,
        steps: HandedSteps,
        num_tokens: int,
        forced: ForcedRouting | None = None,
    ) -> None:
        """Hand layers over to the coordinator of `steps` on behalf of `executor`.

        `forced` replaces the routers' choices.
        """
        self._executor, self._steps, self._num_tokens = executor, steps, num_tokens
        self._forced = forced
        self._layers = steps.layers(num_tokens)

    def __call__(
        self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor, functions: ExpertFunctions
    ) -> Tensor:
        """Queue a layer. Raises `RuntimeError` for one that cannot be handed over."""
        if self._forced is not None:
            index, weights = self._forced.choices(layer, self._num_tokens, index.device)
        result = self._layers(layer, hidden, index, weights, functions)
        if result is None:  # a graph break in such a step would be planned, in the middle of it
            raise RuntimeError(f"MoE layer {layer} is not as it was when the model was loaded")
        return result

    def take_router_input(self, layer: int, hidden: Tensor) -> bool:
        """Take a layer's router input, on which the next layer's router is run ahead."""
        self._layers.take_router_input(layer, hidden)
        return True

    def around(self) -> AbstractContextManager[None]:
        """Return a context in which the coordinator answers the step."""
        return self._executor.captured_step(partial(self._steps.begin, self._num_tokens))

    def give_up(self, error: Exception) -> bool:
        """Use graph segments from now on."""
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

    None also for executors that pass calls on, because they see or change each call. The exception
    is `ForcedRouting` with the model's own number of experts per token: it announces the routing
    before a step.
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
