"""Layers that are routed by token id alone: their experts are read early and prefetched.

DeepSeek-V4's first layers look up a token's experts in a table. These experts are known before the
step begins, so their disk reads start with the step, and the executor knows them in advance.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.experts.execution.executor import Executor
from tandem.experts.store.host_store import HostLayer
from tandem.experts.store.packed_layer import PackedLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hf.runtime import runtime_of
from tandem.hf.token_tables import tables_by_token
from tandem.policy.plan import LayerLoad


class _Table(NamedTuple):
    """A layer's table of experts by token id, in host memory."""

    layer: int
    number: int | None
    """The layer's number among layers with experts on the disk; None if its own are in memory."""
    experts: Tensor  # (vocabulary, experts of a token)


class TokenRouted:
    """Looks up, before a forward, the experts that layers routed by token id will use."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the layers' tables, and copy them to host memory."""
        runtime = runtime_of(model)
        self._native = None if runtime is None else runtime.store.slots
        self._tables: list[_Table] = []
        if runtime is not None:
            self._tables = [
                _Table(layer, _number_on_disk(runtime.store[layer]), table.cpu())
                for layer, table in tables_by_token(model, runtime.bound)
            ]

    @torch.inference_mode()
    def expect(self, token_ids: Sequence[int], executor: Executor | None) -> None:
        """Announce to `executor` the experts that these layers will use in the next forward.

        Reading experts that are on the disk begins at once.
        """
        copies = executor is not None and executor.cache is not None
        if not self._tables or (self._native is None and not copies):
            return
        ids = torch.tensor(token_ids, device="cpu")
        loads = [_load(table.layer, table.experts[ids]) for table in self._tables]
        if executor is not None:
            executor.expect(loads)
        on_disk = {
            table.number: load.experts
            for table, load in zip(self._tables, loads, strict=True)
            if table.number is not None
        }
        if self._native is not None and on_disk:
            self._native.expect([on_disk.get(number, ()) for number in range(max(on_disk) + 1)])


def _number_on_disk(layer: HostLayer) -> int | None:
    slots = layer.slots if isinstance(layer, PackedLayer) else None
    return None if slots is None else slots.number


def _load(layer: int, choice: Tensor) -> LayerLoad:
    experts = sorted(Counter(choice.flatten().tolist()).items())
    return LayerLoad(layer, *zip(*experts, strict=True))
