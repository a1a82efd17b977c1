"""Tests of forced routing on a GPU: a step's choices are copied once, without a wait."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.experts.execution.batch import ExpertFunctions, RoutedCall
from tandem.experts.execution.executor import Executor
from tandem.experts.execution.forced_routing import ForcedRouting
from tandem.experts.execution.recorder import RoutingRecorder
from tandem.policy.plan import LayerLoad
from tandem.trace import RoutingTrace, TraceMeta
from tests.experts.machines import FUNCTIONS, GEOMETRY, HIDDEN, make_store

NUM_LAYERS = 6
# Memory without contents on another device, so that copies to it count as copies to a GPU.
ELSEWHERE = torch.device("meta")


class Copies(TorchDispatchMode):
    """Records copies between devices, and whether they are asynchronous."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.goes_on: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name == "aten::_to_copy" and kwargs.get("device") == ELSEWHERE:
            self.goes_on.append(bool(kwargs.get("non_blocking")))
        return func(*args, **kwargs)


class Noting(Executor):
    """Computes nothing and records its calls."""

    def __init__(self) -> None:
        super().__init__(make_store(GEOMETRY._replace(num_layers=NUM_LAYERS)))
        self.calls: list[RoutedCall] = []
        self.known: list[LayerLoad] = []

    def expect(self, known: Sequence[LayerLoad]) -> None:
        self.known += known

    def compute(self, call: RoutedCall, functions: ExpertFunctions) -> Tensor:
        self.calls.append(call)
        return torch.zeros_like(call.hidden)


def make_trace(num_tokens: int) -> RoutingTrace:
    random = np.random.default_rng(0)
    experts = random.random((num_tokens, NUM_LAYERS, GEOMETRY.num_experts)).argsort(-1)
    return RoutingTrace(
        meta=TraceMeta(
            model="made up",
            n_moe_layers=NUM_LAYERS,
            n_experts=GEOMETRY.num_experts,
            top_k=GEOMETRY.top_k,
        ),
        experts=experts[..., : GEOMETRY.top_k].astype(np.uint8),
        seq_offsets=np.array([0, num_tokens]),
    )


def run_step(forced: ForcedRouting, num_tokens: int, device: torch.device) -> None:
    forced.begin_step(list(range(num_tokens)), is_prefill=num_tokens > 1)
    hidden = torch.zeros(num_tokens, HIDDEN, device=device)
    index = torch.zeros(num_tokens, GEOMETRY.top_k, dtype=torch.int64, device=device)
    for layer in range(NUM_LAYERS):
        forced.execute(layer, hidden, index, index.float(), FUNCTIONS)


def test_a_steps_choices_are_copied_once_and_nobody_waits() -> None:
    forced = ForcedRouting(Noting(), make_trace(20))
    for num_tokens in (8, 1, 1):
        with Copies() as copies:
            run_step(forced, num_tokens, ELSEWHERE)
        assert copies.goes_on == [True, True]  # experts and weights


def test_every_layer_gets_its_own_choice_of_the_traces_next_tokens() -> None:
    inner, trace = Noting(), make_trace(20)
    forced, at = ForcedRouting(inner, trace), 0
    for num_tokens in (8, 1, 3):
        inner.calls.clear()
        run_step(forced, num_tokens, torch.device("cpu"))
        for call in inner.calls:
            expected = trace.experts[at : at + num_tokens, call.layer]
            assert call.top_k_index.tolist() == expected.tolist()
        at += num_tokens


def test_known_loads_reach_the_executor_unless_the_trace_replaces_them() -> None:
    inner, known = Noting(), [LayerLoad(0, (1,), (1,))]
    RoutingRecorder(inner).expect(known)
    assert inner.known == known
    ForcedRouting(inner, make_trace(20)).expect(known)
    assert inner.known == known
