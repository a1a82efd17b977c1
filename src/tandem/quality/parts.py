"""The parts of a model that may have different formats, and the errors that formats cause.

A part is one projection of all experts of a layer, or the linear layers that read the same input,
or the embeddings. Errors are squared, weighted by importance, and measured on a sample of evenly
spaced experts and rows.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tandem.checkpoint.importance import Importance
from tandem.experts.store.host_store import HostLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hf.dense import packable_layers
from tandem.hf.packed_layers import is_packable_embedding
from tandem.kernels.formats.packed import pack, unpack
from tandem.kernels.formats.weight_format import WeightFormat, find_format
from tandem.kernels.reference import ExpertWeights

# The format that measures a part's sensitivity. It is coarse, so that the loss stands out from
# noise.
PROBE = find_format("q3_k")
# Of each size the best format that can be written. A choice among more takes longer than it gains.
CHOICES = tuple(
    find_format(name)
    for name in (
        "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "q2_k", "q3_k", "iq4_xs", "iq4_nl",
        "q4_k", "int4z", "int5", "q5_k", "q6_k", "int8", "int8-g32", "bf16",
    )
)  # fmt: skip
_MOST_EXPERTS, _MOST_ROWS = 8, 256  # of a sample


def linear_importance(importance: Importance | None, path: str, cols: int) -> Tensor | None:
    """Return the importance of a linear layer's inputs, (cols,); None if unknown."""
    found = None if importance is None else importance.of(f"{path}.weight", (1, cols))
    return None if found is None else found[0]


def linear_groups(
    model: PreTrainedModel, importance: Importance | None
) -> Iterator[dict[str, nn.Linear]]:
    """Yield groups of linear layers by path; siblings that read the same input form one group.

    A group can be computed as one product if its layers have the same format.
    """
    groups: dict[tuple[int, int, float], dict[str, nn.Linear]] = {}
    for path, parent, _, linear in packable_layers(model):
        cols = linear.weight.shape[1]
        weighed = linear_importance(importance, path, cols)
        mark = -1.0 if weighed is None else float(weighed.square().sum())
        groups.setdefault((id(parent), cols, mark), {})[path] = linear
    yield from groups.values()


def embeddings_of(model: PreTrainedModel) -> dict[str, nn.Embedding]:
    """Return the module of the input embeddings by its path; empty if it cannot be packed."""
    module = model.get_input_embeddings()
    if not is_packable_embedding(module):
        return {}
    path = next(path for path, own in model.named_modules() if own is module)
    return {path: module}


def sampled_losses(
    weight: Tensor, importance: Tensor | None, formats: Sequence[WeightFormat]
) -> Tensor:
    """Return each format's squared error on a sample of a weight's rows, weighted by importance.

    `weight` is (rows, cols). One value follows those of `formats`: the sample's own weighted
    square, which is the error if all weights became 0.
    """
    step = max(1, len(weight) // _MOST_ROWS)
    sample = weight[::step][:_MOST_ROWS].float()
    counts = torch.ones(sample.shape[1], device="cpu") if importance is None else importance
    errors = [
        ((unpack(pack(sample, fmt, importance=importance)) - sample).square() * counts).sum()
        for fmt in formats
    ]
    return torch.stack([*errors, (sample.square() * counts).sum()]).double()


def sampled_experts(layer: HostLayer) -> list[int]:
    """Return the indices of the layer's experts that are sampled, evenly spaced."""
    count = layer.arrivals.num_experts
    return list(range(0, count, max(1, count // _MOST_EXPERTS)))[:_MOST_EXPERTS]


def expert_losses(
    layer: HostLayer, importance: Importance | None, formats: Sequence[WeightFormat]
) -> list[Tensor]:
    """Return for each of a layer's two projections the sum of the sampled experts' losses.

    An expert's losses are its `sampled_losses`.
    """
    experts = [(expert, layer.weights(expert)) for expert in sampled_experts(layer)]
    found = []
    for name in projections(layer):
        total = torch.zeros(len(formats) + 1, dtype=torch.float64, device="cpu")
        for expert, weights in experts:
            weight = projection(weights, name)
            own = expert_importance(importance, layer, name, expert, weight)
            total += sampled_losses(weight, own, formats)
        found.append(total)
    return found


def projections(layer: HostLayer) -> tuple[str, str]:
    """Return the parameter names of a layer's first and second projection."""
    arrivals = layer.arrivals
    return f"{arrivals.name}.{arrivals.up_name}", f"{arrivals.name}.down_proj"


def projection(weights: ExpertWeights, parameter: str) -> Tensor:
    """Return an expert's weight (outputs, inputs) of the projection with the name `parameter`."""
    weight = weights.down if parameter.endswith(".down_proj") else weights.up
    return weight.T if weights.is_transposed else weight


def expert_importance(
    importance: Importance | None, layer: HostLayer, parameter: str, expert: int, weight: Tensor
) -> Tensor | None:
    """Return the importance of the inputs of an expert's projection; None if unknown."""
    if importance is None:
        return None
    found = importance.of(parameter, (layer.arrivals.num_experts, weight.shape[1]))
    return None if found is None else found[expert]
