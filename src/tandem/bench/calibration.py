"""Learns a model's residual vectors from a text, and measures how well they predict experts.

The text is split into windows. The residuals are learned from the first three quarters of them. On
the other windows, predictions with and without the residual are compared with the routers' real
choices (DALI's tables 5 and 8).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.bench.routing_recording import recording
from tandem.core.errors import ConfigError, UnsupportedModelError
from tandem.foreign_types import PreTrainedModel
from tandem.hf.lookahead.look_ahead import SOURCES, LookAhead
from tandem.hf.lookahead.residuals import Residuals
from tandem.hf.lookahead.routers import find_routers
from tandem.hf.runtime import require_experts
from tandem.trace import RoutingTrace

WINDOW_TOKENS = 256
BATCHES = (1, 2, 4, 8, 16, 32)

Progress = Callable[[int, int], None]  # (windows done, total)
Ints = npt.NDArray[np.integer]


class Likeness(NamedTuple):
    """Cosines between predicted and true router inputs, by layer, without and with the residual."""

    plain: list[float]
    residual: list[float]


class Calibration(NamedTuple):
    """What `calibrate` learned from `taught_tokens` tokens, and what it measured on the rest."""

    residuals: Residuals
    taught_tokens: int
    judged: RoutingTrace
    likeness: Likeness


def calibrate(
    model: PreTrainedModel, token_ids: Sequence[int], progress: Progress | None = None
) -> Calibration:
    """Learn a model's residual vectors from three quarters of a text, and measure them on the rest.

    Raises `UnsupportedModelError` if the model's routers cannot be run ahead, and `ConfigError` for
    a text of fewer than four windows.
    """
    windows = [
        token_ids[at : at + WINDOW_TOKENS]
        for at in range(0, len(token_ids) - WINDOW_TOKENS + 1, WINDOW_TOKENS)
    ]
    if len(windows) < 4:
        raise ConfigError(
            f"the text has {len(token_ids)} tokens; expected at least {4 * WINDOW_TOKENS}"
        )
    num_taught = 3 * len(windows) // 4
    runtime = require_experts(model)
    with runtime.using(runtime.cpu_executor()):  # calibration needs no planning
        routers = find_routers(model, runtime.bound)
        if isinstance(routers, str):
            name = type(model).__name__
            raise UnsupportedModelError(f"the routers of {name} cannot be run ahead: {routers}")
        residuals = Residuals(len(routers), routers[0].hidden_size, model.device)
        ahead = LookAhead(routers, residuals, SOURCES)
        try:
            for number, window in enumerate(windows[:num_taught]):
                _run(model, window)
                _tell(progress, number + 1, len(windows))
            residuals.is_fixed = True
            ahead.cosines = []
            with recording(model, ahead) as recorder:
                for number, window in enumerate(windows[num_taught:], num_taught):
                    recorder.begin_sequences()
                    _run(model, window)
                    _tell(progress, number + 1, len(windows))
                judged = recorder.trace(str(model.config.model_type))
        finally:
            ahead.close()
    likeness = _likeness(ahead.cosines, len(routers) - 1)
    return Calibration(residuals, num_taught * WINDOW_TOKENS, judged, likeness)


@torch.no_grad()
def _run(model: PreTrainedModel, window: Sequence[int]) -> None:
    ids: Tensor = torch.tensor([list(window)], device="cpu")
    model(input_ids=ids.to(model.device), use_cache=False)


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


def _likeness(cosines: Sequence[tuple[float, float]], num_pairs: int) -> Likeness:
    values = np.array(cosines).reshape(-1, num_pairs, 2).mean(axis=0)
    return Likeness(values[:, 0].tolist(), values[:, 1].tolist())


def accuracy_by_batch(
    trace: RoutingTrace, count: int, batches: Sequence[int] = BATCHES
) -> dict[str, list[float]]:
    """Return the mean share of the `count` busiest experts that each predictor predicts.

    Maps each predictor's name to its shares, one for each batch size. A batch consists of randomly
    drawn tokens. Experts with equal load are interchangeable.
    """
    assert trace.predicted is not None
    draw = np.random.default_rng(0)
    found: dict[str, list[float]] = {}
    for place, name in enumerate(trace.meta.predictors):
        found[name] = [
            float(
                np.mean(
                    [
                        _top_accuracy(trace, place, layer, tokens, count)
                        for tokens in np.array_split(
                            draw.permutation(trace.num_tokens), trace.num_tokens // batch
                        )[:256]
                        for layer in range(1, trace.meta.n_moe_layers)
                    ]
                )
            )
            for batch in batches
        ]
    return found


def _top_accuracy(trace: RoutingTrace, place: int, layer: int, tokens: Ints, count: int) -> float:
    assert trace.predicted is not None
    num_experts = trace.meta.n_experts
    predicted = np.bincount(trace.predicted[tokens, layer, place].ravel(), minlength=num_experts)
    true = np.bincount(trace.experts[tokens, layer].ravel(), minlength=num_experts)
    chosen = np.argsort(-predicted, kind="stable")[:count]
    least = max(1, int(np.sort(true)[-count]))
    return float((true[chosen] >= least).mean())
