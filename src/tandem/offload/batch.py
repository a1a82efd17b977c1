"""The experts that one lane computes in one call: what goes in, and where the rows go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.kernels.native import NativeActivation
from tandem.offload.host_store import HostLayer


@dataclass(frozen=True, slots=True)
class ExpertFunctions:
    """What surrounds the two matrix products of an expert: the model's own code.

    `native` is the same activation in the kernels' form, where they have it; `unpacked_activate`
    takes [gate; up] whatever order the model's own experts have.
    """

    activate: Callable[[Tensor], Tensor]
    post_norm: Callable[[Tensor], Tensor] | None = None
    native: NativeActivation | None = None
    unpacked_activate: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """Some experts of a layer with their rows.

    Expert `experts[i]` has rows `begin[i] - begin[0]`..`begin[i + 1] - begin[0] - 1` of `token` and
    `out`.
    """

    layer: HostLayer
    functions: ExpertFunctions
    hidden: Tensor  # (n_tokens, hidden_size), the model's dtype
    hidden_fp32: Tensor
    experts: Sequence[int]
    begin: Sequence[int]
    token: Tensor  # (n_rows,) int32
    out: Tensor  # (n_rows, hidden_size) fp32
