"""Packed linear layers and embeddings as modules for torch and Transformers."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from tandem.experts.store.stand_in import refuse_to_load
from tandem.kernels.dense import VALUE_DTYPES, CpuThreads, DenseWeight, multiply
from tandem.kernels.grouped import multiply_by_group
from tandem.kernels.opaque_calls import DENSE, ROWS, mapped, opaque
from tandem.kernels.torch_private import tensor_without_values

_SCALE = "scalar_embed_scale"  # the scale of Gemma's embeddings

T = TypeVar("T")


class UnpackedWeight(Tensor):
    """A packed layer's weight as a tensor, unpacked in each operation that reads it.

    Reading its dtype or shape costs nothing.
    """

    layer: "PackedModule"

    @staticmethod
    def __new__(cls, layer: "PackedModule") -> "UnpackedWeight":
        """Create the tensor without memory."""
        shape = (layer.packed.out_features, layer.packed.in_features)
        made = tensor_without_values(cls, shape, layer.dtype)
        made.layer = layer
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operation with the unpacked values in place of each `UnpackedWeight`."""
        args, kwargs = with_values((args, kwargs or {}))
        return func(*args, **kwargs)

    def values(self) -> Tensor:
        """Return the weight: (out_features, in_features)."""
        return self.layer.values().to(self.dtype)


def with_values(arguments: T) -> T:
    """Return arguments with each `UnpackedWeight` unpacked, also inside nested lists."""
    return mapped(lambda x: x.values() if isinstance(x, UnpackedWeight) else x, arguments)


class PackedModule(nn.Module):
    """Base class of packed linear layers and embeddings."""

    def __init__(self, weight: DenseWeight, threads: CpuThreads, dtype: torch.dtype) -> None:
        """Hold a weight and the threads that compute with it; `dtype` is the replaced layer's."""
        super().__init__()
        self.packed = weight
        self.threads = threads
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:
        """The unpacked weight, for code that inspects it. Slow if its values are read."""
        return UnpackedWeight(self)

    def values(self) -> Tensor:
        """Return the weight in fp32. Slow: unpacks."""
        return self.packed.values()

    def _load_from_state_dict(self, *_: object) -> None:
        refuse_to_load()

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        """Save the rounded weights under the names of the layer that was replaced."""
        destination[prefix + "weight"] = self.values().to(self.dtype)


class PackedLinear(PackedModule):
    """A linear layer whose weight is packed; its product runs on the experts' kernels."""

    def __init__(
        self,
        weight: DenseWeight,
        threads: CpuThreads,
        dtype: torch.dtype,
        input_order: Tensor | None = None,
    ) -> None:
        """Hold a weight and the threads that compute with it; `dtype` is the replaced layer's.

        `input_order` (in_features,) says which input each column of `weight` belongs to.
        """
        super().__init__(weight, threads, dtype)
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self.input_order = input_order
        self.by_head: tuple[list[DenseWeight], list[DenseWeight]] | None = None
        """The weights of keys and of values, by head, for attention to latents; None: not split."""
        self.gives_fp32 = False
        self.groups: list[DenseWeight] = []  # groups of rows with inputs of their own

    def cut(self, num_groups: int) -> None:
        """Split the weight's rows into groups, each with its own input; see `multiply_by_group`."""
        each = self.out_features // num_groups
        self.groups = [self.packed.rows_at(i * each, each) for i in range(num_groups)]

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias: (..., in_features) -> (..., out_features)."""
        if self.gives_fp32:
            x = x.float()
        elif x.dtype not in VALUE_DTYPES:
            return self.forward(x.float()).to(x.dtype)
        if self.input_order is not None:
            x = x.gather(-1, self.input_order.expand(x.shape))
        if self.groups:
            return multiply_by_group(self.threads, self.groups, x)
        return opaque(DENSE, _multiply_one, self.threads, self.packed, x)

    def values(self) -> Tensor:
        """Return the weight in fp32, columns in the order of the inputs. Slow: unpacks."""
        values = super().values()
        return values if self.input_order is None else values[:, self.input_order.argsort()]

    @property
    def bias(self) -> Tensor | None:
        """The bias, for code that inspects it."""
        bias = self.packed.bias
        return None if bias is None else bias[: self.out_features].to(self.dtype)

    def _save_to_state_dict(
        self, destination: dict[str, Tensor], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias

    def extra_repr(self) -> str:
        """Return the shape and the format; PEFT's error messages show this."""
        shape = f"{self.in_features}, {self.out_features}, {self.packed.matrix.format.name}"
        return f'{shape}; an adapter needs tandem.load(..., dense_dtype="none")'


class PackedEmbedding(PackedModule):
    """Embeddings that stay packed; a call unpacks only the rows of its tokens."""

    def __init__(self, weight: DenseWeight, threads: CpuThreads, replaced: nn.Embedding) -> None:
        """Take over the settings of `replaced`, for which `is_packable_embedding` must be true."""
        super().__init__(weight, threads, replaced.weight.dtype)
        self.num_embeddings, self.embedding_dim = weight.out_features, weight.in_features
        self.padding_idx = replaced.padding_idx
        self.scale = embedding_scale(replaced)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the tokens' embeddings: (...) int64 -> (..., embedding_dim)."""
        rows = self.rows(input_ids)
        return rows if self.scale is None else rows * self.scale

    def rows(self, numbers: Tensor) -> Tensor:
        """Return the weight's rows `numbers`: (...) int64 -> (..., embedding_dim)."""
        dtype = self.dtype if self.dtype in VALUE_DTYPES else torch.float32
        rows = opaque(ROWS, read_rows, self.threads, self.packed, dtype, numbers)
        return rows.to(self.dtype)

    def extra_repr(self) -> str:
        """Return the shape and the format."""
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.packed.matrix.format.name}"


def embedding_scale(module: nn.Embedding) -> Tensor | None:
    """Return the factor by which a packable embedding multiplies its rows; None: no factor."""
    scale = getattr(module, _SCALE, None)
    dtype = module.weight.dtype
    return None if scale is None else torch.tensor(scale, dtype=dtype, device="cpu")


def read_rows(
    threads: CpuThreads, weight: DenseWeight, dtype: torch.dtype, numbers: Tensor
) -> Tensor:
    """Return the rows `numbers` of a packed matrix in `dtype`, one of `VALUE_DTYPES`.

    (...) int64 -> (..., in_features).
    """
    numbers = numbers.contiguous()
    out = torch.empty((*numbers.shape, weight.in_features), dtype=dtype, device="cpu")
    threads.dense.read(weight.native, numbers, out)
    return out


def is_packable_embedding(module: nn.Module) -> bool:
    """Whether a module is an embedding that only looks up rows, or also scales them by a number."""
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return False
    return type(module).forward is nn.Embedding.forward or hasattr(module, _SCALE)


def _multiply_one(threads: CpuThreads, weight: DenseWeight, x: Tensor) -> Tensor:
    return multiply(threads, [weight], x)[0]
