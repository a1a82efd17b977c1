"""`torch.compile` of a model that Tandem has loaded: what Tandem computes is not traced."""

from pathlib import Path
from typing import Any

import torch

import tandem
from tests.hf.tiny import save_tiny_checkpoint


def test_a_compiled_model_answers_prompts_of_any_length(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny", "qwen3_moe", num_hidden_layers=1)
    model = tandem.load(checkpoint, expert_dtype="int8")
    compiled: Any = torch.compile(model, backend="eager")
    for length in (5, 9, 13):  # from the second on Dynamo traces with lengths as symbols
        ids = torch.arange(10, 10 + length)[None]
        with torch.no_grad():
            found, expected = compiled(input_ids=ids).logits, model(input_ids=ids).logits
        torch.testing.assert_close(found, expected)
