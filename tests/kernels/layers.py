"""A layer's experts computed natively and by references, for tests of the CPU's kernels.

There are two references. One rounds activations as the kernels do, so that only the order of
additions differs. The other is fp32 on the unpacked weights, so that the rounding of activations
differs too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.kernels._native import ExpertEngine
from tandem.kernels.activations import apply_activation
from tandem.kernels.formats.blocks import CodedMatrix
from tandem.kernels.formats.expert import ExpertLayout, unpack_expert
from tandem.kernels.formats.weight_format import WeightFormat
from tandem.kernels.native import ActivationKind, NativeActivation, compute_experts
from tandem.kernels.reference import expert_ffn
from tests.kernels.formats.sources import draw_lines, pack_expert

SILU = NativeActivation(ActivationKind.SWIGLU)


@dataclass(frozen=True)
class Layer:
    """A layer's experts and one call's routing; `rows` lists each expert's tokens in any order."""

    layout: ExpertLayout
    store: Tensor
    activation: NativeActivation
    hidden: Tensor
    rows: list[list[int]]

    def begins_and_tokens(self) -> tuple[Tensor, Tensor]:
        begin = torch.tensor([0, *(len(tokens) for tokens in self.rows)]).cumsum(0).int()
        return begin, torch.tensor([t for tokens in self.rows for t in tokens], dtype=torch.int32)

    def addresses(self) -> Tensor:
        return torch.arange(len(self.rows)) * self.layout.num_bytes + self.store.data_ptr()

    def compute(self, engine: ExpertEngine) -> list[Tensor]:
        begin, token = self.begins_and_tokens()
        out = torch.empty(len(token), self.layout.hidden_size)
        compute_experts(
            engine, self.layout, self.addresses(), self.activation, self.hidden, begin, token, out
        )
        return list(out.split([len(tokens) for tokens in self.rows]))

    def expected(
        self, *, is_rounded: bool, activate: Callable[[Tensor], Tensor] | None = None
    ) -> list[Tensor]:
        """Return each expert's outputs; `activate` replaces the layer's activation."""
        apply = activate or partial(apply_activation, self.activation)

        def rounded(rows: Tensor, fmt: WeightFormat) -> Tensor:
            return round_for(rows, fmt) if is_rounded else rows

        def between(rows: Tensor) -> Tensor:
            inner = apply(rows.float())
            return rounded(inner, self.layout.down_format).double()

        outputs = []
        for expert, tokens in enumerate(self.rows):
            weights = unpack_expert(self.layout, self.store[expert])
            rows = rounded(self.hidden[tokens], self.layout.format).double()
            outputs.append(expert_ffn(rows, weights, between))
        return outputs


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def round_for(rows: Tensor, fmt: WeightFormat) -> Tensor:
    """Round activations as the kernels do for a format."""
    if fmt.kind == "fp16":
        return rows
    if fmt.kind in ("bf16", "fp8"):
        return rows.bfloat16().float()
    return round_to_int8(rows, fmt)


def round_to_int8(rows: Tensor, fmt: WeightFormat) -> Tensor:
    cols = rows.shape[1]
    groups = torch.nn.functional.pad(rows, (0, fmt.padded_cols(cols) - cols))
    groups = groups.unflatten(1, (-1, fmt.group_size))
    peak = groups.abs().amax(-1, keepdim=True)
    codes = (groups * torch.where(peak > 0, 127 / peak, 0)).round()
    return (codes * (peak / 127)).flatten(1)[:, :cols]


def make_layer(
    fmt: WeightFormat,
    hidden: int,
    inner: int,
    rows: list[list[int]],
    *,
    activation: NativeActivation = SILU,
    has_bias: bool = False,
    seed: int = 0,
    second_format: WeightFormat | None = None,
) -> Layer:
    torch.manual_seed(seed)
    layout = ExpertLayout(fmt, hidden, inner, activation.is_gated, has_bias, second_format)
    up_rows = inner * (1 + activation.is_gated)
    store = torch.empty(len(rows), layout.num_bytes, dtype=torch.uint8)
    for buffer in store:
        biases = (torch.randn(up_rows), torch.randn(hidden)) if has_bias else (None, None)
        up, down = _draw(up_rows, hidden, fmt), _draw(hidden, inner, layout.down_format)
        pack_expert(layout, up, down, *biases, out=buffer, has_search=False)
    num_tokens = max((t for tokens in rows for t in tokens), default=0) + 1
    return Layer(layout, store, activation, torch.randn(num_tokens, hidden), rows)


def _draw(rows: int, cols: int, fmt: WeightFormat) -> Tensor | CodedMatrix:
    """Return a random matrix whose products are about as large as its inputs."""
    if fmt.encoding.grid is not None:
        return draw_lines(rows, cols, fmt)
    return torch.randn(rows, cols) / cols**0.5


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    a, e = torch.cat(actual).double(), torch.cat(expected).double()
    return float((a - e).norm() / e.norm().clamp(min=1e-30))
