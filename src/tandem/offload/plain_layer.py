"""A layer's experts as plain torch tensors (bf16, fp16, fp32): what the torch reference reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.kernels.reference import ExpertWeights
from tandem.offload.arrivals import Arrivals


class PlainLayer:
    """One tensor (num_experts, ...) per projection and bias, in the source's own orientation."""

    def __init__(
        self, layer: int, arrivals: Arrivals, *, is_transposed: bool, dtype: torch.dtype | None
    ) -> None:
        """Describe a layer; `dtype` None keeps the source's. Memory is taken on arrival."""
        self.layer = layer
        self.arrivals = arrivals
        self.is_transposed = is_transposed
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}

    def put(self, tensor_name: str, fused: Tensor) -> None:
        """Take the fused tensor (num_experts, ...) of one projection or bias."""
        self.arrivals.check_fused(tensor_name, tuple(fused.shape))
        self._allocate(tensor_name, fused.dtype).copy_(fused)
        self.arrivals.count(tensor_name, self.arrivals.num_experts)

    def put_expert(self, tensor_name: str, expert: int, parts: Sequence[Tensor]) -> None:
        """Take one expert's tensor, given in parts that are stacked along its first axis."""
        rows = sum(part.shape[0] for part in parts)
        self.arrivals.check_expert(tensor_name, (rows, *parts[0].shape[1:]))
        target = self._allocate(tensor_name, parts[0].dtype)[expert]
        start = 0
        for part in parts:
            target[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        self.arrivals.count(tensor_name, 1)

    def adopt(self, stored_name: str, tensor: Tensor) -> None:
        """Keep a tensor of a packed checkpoint as it is (it may be a view of a mapped file)."""
        self.arrivals.check_fused(stored_name, tuple(tensor.shape))
        self._tensors[stored_name] = tensor
        self.arrivals.count(stored_name, self.arrivals.num_experts)

    def weights(self, expert: int) -> ExpertWeights:
        """Return views of one expert's tensors."""
        up = self.arrivals.up_name
        return ExpertWeights(
            up=self._tensors[up][expert],
            down=self._tensors["down_proj"][expert],
            up_bias=self._bias(up, expert),
            down_bias=self._bias("down_proj", expert),
            is_transposed=self.is_transposed,
        )

    def stored(self) -> dict[str, Tensor]:
        """Return what a packed checkpoint holds of this layer, by name."""
        return dict(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes that the layer takes in host memory."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _bias(self, tensor_name: str, expert: int) -> Tensor | None:
        bias = self._tensors.get(f"{tensor_name}_bias")
        return None if bias is None else bias[expert]

    def _allocate(self, tensor_name: str, source_dtype: torch.dtype) -> Tensor:
        if tensor_name not in self._tensors:
            shape, dtype = self.arrivals.shapes[tensor_name], self._dtype or source_dtype
            self._tensors[tensor_name] = torch.empty(shape, dtype=dtype)
        return self._tensors[tensor_name]
