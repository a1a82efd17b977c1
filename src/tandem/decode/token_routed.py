"""Layers that are routed by their tokens alone: over a disk, their experts are read ahead.

DeepSeek-V4's first ones look a token's experts up in a table. They are known before anything of a
step is computed, so all their reads begin with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hf.runtime import runtime_of

TABLE = "tid2eid"
"""Of a router, as Transformers calls it: (vocabulary, experts of a token)."""


def tables_by_token(model: PreTrainedModel) -> list[tuple[HostLayer, Tensor]]:
    """Return the layers that are routed by token, each with its table."""
    runtime = runtime_of(model)
    if runtime is None:
        return []
    found: list[tuple[HostLayer, Tensor]] = []
    layers = dict(runtime.bound)
    for block in model.modules():
        children = list(block.children())
        tables = [one.get_buffer(TABLE) for one in children if hasattr(one, TABLE)]
        experts = [runtime.store[layers[one]] for one in children if one in layers]
        found += zip(experts, tables, strict=False)
    return found


class TokenRouted:
    """The tables of a model's layers that are routed by token, as far as a disk is under them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find them; a model whose experts are all in memory has none here."""
        runtime = runtime_of(model)
        self._native = None if runtime is None else runtime.store.slots
        self._tables: dict[int, Tensor] = {}
        if self._native is not None:
            for layer, table in tables_by_token(model):
                if isinstance(layer, PackedLayer) and layer.slots is not None:
                    self._tables[layer.slots.number] = table

    @torch.inference_mode()
    def expect(self, token_ids: Sequence[int]) -> None:
        """Begin to read what the next forward's tokens want of these layers."""
        if self._native is None or not self._tables:
            return
        rows = torch.tensor(token_ids, device="cpu")
        found: list[Sequence[int]] = [()] * (max(self._tables) + 1)
        for number, table in self._tables.items():
            found[number] = table[rows].unique().tolist()
        self._native.expect(found)
