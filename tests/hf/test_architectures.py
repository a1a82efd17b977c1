"""Tests that every architecture on the experts interface gives Transformers' results.

They write docs/models.md: `pytest tests/hf/test_architectures.py --write-docs`.
"""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import tandem
from tandem.experts.tracing.events import LayerExecuted
from tandem.hf.adapters import put_on_interface
from tandem.hf.compat import compresses_windows
from tandem.hf.dense import packable_layers
from tandem.hf.lookahead.routers import find_routers
from tandem.hf.router_layers import router_layers
from tandem.kv_cache.stand_ins import sees_all
from tests.architectures import (
    adapted,
    architectures,
    build_tiny_model,
    by_kind,
    experts_blocks,
    experts_modules,
    next_inputs,
    result_of,
    takes_cache,
    tiny_inputs,
)
from tests.generate.test_architectures import NOT_TOKEN_BY_TOKEN
from tests.hf import models_document
from tests.hf.models_document import ModelsDocument
from tests.inside import runtime_in
from tests.recording.test_native_operations import TABLE

MUST_RUN = {
    *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "gpt_oss", "deepseek_v2"),
    *("deepseek_v3", "glm4_moe", "gemma4", "mixtral", "olmoe", "phimoe", "granitemoe"),
    *("granitemoehybrid", "nemotron_h", "minimax_m2", "ernie4_5_moe", "hunyuan_v1_moe", "lfm2_moe"),
}
# Gated, with biases and transposed, un-gated; whole models of all are saved in fp32.
SAVED_AGAIN = {"mixtral", "gpt_oss", "nemotron_h"}
CheckRow = Callable[[str, str, str | None], None]
# Number of a module, what it was called with, what it returned.
ExpertsCall = tuple[int, Any, torch.Tensor]


@pytest.fixture(scope="module")
def check_row(request: pytest.FixtureRequest) -> Iterator[CheckRow]:
    """Compare an architecture's rows with the document's, row by row.

    Tests may then run in several processes or alone. `--write-docs` writes all rows at the end.
    """
    if request.config.getoption("--write-docs"):
        found = ModelsDocument(
            refused=models_document.models_outside_the_interface(),
            released=models_document.released_section(
                models_document.PATH.read_text(encoding="utf-8")
            ),
        )
        yield found.add
        assert set(found.run) == set(architectures()), "not written: not all of them ran"
        models_document.PATH.write_text(found.text(), encoding="utf-8")
    else:
        document = models_document.written()
        yield (lambda *_: None) if document is None else document.check


def watch_experts(model: Any) -> list[int]:
    """Return a list to which each run of an experts module appends the module's number."""
    calls: list[int] = []
    for number, module in enumerate(experts_blocks(model)):
        module.register_forward_hook(lambda *_, number=number: calls.append(number))
    return calls


def run_steps(model: Any) -> list[torch.Tensor]:
    """Return the results of a prompt and, where there is a cache, of one decode step after it."""
    with torch.no_grad():
        outputs = model(**tiny_inputs(model))
        results = [result_of(outputs)]
        if takes_cache(model):
            results.append(result_of(model(**next_inputs(model, outputs))))
    return results


def describe(name: str, model: Any, experts: Any) -> str:
    words = ["gated" if experts.has_gate else "un-gated"]
    words += ["biased"] if experts.has_bias else []
    words += ["transposed"] if experts.is_transposed else []
    words += [] if experts.is_concatenated else ["interleaved"]
    words += ["post-norm"] if getattr(experts, "has_post_expert_norm", False) else []
    words += ["by an adapter"] if name in adapted() else []
    steps = "prompt, decode" if takes_cache(model) else "prompt (no cache)"
    cells = [
        type(model).__name__,
        ", ".join(words),
        steps,
        decode_step(name),
        steps_on_gpu(name, model),
    ]
    return " | ".join(cells)


def decode_step(name: str) -> str:
    """Describe how a decode step runs, as `tests/generate` and `tests/decode` find it."""
    if name in NOT_TOKEN_BY_TOKEN:
        return "none"
    pinned = json.loads(TABLE.read_text(encoding="utf-8")).get(name)
    if pinned is None:
        return "recorded, in slots"
    left = sum(pinned["torch"].values())
    return f"recorded, in slots: {pinned['calls']} calls, {left} of torch's operations"


def steps_on_gpu(name: str, model: Any) -> str:
    """Describe how a decode step runs on a GPU; `tests/generate` checks which models use slots."""
    if name in NOT_TOKEN_BY_TOKEN:
        return "none"
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    has_kernels = sees_all(model) or any(map(compresses_windows, layers))
    return "captured, in slots" + ("" if has_kernels else ", torch attends")


def aligned(model: Any) -> Any:
    """Copy the dense weights from the mapped file.

    The order of torch's additions depends on addresses modulo 64, which differ between files.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.fixture(scope="module")
def tiny(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """An architecture's tiny model and its checkpoint, shared by its tests."""
    model, folder = build_tiny_model(name), tmp_path_factory.mktemp(name)
    model.save_pretrained(folder)
    yield model, folder
    shutil.rmtree(folder)


