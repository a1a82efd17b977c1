"""Helpers that inspect and compare loaded models."""

from typing import Any

import torch
from torch import Tensor

from tandem.hf.config import OffloadConfig
from tandem.hf.runtime import require_runtime
from tandem.sim.systems import SimulatedSettings
from tests.architectures import result_of, tiny_inputs


class SimulatedConfig(OffloadConfig):
    """Options with any policy that the simulator knows."""

    planner = SimulatedSettings


def runtime_in(model: Any) -> Any:
    """Return a loaded model's `Runtime`, untyped, because a test knows its executor's type."""
    return require_runtime(model)


def logits_of(model: Any) -> Tensor:
    """Return a model's logits for `tiny_inputs`."""
    with torch.no_grad():
        return result_of(model(**tiny_inputs(model)))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the difference of two results relative to the second one's norm."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()
