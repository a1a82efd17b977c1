"""Measures how much each part of a model matters: the divergence when that part alone is rounded.

Each part is rounded to a coarse format (`parts.PROBE`), and the model reads some hundred tokens. A
finer format's loss follows from its squared error, because divergence grows with the square of the
error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from tandem.checkpoint.importance import Importance
from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.executor import Executor
from tandem.experts.execution.reference_executor import ReferenceExecutor
from tandem.experts.store.host_store import HostLayer
from tandem.foreign_types import PreTrainedModel
from tandem.hf.runtime import require_runtime
from tandem.kernels.formats.packed import pack, unpack
from tandem.kernels.formats.weight_format import WeightFormat, find_format
from tandem.kernels.reference import ExpertWeights
from tandem.quality.parts import (
    PROBE,
    embeddings_of,
    expert_importance,
    linear_groups,
    linear_importance,
    projection,
    projections,
)
from tandem.quality.texts import Window

# A format with almost no error. What it changes in a bf16 model's answers is due to rounding of
# activations.
_NEXT_TO_NOTHING = find_format("int8-g32")

Progress = Callable[[int, int], None]  # (parts done, total)


class ProbingExecutor(ReferenceExecutor):
    """Computes one layer's experts with a rounded projection.

    Another executor computes all other layers.
    """

    def __init__(self, others: Executor, importance: Importance) -> None:
        """Start without a rounded projection; `others` computes layers that have none."""
        super().__init__(others.store)
        self.parameter = ""
        """The parameter name of the rounded projection; "": none is rounded."""
        self._others, self._importance = others, importance
        self._rounded: dict[int, ExpertWeights] = {}

    @contextmanager
    def rounding(self, parameter: str) -> Iterator[None]:
        """Round the projection `parameter` inside the context."""
        self.parameter = parameter
        try:
            yield
        finally:
            self.parameter = ""
            self._rounded.clear()

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        """Return a call's result; only the layer with the rounded projection is computed here."""
        if self.parameter in projections(self.store[call.layer]):
            return super().compute(call, functions)
        return self._others.compute(call, functions)

    def weights(self, host: HostLayer, expert: int) -> ExpertWeights:
        """Return one expert's weights with the selected projection rounded.

        Each expert is rounded once in a context of `rounding`.
        """
        if expert not in self._rounded:
            weights = host.weights(expert)
            weight = projection(weights, self.parameter)
            own = expert_importance(self._importance, host, self.parameter, expert, weight)
            rounded = _rounded(weight, own, PROBE)
            rounded = rounded.T if weights.is_transposed else rounded
            if self.parameter.endswith(".down_proj"):
                self._rounded[expert] = replace(weights, down=rounded)
            else:
                self._rounded[expert] = replace(weights, up=rounded)
        return self._rounded[expert]


def probe(
    model: PreTrainedModel,
    windows: Sequence[Window],
    importance: Importance,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Return the mean divergence in nats, by parameter name, when only its part is rounded.

    Linear layers with the same input are one part, and each is listed with that part's divergence.
    The divergence when a part is rounded with almost no error is subtracted, because it is due to
    the rounding of activations. Only windows as long as the first window are used. The model must
    be on the CPU; packed parts are skipped.
    """
    runtime = require_runtime(model)
    length = len(windows[0].ids)
    ids = torch.tensor([w.ids for w in windows if len(w.ids) == length], device="cpu")
    executor = ProbingExecutor(runtime.executor, importance)
    embeddings: list[Mapping[str, nn.Module]] = [embeddings_of(model)]
    groups = [*linear_groups(model, importance), *embeddings]
    experts = [name for layer in runtime.store for name in projections(layer)]
    found: dict[str, float] = {}
    with runtime.using(executor), torch.inference_mode():
        true = _log_chances(model, ids)
        with _rounded_group(groups[0], importance, _NEXT_TO_NOTHING):
            floor = _divergence(true, _log_chances(model, ids))
        for number, group in enumerate(groups):
            with _rounded_group(group, importance, PROBE):
                lost = _divergence(true, _log_chances(model, ids)) - floor
            found |= dict.fromkeys((f"{path}.weight" for path in group), lost)
            if progress is not None:
                progress(number + 1, len(groups) + len(experts))
        for number, name in enumerate(experts):
            with executor.rounding(name):
                found[name] = _divergence(true, _log_chances(model, ids)) - floor
            if progress is not None:
                progress(len(groups) + number + 1, len(groups) + len(experts))
    return found


def _log_chances(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float().log_softmax(-1)


def _divergence(true: Tensor, found: Tensor) -> float:
    return float((true.exp() * (true - found)).nan_to_num().sum(-1).double().mean())


def _rounded(weight: Tensor, importance: Tensor | None, fmt: WeightFormat) -> Tensor:
    return unpack(pack(weight, fmt, importance=importance))


@contextmanager
def _rounded_group(
    group: Mapping[str, nn.Module], importance: Importance, fmt: WeightFormat
) -> Iterator[None]:
    """Round the weights of a group's modules, given by path, to `fmt` inside the context."""
    before: list[tuple[nn.Module, nn.Parameter]] = []
    for path, module in group.items():
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        weighed = linear_importance(importance, path, weight.shape[1])
        rounded = _rounded(weight.detach(), weighed, fmt)
        before.append((module, weight))
        # A new parameter, so that a tied one does not change in the other module.
        module.weight = nn.Parameter(rounded.to(weight.dtype), requires_grad=False)
    try:
        yield
    finally:
        for module, weight in before:
            module.weight = weight
