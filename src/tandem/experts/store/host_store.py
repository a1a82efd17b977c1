"""All experts of a model, stored once in host memory. Knows bytes, but neither files nor routing.

The store has an entry per MoE layer: plain tensors for the torch reference, or packed buffers for
the native kernels. A layer is filled while the checkpoint streams in, and only read afterwards.
"""

from collections.abc import Iterator

import torch

from tandem.experts.store.arrivals import Arrivals
from tandem.experts.store.packed_layer import PackedLayer
from tandem.experts.store.plain_layer import PlainLayer
from tandem.kernels import _native
from tandem.kernels.formats.weight_format import ExpertFormat

HostLayer = PackedLayer | PlainLayer
"""All routed experts of one MoE layer."""


class HostStore:
    """Every MoE layer's experts, in the order in which the model runs the layers."""

    def __init__(self) -> None:
        self._layers: list[HostLayer] = []

    def add_layer(
        self,
        name: str,
        shapes: dict[str, tuple[int, ...]],
        *,
        expert_dtype: torch.dtype | ExpertFormat | None,
        is_transposed: bool = False,
        is_interleaved: bool = False,
        num_spare: int = 0,
    ) -> HostLayer:
        """Add the next MoE layer and return it; its memory is allocated when its tensors arrive.

        `shapes` are those of the fused tensors; `expert_dtype` None keeps the source's dtype. See
        `Arrivals` for `num_spare`.
        """
        arrivals, number = Arrivals(name, shapes, num_spare), len(self._layers)
        layer: HostLayer
        if isinstance(expert_dtype, ExpertFormat):
            layer = PackedLayer(
                number,
                arrivals,
                expert_dtype,
                is_transposed=is_transposed,
                is_interleaved=is_interleaved,
            )
        else:
            layer = PlainLayer(number, arrivals, is_transposed=is_transposed, dtype=expert_dtype)
        self._layers.append(layer)
        return layer

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[HostLayer]:
        return iter(self._layers)

    def __getitem__(self, layer: int) -> HostLayer:
        return self._layers[layer]

    @property
    def slots(self) -> _native.HostSlots | None:
        """The host slots for experts on a disk; None: all experts are in memory."""
        first = self._layers[0] if self._layers else None
        return first.slots.native if isinstance(first, PackedLayer) and first.slots else None

    def expected_bytes(self, source_dtype: torch.dtype) -> int:
        """Return the bytes that all announced experts will take."""
        return sum(layer.expected_bytes(source_dtype) for layer in self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts in host memory."""
        return sum(layer.num_bytes for layer in self._layers)
