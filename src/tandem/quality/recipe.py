"""Recipes: a format for each part of a model, for the least loss in a number of bytes.

A part's loss in a format is its measured divergence (`probing`), times the format's squared error
divided by the probe format's. For a model that has not been probed, relative errors of all parts
have equal weight, as in llama.cpp's files.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod

import torch
from torch import Tensor, nn

from tandem.checkpoint.importance import Importance
from tandem.core.errors import ConfigError
from tandem.core.units import format_bytes
from tandem.experts.store.host_store import HostLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hf.checkpoint import AnyCheckpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.dense import tied_weights
from tandem.hf.dense_bytes import dense_bytes_with
from tandem.hf.importance import given_importance, with_importance_file
from tandem.hf.load import load_checkpoint
from tandem.hf.runtime import require_runtime
from tandem.kernels.formats.expert import ExpertLayout
from tandem.kernels.formats.weight_format import (
    FILE_ALIGNMENT_BYTES,
    WeightFormat,
    aligned,
    expert_format,
    find_expert_format,
    formats_of,
)
from tandem.quality.budget import Option, choose_within
from tandem.quality.parts import (
    CHOICES,
    PROBE,
    embeddings_of,
    expert_losses,
    linear_groups,
    linear_importance,
    projections,
    sampled_losses,
)

_LEAST_LOSS = 1e-9  # a probe that seems to help is noise and gets this loss
# Recipes with at least this many bits use no grids. There grids hardly lose less, and they decode
# at half of other formats' bytes per second with AVX-512, at a quarter or less with AVX2.
_BITS_WITHOUT_GRIDS = 4

Progress = Callable[[int, int], None]  # (bytes of experts measured, total)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A format for each part of a model."""

    expert_formats: list[str]
    """The format of each MoE layer's experts, in the notation of `expert_dtype`."""
    dense_formats: dict[str, str]
    """The formats of linear layers and embeddings, by path."""
    num_bytes: int
    """Size of the packed model's tensors."""
    num_weights: int

    def options(self) -> dict[str, object]:
        """Return the recipe as keyword arguments of `tandem.pack`."""
        return {
            "expert_formats": self.expert_formats or None,
            "dense_formats": self.dense_formats,
            "expert_dtype": "auto",
            "dense_dtype": "none",
        }

    def lines(self) -> Iterator[str]:
        """Yield the recipe as lines of text."""
        for name, run in groupby(enumerate(self.expert_formats), key=lambda pair: pair[1]):
            numbers = [number for number, _ in run]
            layers = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
            yield f"experts of MoE layer {layers}: {name}"
        by_format: dict[str, list[str]] = defaultdict(list)
        for path, name in self.dense_formats.items():
            by_format[name].append(path)
        for name, paths in by_format.items():
            yield f"{name}: {', '.join(paths)}"


@dataclass(slots=True)
class Measured:
    """The options of a model's parts, and the bytes that every recipe takes besides the parts."""

    layers: list[list[Option]]
    linear: dict[tuple[str, ...], list[Option]]
    fixed_bytes: int
    num_weights: int

    def recipe(self, num_bytes: int) -> Recipe:
        """Return a recipe of small loss for at most `num_bytes` bytes.

        Raises `ConfigError` if the smallest recipe exceeds `num_bytes`, or if `num_bytes` exceeds
        the largest recipe by more than 1 %.
        """
        parts = [*self.layers, *self.linear.values()]
        if 8 * num_bytes >= _BITS_WITHOUT_GRIDS * self.num_weights:
            parts = [[option for option in part if not _has_grid(option)] for part in parts]
        chosen = choose_within(parts, num_bytes - self.fixed_bytes)
        least, most = (
            self.fixed_bytes + sum(of(option.num_bytes for option in part) for part in parts)
            for of in (min, max)
        )
        if chosen is None or num_bytes > 1.01 * most:
            raise ConfigError(
                f"no recipe takes {format_bytes(num_bytes)}: this model takes from "
                f"{format_bytes(least)} to {format_bytes(most)} "
                f"({8 * least / self.num_weights:.2f} to {8 * most / self.num_weights:.2f} bits a "
                "weight); give a size between them"
            )
        names = [option.name for option in chosen]
        formats = {
            path: name
            for paths, name in zip(self.linear, names[len(self.layers) :], strict=True)
            for path in paths
        }
        size = self.fixed_bytes + sum(option.num_bytes for option in chosen)
        return Recipe(names[: len(self.layers)], formats, size, self.num_weights)


def _has_grid(option: Option) -> bool:
    formats = formats_of(find_expert_format(option.name))
    return any(fmt.encoding.grid is not None for fmt in formats)


class _MeasuringSink:
    """Receives the layers of a model that is being loaded, measures them, and drops them."""

    def __init__(self, importance: Importance | None, progress: Progress | None) -> None:
        self.layers: dict[int, list[Option]] = {}
        self.num_weights = 0
        self._importance, self._progress = importance, progress
        self._done = self._all = 0

    def begin(self, expected_bytes: int, table_bytes: int) -> None:
        """Record the total bytes of experts, which are passed to `progress`."""
        self._all = expected_bytes

    def resume(self, layer: HostLayer) -> None:
        """Do nothing: no layer was measured in an earlier run."""

    def take(self, layer: HostLayer) -> None:
        """Measure a complete layer, and drop its weights."""
        self.layers[layer.layer] = _layer_options(layer, self._importance)
        self.num_weights += sum(prod(shape) for shape in layer.arrivals.shapes.values())
        self._done += layer.num_bytes
        # Replaces the tensors by views of the same shape on a single byte.
        layer.move_to(
            {name: one.new_zeros(1).expand(one.shape) for name, one in layer.stored().items()}
        )
        if self._progress is not None:
            self._progress(self._done, self._all)


