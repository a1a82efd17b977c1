"""What a router chose: counts by expert, and routed tokens sorted by expert.

Knows neither weights nor devices. A routed token is a (token, expert) pair, and has one row in each
matrix of a layer call. Rows are sorted by expert, in an order that the caller chooses, so that each
processor of a plan computes one contiguous range of rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.policy.plan import LayerLoad

Ints = npt.NDArray[np.int64]


class SortedTokens(NamedTuple):
    """The routed tokens of a call, sorted by the chosen order of experts.

    Expert i of that order has rows `begin[i]`..`begin[i + 1]` - 1; row j is of token `token[j]`.
    """

    begin: list[int]
    token: Tensor  # (n_rows,) int32
    row_of: Tensor  # (n_tokens, top_k) int32: the routed token of each choice; -1 for padding


@functools.lru_cache(maxsize=64)
def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device="cpu")


@functools.lru_cache(maxsize=64)
def _counting(count: int) -> list[int]:
    return list(range(count))


@functools.lru_cache(maxsize=4096)
def _row_table(places: tuple[int, ...]) -> Tensor:
    return torch.tensor([places], dtype=torch.int32, device="cpu")


class Routing:
    """One call's choice of experts; ids outside 0..num_experts - 1 are padding and are ignored."""

    def __init__(self, top_k_index: Tensor, num_experts: int) -> None:
        """Count the tokens of each expert in a (n_tokens, top_k) choice in host memory."""
        self.num_tokens, self.top_k = top_k_index.shape
        self.num_experts = num_experts
        # A single token's choice, for which no arrays are needed.
        self._single: list[int] | None = None
        if self.num_tokens == 1:
            row: list[int] = top_k_index.tolist()[0]
            ordered = sorted(row)
            if len(set(row)) == len(row) and ordered[0] >= 0 and ordered[-1] < num_experts:
                self._single = row
                self.experts = tuple(ordered)
                self.tokens = (1,) * len(row)
                return
        self._flat: Ints = top_k_index.numpy().reshape(-1).astype(np.int64, copy=False)
        is_valid = (self._flat >= 0) & (self._flat < num_experts)
        self._valid = self._flat if is_valid.all() else self._flat[is_valid]
        self._counts = np.bincount(self._valid, minlength=num_experts)
        active = np.flatnonzero(self._counts)
        self.experts = tuple(active.tolist())
        self.tokens = tuple(self._counts[active].tolist())

    @property
    def num_routed(self) -> int:
        """The number of routed tokens, and of rows in each matrix of the call."""
        return self.top_k if self._single is not None else len(self._valid)

    def load(self, layer: int, top_k_weights: Tensor | None) -> LayerLoad:
        """Return the choice as a load for the planner.

        The load has no gate weights if `top_k_weights` is None or if the choice has padding.
        Otherwise, the weights are rounded to fp16, as in a trace, so that a replay makes the same
        decisions.
        """
        if top_k_weights is None:
            return LayerLoad(layer, self.experts, self.tokens, (), self._routes())
        if self._single is not None:
            weights = dict(zip(self._single, top_k_weights[0].half().tolist(), strict=True))
            by_expert = tuple([weights[expert] for expert in self.experts])
            return LayerLoad(layer, self.experts, self.tokens, by_expert, (self._single,))
        flat = top_k_weights.half().numpy().astype(np.float64).reshape(-1)
        if len(self._valid) < len(self._flat):
            return LayerLoad(layer, self.experts, self.tokens)
        sums = np.bincount(self._flat, weights=flat, minlength=self.num_experts)
        by_expert = tuple(sums[list(self.experts)].tolist())
        return LayerLoad(layer, self.experts, self.tokens, by_expert, self._routes())

    def _routes(self) -> Sequence[Sequence[int]]:
        """Return the experts of each token that has `top_k` experts; padding tokens are left out.

        The result is empty if some token has experts, but fewer than `top_k`.
        """
        if self._single is not None:
            return (self._single,)
        rows = self._flat.reshape(self.num_tokens, self.top_k)
        if len(self._valid) < len(self._flat):
            rows = rows[((rows >= 0) & (rows < self.num_experts)).all(1)]
            if rows.size < len(self._valid):
                return ()
        routes: list[list[int]] = rows.tolist()
        return routes

    def sorted_by(self, order: Sequence[int]) -> SortedTokens:
        """Return the routed tokens sorted by `order`, which must contain all active experts."""
        if self._single is not None:
            places = _row_table(tuple(map(order.index, self._single)))
            return SortedTokens(_counting(self.top_k + 1), _zeros(self.top_k), places)
        # Padding sorts behind all experts and is cut off.
        rank = np.full(self.num_experts + 1, len(order), dtype=np.int16)
        rank[list(order)] = np.arange(len(order))
        chosen = self._flat
        if len(self._valid) < len(chosen):
            is_padding = (chosen < 0) | (chosen >= self.num_experts)
            chosen = np.where(is_padding, self.num_experts, chosen)
        place = np.argsort(rank[chosen], kind="stable")[: len(self._valid)]
        begin = [0, *np.cumsum(self._counts[list(order)]).tolist()]
        token = torch.from_numpy((place // self.top_k).astype(np.int32))
        table = np.full(self.num_tokens * self.top_k, -1, dtype=np.int32)
        table[place] = np.arange(len(place), dtype=np.int32)
        row_of = torch.from_numpy(table.reshape(self.num_tokens, self.top_k))
        return SortedTokens(begin, token, row_of)

    def fastest_order(self) -> Sequence[int]:
        """Return the order of active experts that is quickest to sort by."""
        return self._single if self._single is not None else self.experts


SumRows = Callable[[Tensor], Tensor]
"""Takes rows (n_rows, width) fp32 and returns each token's sum, added in the router's order."""
PrepareSum = Callable[[Tensor, Tensor], SumRows]
"""Takes the index of each choice's row (-1: none) and the weights; returns the `SumRows`."""