@pytest.mark.seam
@pytest.mark.parametrize("name", by_kind(architectures()), scope="module")
def test_logits_equal_transformers_eager(
    name: str, tiny: tuple[Any, Path], check_row: CheckRow
) -> None:
    model, folder = tiny
    if experts_modules(model):
        model.set_experts_implementation("eager")
    offloaded = tandem.load(folder, dtype="float32")
    events: list[LayerExecuted] = []
    runtime_in(offloaded).executor.listeners.append(events.append)
    eager_calls, calls = watch_experts(model), watch_experts(offloaded)
    expected, actual = run_steps(model), run_steps(aligned(offloaded))
    reloaded = run_steps(aligned(tandem.load(tandem.save(offloaded, folder / "packed"))))
    modules: list[Any] = experts_modules(offloaded)
    assert calls == eager_calls != []
    assert [event.layer for event in events] == [modules[n].tandem_experts.layer for n in calls]
    assert all(module.down_proj.numel() == 0 for module in modules)
    for e, a, r in zip(expected, actual, reloaded, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-5)
        torch.testing.assert_close(r, a, rtol=0, atol=0)
    routers = find_routers(offloaded, runtime_in(offloaded).bound)
    check_row(
        name, describe(name, model, modules[0]), routers if isinstance(routers, str) else None
    )


@pytest.mark.parametrize("name", by_kind(architectures()), scope="module")
def test_quantized_experts_are_near_and_saved_exactly(name: str, tiny: tuple[Any, Path]) -> None:
    """The test detects swapped gate and up, a missing bias, a transposed matrix, a wrong clamp."""
    model, folder = tiny
    calls: list[ExpertsCall] = []
    for number, module in enumerate(experts_blocks(model)):
        module.register_forward_hook(
            lambda _, i, o, number=number: calls.append((number, i, result_in(o)))
        )
    run_steps(model)
    offloaded = tandem.load(folder, dtype="float32", expert_dtype="int8-g32")
    assert calls
    outputs = outputs_of(offloaded, calls)
    for (*_, expected), actual in zip(calls, outputs, strict=True):
        assert (actual - expected).norm() < 0.03 * expected.norm()
    if name in SAVED_AGAIN:
        reloaded = tandem.load(tandem.save(offloaded, folder / "packed-int8"))
        again = outputs_of(reloaded, calls)
        assert all(map(torch.equal, again, outputs))


@pytest.mark.parametrize("name", architectures(), scope="module")
def test_what_experts_weights_depend_on_is_not_packed(name: str, tiny: tuple[Any, Path]) -> None:
    """These are routers: parameters that weights depend on and hidden states do not.

    Where no weight depends on a parameter (Llama 4), the router's weight stays unpacked.
    """
    model = copy.deepcopy(tiny[0])
    put_on_interface(model)
    received: list[list[torch.Tensor]] = []
    for module in experts_modules(model):
        module.register_forward_pre_hook(
            lambda _, args, options: received.append([*args, *options.values()]), with_kwargs=True
        )
        module.forward = lambda hidden, *_, **__: hidden
    model.requires_grad_(True)
    model(**tiny_inputs(model) | {"use_cache": False})
    deciding: set[int] = set()
    for hidden, _, weights in received:
        deciding |= parameters_of(weights) - parameters_of(hidden)
    linear = {m for m in model.modules() if isinstance(m, nn.Linear) and id(m.weight) in deciding}
    assert linear == router_layers(model) or name == "llama4"
    assert not any(module in linear for *_, module in packable_layers(model))


def parameters_of(value: torch.Tensor) -> set[int]:
    """Return the ids of the parameters that a value depends on."""
    found, seen, ahead = set(), set(), [value.grad_fn]
    while ahead:
        node: Any = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found |= {id(node.variable)} if hasattr(node, "variable") else set()
            ahead += [inner for inner, _ in node.next_functions]
    return found


@torch.no_grad()
def outputs_of(model: Any, calls: list[ExpertsCall]) -> list[torch.Tensor]:
    """Return the experts' outputs for the same inputs, so that routing is the same."""
    return [result_in(experts_blocks(model)[number](*inputs)) for number, inputs, _ in calls]


def result_in(outputs: Any) -> torch.Tensor:
    """Return the experts' output, if a block returns more."""
    result: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return result


@pytest.mark.seam
def test_all_required_architectures_are_on_the_interface() -> None:
    assert set(architectures()) >= MUST_RUN


def test_models_document_is_true(request: pytest.FixtureRequest) -> None:
    """The tests of architectures compare their rows; this one compares the rest."""
    document = models_document.written()
    if document is not None and not request.config.getoption("--write-docs"):
        assert set(document.run) == set(architectures())
        assert document.refused == models_document.models_outside_the_interface()
        assert models_document.PATH.read_text(encoding="utf-8") == document.text()