def measure_parts(
    checkpoint: AnyCheckpoint, offload: OffloadConfig, progress: Progress | None = None
) -> Measured:
    """Read a model once, layer by layer, and measure size and loss of each part in each format.

    `offload` names the importance file. This takes memory for the dense parts and one or two MoE
    layers.
    """
    offload = with_importance_file(offload, checkpoint)
    importance = given_importance(offload)
    plain = dataclasses.replace(offload, expert_dtype="auto", dense_dtype="none", importance=None)
    sink = _MeasuringSink(importance, progress)
    model = load_checkpoint(checkpoint, plain, sink=sink)
    require_runtime(model).executor.close()
    linear = _linear_options(model, importance)
    weights = [
        model.get_submodule(path).get_parameter("weight") for paths in linear for path in paths
    ]
    fixed = dense_bytes_with(model, {}) - _bytes_of(model, linear)
    num_weights = sink.num_weights + sum(weight.numel() for weight in weights)
    layers = [sink.layers[number] for number in sorted(sink.layers)]
    return Measured(layers, linear, fixed, num_weights)


def _bytes_of(model: PreTrainedModel, linear: Mapping[tuple[str, ...], object]) -> int:
    """Return the bytes that `dense_bytes_with` counts for the modules at the paths in `linear`."""
    tied, total = tied_weights(model), 0
    for path in (path for paths in linear for path in paths):
        own = model.get_submodule(path).named_parameters(recurse=False)
        total += sum(p.nbytes for name, p in own if f"{path}.{name}" not in tied)
    return total


def _layer_options(layer: HostLayer, importance: Importance | None) -> list[Option]:
    """Return a layer's options: one for every pair of formats of its two projections."""
    losses = [
        _losses(name, squares, importance)
        for name, squares in zip(
            projections(layer), expert_losses(layer, importance, CHOICES), strict=True
        )
    ]
    options = []
    for (first, up), (second, down) in product(enumerate(CHOICES), repeat=2):
        size = _stride(layer, up, down) * layer.arrivals.num_experts
        loss = losses[0][first] + losses[1][second]
        options.append(Option(expert_format(up, down).name, size, loss))
    return options


def _stride(layer: HostLayer, up: WeightFormat, down: WeightFormat) -> int:
    """Return the bytes of an expert in a packed checkpoint, with the gap to the next expert."""
    arrivals, weights = layer.arrivals, layer.weights(0)
    rows, cols = arrivals.shapes["down_proj"][1:]
    hidden, inner = (cols, rows) if weights.is_transposed else (rows, cols)
    layout = ExpertLayout(
        up, hidden, inner, is_gated=arrivals.up_name == "gate_up_proj",
        has_bias=weights.down_bias is not None, second_format=down,
    )  # fmt: skip
    return aligned(layout.num_bytes, FILE_ALIGNMENT_BYTES)


def _linear_options(
    model: PreTrainedModel, importance: Importance | None
) -> dict[tuple[str, ...], list[Option]]:
    """Return the options of linear layers and embeddings.

    The keys are the paths of the modules that must share a format.
    """
    embeddings = embeddings_of(model)
    groups: list[Mapping[str, nn.Module]] = [*linear_groups(model, importance)]
    found: dict[tuple[str, ...], list[Option]] = {}
    for group in [*groups, embeddings] if embeddings else groups:
        squares = torch.zeros(len(CHOICES) + 1, dtype=torch.float64, device="cpu")
        sizes = [0] * len(CHOICES)
        for path, module in group.items():
            weight = module.get_parameter("weight").detach()
            known = None if path in embeddings else importance
            weighed = linear_importance(known, path, weight.shape[1])
            squares += sampled_losses(weight, weighed, CHOICES)
            has_bias = "bias" in dict(module.named_parameters(recurse=False))
            for number, fmt in enumerate(CHOICES):
                bias = 4 * fmt.padded_rows(len(weight)) * has_bias
                sizes[number] += fmt.matrix_bytes(*weight.shape) + bias
        losses = _losses(f"{next(iter(group))}.weight", squares, importance)
        names = [fmt.name for fmt in CHOICES]
        found[tuple(group)] = [Option(*one) for one in zip(names, sizes, losses, strict=True)]
    return found


def _losses(parameter: str, squares: Tensor, importance: Importance | None) -> Sequence[float]:
    """Return a part's loss in each of `CHOICES`, from `squares`, its `sampled_losses`."""
    errors, own = squares[:-1], squares[-1].clamp(min=1e-30)
    probed = None if importance is None else importance.divergence_of(parameter)
    of_probe = errors[CHOICES.index(PROBE)].clamp(min=1e-30)
    losses: list[float] = (
        errors / own if probed is None else errors / of_probe * max(probed, _LEAST_LOSS)
    ).tolist()
    return losses
