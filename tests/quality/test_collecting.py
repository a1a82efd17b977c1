"""Tests of collecting a model's inputs, against plain torch."""

from pathlib import Path

import pytest
import torch

import tandem
from tandem.hf.runtime import require_runtime
from tandem.quality.collecting import collect_importance
from tandem.quality.texts import Window
from tests.hf.tiny import save_tiny_checkpoint, save_tiny_dense

WINDOWS = [Window("a", tuple(range(5, 25))), Window("b", tuple(range(30, 50))), Window("b", (7,))]


@pytest.mark.parametrize("expert_dtype", ["fp32", "int8"])
def test_squares_are_those_of_the_inputs(checkpoint: Path, expert_dtype: str) -> None:
    model = tandem.load(checkpoint, dtype="float32", expert_dtype=expert_dtype)
    layer = "model.layers.1"
    seen: dict[str, list[torch.Tensor]] = {"o_proj": [], "block": []}
    attention, block = model.model.layers[1].self_attn, model.model.layers[1].mlp
    handles = [
        attention.o_proj.register_forward_pre_hook(lambda _, x: seen["o_proj"].append(x[0])),
        block.register_forward_pre_hook(lambda _, x: seen["block"].append(x[0])),
    ]
    with torch.no_grad():
        for window in WINDOWS:
            model(input_ids=torch.tensor([window.ids]))
    expected = {name: torch.cat([x[0] for x in parts]) for name, parts in seen.items()}
    for handle in handles:
        handle.remove()

    found = collect_importance(model, WINDOWS)
    squares, tokens = found[f"{layer}.self_attn.o_proj.weight"]
    assert tokens.tolist() == [41]
    expected_squares = expected["o_proj"].square().mean(0)
    torch.testing.assert_close(squares[0], expected_squares, rtol=3e-2, atol=1e-4)
    assert "lm_head.weight" not in found

    hidden = expected["block"]
    chosen = block.gate(hidden)[2]
    host = require_runtime(model).store[1]
    up, down = (
        found[f"{layer}.mlp.experts.{name}"] for name in (host.arrivals.up_name, "down_proj")
    )
    for expert in range(host.arrivals.num_experts):
        rows = hidden[(chosen == expert).any(-1)]
        assert up.tokens[expert] == down.tokens[expert] == len(rows)
        if not len(rows):
            assert not up.mean_square[expert].any()
            continue
        weights = host.weights(expert)
        gate, straight = torch.nn.functional.linear(rows, weights.up.float()).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * straight
        torch.testing.assert_close(
            up.mean_square[expert], rows.square().mean(0), rtol=3e-2, atol=1e-4
        )
        torch.testing.assert_close(
            down.mean_square[expert], inner.square().mean(0), rtol=3e-2, atol=1e-5
        )


def test_a_dense_model_has_its_linear_layers(tmp_path: Path) -> None:
    model = tandem.load(save_tiny_dense(tmp_path / "dense"), dtype="float32")
    found = collect_importance(model, WINDOWS)
    assert found["model.layers.0.mlp.down_proj.weight"].tokens.tolist() == [41]
    assert found["model.layers.0.mlp.down_proj.weight"].mean_square.shape[0] == 1


def test_experts_in_another_order_of_gate_and_up_are_read_alike(tmp_path: Path) -> None:
    directory = save_tiny_checkpoint(tmp_path / "oss", "gpt_oss")
    plain = collect_importance(tandem.load(directory, dtype="float32"), WINDOWS)
    packed = collect_importance(
        tandem.load(directory, dtype="float32", expert_dtype="int8"), WINDOWS
    )
    name = "model.layers.0.mlp.experts.down_proj"
    assert plain[name].tokens.equal(packed[name].tokens)
    torch.testing.assert_close(
        plain[name].mean_square, packed[name].mean_square, rtol=0.1, atol=1e-5
    )
