"""Tests of captured steps alone, with the twin of CUDA's graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from tandem.decode.cuda.graphs import CapturedStep, new_graphed_step
from tandem.kernels.opaque_calls import opaque
from tests.decode.twin_capture import TwinCapture, read_on_host


def test_a_step_that_cannot_be_captured_stays_the_models_and_says_why() -> None:
    x = torch.zeros(4)

    def step() -> torch.Tensor:
        return x * 2 if read_on_host(x) else x + 1

    graphed = new_graphed_step(step, 1e-2, TwinCapture)
    with pytest.warns(UserWarning, match=r"own code, slower: called a synchronizing"):
        results = [graphed().tolist() for _ in range(5)]
    assert results == [[1.0] * 4] * 5
    assert not graphed.is_replaying


def test_a_step_whose_kernels_no_compiler_takes_is_captured_as_the_model_does_it() -> None:
    x = torch.zeros(4)

    def refused() -> Callable[[], torch.Tensor]:
        raise RuntimeError("too many registers\nand what a compiler says beside")

    graphed = new_graphed_step(lambda: x + 1, 1e-2, TwinCapture, record_first=refused)
    with pytest.warns(UserWarning, match="more kernels than need be: too many registers$"):
        results = [graphed().tolist() for _ in range(5)]
    assert results == [[1.0] * 4] * 5
    assert graphed.is_replaying


def test_a_capture_that_breaks_is_undone() -> None:
    x, calls = torch.zeros(4), [0]
    captures: list[TwinCapture] = []

    class Capture(TwinCapture):
        def begin(self) -> None:
            captures.append(self)
            super().begin()

    def step() -> torch.Tensor:
        calls[0] += 1
        result = x + 1
        if captures and captures[-1].broken is None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return result

    graphed = new_graphed_step(step, 1e-2, Capture)
    with pytest.warns(UserWarning, match="operation not permitted"):
        graphed()
    assert captures[0].broken is not None
    recorded = len(captures[0].broken.operations)
    assert graphed().tolist() == [1.0] * 4
    assert recorded == 1
    assert calls == [5]  # a step, a dry run, a capture, the step again, a step


def test_what_is_not_cut_runs_once_before_it_is_captured() -> None:
    x, captures, seen = torch.ones(4), [], []

    class Capture(TwinCapture):
        def begin(self) -> None:
            captures.append(self)
            super().begin()

    def experts(layer: int, hidden: torch.Tensor, *args: object) -> torch.Tensor:
        return hidden * 2

    class Uncut:
        def __call__(
            self, layer: int, hidden: torch.Tensor, *args: Any, **more: Any
        ) -> torch.Tensor:
            seen.append(len(captures))
            return hidden * 2

        def take_router_input(self, layer: int, hidden: torch.Tensor) -> bool:
            return False

        def around(self) -> AbstractContextManager[None]:
            return nullcontext()

        def give_up(self, error: Exception) -> bool:
            return False

    def step() -> torch.Tensor:
        hidden: torch.Tensor = opaque("experts", experts, 0, x + 1, x, x, None)
        return hidden + 1

    graphed = new_graphed_step(step, 1e-2, Capture, Uncut)
    results = [graphed().tolist() for _ in range(6)]
    assert results == [[5.0] * 4] * 6
    assert seen == [0, 1]  # compiled outside of the capture, then captured
    assert isinstance(graphed.recording, CapturedStep)
    assert graphed.recording.num_segments == 1
    assert graphed.is_replaying


def test_pieces_that_give_other_logits_are_given_up() -> None:
    calls = [0]

    def step() -> torch.Tensor:
        calls[0] += 1
        return torch.full((4,), float(calls[0]))

    graphed = new_graphed_step(step, 1e-2, TwinCapture)
    with pytest.warns(UserWarning, match="its recording gives other logits"):
        results = [graphed()[0].item() for _ in range(6)]
    assert graphed.why_not is not None
    assert results == sorted(results)
