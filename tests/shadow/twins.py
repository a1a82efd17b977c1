"""Torch in place of kernels that are slow to interpret: the experts' matrices."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandem.kernels.activations import apply_activation
from tandem.kernels.formats.expert import ExpertLayout, unpack_expert
from tandem.kernels.native import NativeActivation
from tandem.kernels.reference import expert_ffn
from tests.shadow.captures import launch
from tests.shadow.tensor import Shadow, present


def compute_experts(interpreted: Callable[..., None]) -> Callable[..., None]:
    """Return `TritonExperts.compute` as one torch launch; `interpreted` is the original."""

    def compute(
        self: Any,
        layout: ExpertLayout,
        activation: NativeActivation | None,
        hidden: Tensor,
        rows: Any,
        out: Tensor,
        activate: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if activation is None:  # torch works between two kernels
            return interpreted(self, layout, activation, hidden, rows, out, activate)
        tensors = [hidden, rows.addresses, rows.begin, rows.row_token, out]
        if not all(isinstance(each, Shadow) for each in tensors):
            present().fault("experts' kernels are given tensors of the host")
        inner, addresses, begin, row_token, target = (each.held for each in tensors)

        def work() -> None:
            starts = begin.tolist()
            for place, address in enumerate(addresses.tolist()):
                if address:
                    some = slice(starts[place], starts[place + 1])
                    weights = unpack_expert(layout, _image(address, layout.num_bytes))
                    tokens = inner[row_token[some].long()]
                    target[some] = expert_ffn(
                        tokens.float(), weights, lambda x: apply_activation(activation, x)
                    )

        uses = [(each, each is target) for each in (inner, addresses, begin, row_token, target)]
        launch("experts", work, uses)

    return compute


def _image(address: int, num_bytes: int) -> Tensor:
    """Return the expert at an address, as a read by the running launch."""
    memory = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
    present().running_uses(memory, "experts")
    return memory
