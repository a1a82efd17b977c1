"""The experts of a model, once, in host memory. Knows bytes; neither files nor routing.

One layer per MoE layer: plain tensors for the torch reference, or packed buffers for the native
kernels. A layer is filled while the checkpoint streams in, and only read afterwards.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tandem.experts.store.arrivals import Arrivals
from tandem.experts.store.packed_layer import PackedLayer
from tandem.experts.store.plain_layer import Extent, PlainLayer
from tandem.kernels.formats.weight_format import ExpertFormat
from tandem.kernels.reference import ExpertWeights


class HostLayer(Protocol):
    """All routed experts of one MoE layer."""

    layer: int
    arrivals: Arrivals
    is_transposed: bool
    """Whether plain weights are (inputs, outputs)."""
    input_order: Tensor | None
    """Which input each of an expert's columns takes: (num_experts, hidden_size); None: in order."""

    def put(self, tensor_name: str, fused: Tensor) -> None:
        """Take the fused tensor (num_experts, ...) of one projection or bias."""

    def put_expert(self, tensor_name: str, expert: int, parts: Sequence[Tensor]) -> None:
        """Take one expert's tensor, given in parts that are stacked along its first axis."""

    def adopt(self, stored_name: str, tensor: Tensor) -> None:
        """Keep a tensor of a packed checkpoint as it is."""

    def move_to(self, stored: dict[str, Tensor]) -> None:
        """Read from these tensors from now on, which hold what `stored` returned."""

    def weights(self, expert: int) -> ExpertWeights:
        """Return one expert for the torch reference."""

    def stored(self) -> dict[str, Tensor]:
        """Return what a packed checkpoint holds of this layer, by name."""

    def extents(self, expert: int) -> Sequence[Extent]:
        """Return what a slot must receive to hold an expert: bytes and where they go."""

    def weights_in(self, image: Tensor) -> ExpertWeights:
        """Return the expert whose extents a slot (uint8) has received, for the torch reference."""

    def expected_bytes(self, source_dtype: torch.dtype) -> int:
        """Return the bytes that the layer will take, if the source is of this dtype."""

    @property
    def image_bytes(self) -> int:
        """Bytes that one expert takes in a slot."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer takes in host memory."""


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
    ) -> HostLayer:
        """Announce the next MoE layer; its memory is taken when its tensors arrive.

        `shapes` are those of the fused tensors; `expert_dtype` None keeps the source's dtype.
        """
        arrivals, number = Arrivals(name, shapes), len(self._layers)
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

    def expected_bytes(self, source_dtype: torch.dtype) -> int:
        """Return the bytes that all announced experts will take, before they arrive."""
        return sum(layer.expected_bytes(source_dtype) for layer in self._layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts in host memory."""
        return sum(layer.num_bytes for layer in self._layers)
