"""Looks ahead: runs the next MoE layer's router on this layer's router input, as a prediction.

"gate" uses the input as it is (HybriMoE); "residual" first adds the mean difference between the two
routers' inputs (DALI, equation 10). Look-ahead runs between a layer's router and its experts, and
changes nothing in the model. An opaque call reports each router's input, so that recorded and
captured steps report it too.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tandem.experts.execution.look_ahead_routers import LookAheadRouter
from tandem.experts.store.host_store import HostStore
from tandem.foreign_types import PreTrainedModel
from tandem.hf.experts import Bound
from tandem.hf.identity import model_identity
from tandem.hf.lookahead.linear_routers import linear_routers
from tandem.hf.lookahead.residuals import Residuals
from tandem.hf.lookahead.routers import Router, find_routers
from tandem.kernels.opaque_calls import ROUTER_INPUT, opaque
from tandem.policy.plan import Hint, LayerLoad

SOURCES = ("gate", "residual")


class LookAhead:
    """Predicts the experts of each next layer; a hybrid executor calls it as its `look_ahead`."""

    def __init__(
        self, routers: Sequence[Router], residuals: Residuals, sources: Sequence[str]
    ) -> None:
        """Add hooks to `routers`, which must be in the MoE layers' order; `close` removes them."""
        self.residuals = residuals
        self.guesses: dict[str, Tensor] = {}
        """By source: the experts (n_tokens, top_k) predicted for the next layer."""
        self.cosines: list[tuple[float, float]] | None = None
        """If set to a list, each router but the first appends to it the cosine similarity between
        its predicted and its true input, averaged over tokens: (without, with the residual)."""
        self._routers = routers
        self.sources = tuple(sources)
        self._hidden: Tensor | None = None  # what the last router read: (n_tokens, hidden_size)
        self._layer = -1
        self._token_ids: Tensor | None = None  # of this step, once a router has read them
        self._handles = [
            router.module.register_forward_pre_hook(self._listener(layer), with_kwargs=True)
            for layer, router in enumerate(routers)
        ]

    def for_graphs(self) -> list[LookAheadRouter | None] | None:
        """Return all routers but the first, as captured steps run them; None if impossible.

        It is possible if "residual" is the only source, and each router is one product or chooses
        by token id. The entry of a router by token id is None, because its choice is known.
        """
        linear = None if self.sources != ("residual",) else linear_routers(self._routers[1:])
        if linear is None:
            return None
        return [
            LookAheadRouter(found.weight, found.bias, mean, found.scoring) if found else None
            for found, mean in zip(linear, self.residuals.means, strict=True)
        ]

    def close(self) -> None:
        """Remove the hooks from the routers."""
        for handle in self._handles:
            handle.remove()

    def _listener(self, layer: int) -> Callable[..., None]:
        def listen(module: nn.Module, args: tuple[Tensor, ...], options: dict[str, object]) -> None:
            router = self._routers[layer]
            token_ids = router.token_ids(args, options) if router.reads_tokens else None
            hidden = args[0].detach().reshape(-1, args[0].shape[-1])
            opaque(ROUTER_INPUT, self._take_input, layer, hidden, token_ids)

        return listen

    def _take_input(self, layer: int, hidden: Tensor, token_ids: Tensor | None) -> None:
        """Record a router's input, and learn its difference from the previous router's input."""
        if layer == 0 or token_ids is not None:
            self._token_ids = token_ids
        hidden = hidden.clone()  # a recorded step reuses its memory
        before = self._hidden
        if self._layer == layer - 1 and before is not None and before.shape == hidden.shape:
            if self.cosines is not None:
                self.cosines.append(self._likeness(layer - 1, before, hidden))
            self.residuals.learn(layer - 1, before, hidden)
        self._hidden, self._layer = hidden, layer

    def _likeness(self, layer: int, before: Tensor, hidden: Tensor) -> tuple[float, float]:
        before, hidden = before.float(), hidden.float()
        corrected = before + self.residuals.means[layer]
        likeness = torch.nn.functional.cosine_similarity
        return (
            float(likeness(before, hidden, dim=-1).mean()),
            float(likeness(corrected, hidden, dim=-1).mean()),
        )

    def __call__(self, layer: int) -> tuple[Hint, ...]:
        """Return one hint from each source for the MoE layer after `layer`; empty if impossible.

        The last router that has run must be that of `layer`, and if the next router reads token
        ids, a router must have read them in this step.
        """
        self.guesses = {}
        if self._hidden is None or self._layer != layer or layer + 1 >= len(self._routers):
            return ()
        if self._routers[layer + 1].reads_tokens and self._token_ids is None:
            return ()
        for source in self.sources:
            self.guesses[source] = self._ask(source, layer, self._hidden)
        return tuple(
            Hint(source, _load(layer + 1, choice)) for source, choice in self.guesses.items()
        )

    @torch.no_grad()
    def _ask(self, source: str, layer: int, hidden: Tensor) -> Tensor:
        if source == "residual":
            hidden = hidden + self.residuals.means[layer].to(hidden.dtype)
        return self._routers[layer + 1].choose(hidden, self._token_ids)


def calibrated_path(model: PreTrainedModel, cache_path: Path) -> Path:
    """Return where `tandem calibrate` keeps a model's residual vectors."""
    name = f"{model.config.model_type}-{model_identity(model)}.npz"
    return cache_path / "residuals" / name


def look_ahead(
    model: PreTrainedModel,
    bound: Bound,
    store: HostStore,
    sources: Sequence[str],
    *,
    cache_path: Path,
    residuals_path: str | None = None,
) -> LookAhead | str:
    """Return a model's look-ahead, or a sentence that says why there cannot be one.

    Residual vectors are read from `residuals_path`, else from the model's calibration. Without
    either, they are learned while the model runs.
    """
    routers = find_routers(model, bound)
    if isinstance(routers, str):
        return routers
    shape = len(store), routers[0].hidden_size, model.device
    path = Path(residuals_path) if residuals_path else calibrated_path(model, cache_path)
    if residuals_path or path.is_file():
        residuals = Residuals.load(path, model_identity(model), *shape)
    else:
        residuals = Residuals(*shape)
    return LookAhead(routers, residuals, sources)


def _load(layer: int, choice: Tensor) -> LayerLoad:
    if len(choice) == 1:
        experts = sorted(choice[0].tolist())
        return LayerLoad(layer, tuple(experts), (1,) * len(experts))
    ids, counts = np.unique(choice.cpu().numpy(), return_counts=True)
    return LayerLoad(layer, tuple(ids.tolist()), tuple(counts.tolist()))
