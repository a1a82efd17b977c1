"""Tiny models through llama.cpp's own converter: the files of `tests/loading/data/gguf`.

    python -m tests.loading.make_gguf_files --source DIR [NAME ...]

DIR is llama.cpp's source, such as `vendor/llama.cpp` of llama-cpp-python's source package. Weights
of matrices are one of two numbers that Q8_0 has exactly, so that files are small packed (xz), and
what Transformers answers, beside them in `expected.safetensors`, is exact.
"""

import argparse
import importlib
import json
import lzma
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.architectures import build_tiny_model

DATA = Path(__file__).parent / "data" / "gguf"
EXPECTED = DATA / "expected.safetensors"
TOKENS = [[5, 40, 17, 99, 64, 23, 88, 31, 7, 54]]
# A multiple of 127, so that a scale of Q8_0 is it exactly.
WEIGHT = 127 * 2.0**-10
# By file: the architecture in Transformers, and its config beside `tests.architectures`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35moe": ("qwen3_5_moe", {}),
    "qwen3next": ("qwen3_next", {}),
    "gemma4": ("gemma4", {
        "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    }),
    "lfm2moe": ("lfm2_moe", {}),
    "nemotron_h_moe": ("nemotron_h", {}),
    "granitehybrid": ("granitemoehybrid", {}),
    "glm-dsa": ("glm_moe_dsa", {}),
    "deepseek32": ("deepseek_v32", {}),
}  # fmt: skip
# As released configs name the layers, and the converter reads them.
_LAYERS = {
    "granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"},
}


def tiny_model(name: str) -> Any:
    """Return a file's model as Transformers has it, with weights that Q8_0 has exactly."""
    architecture, values = MODELS[name]
    model: Any = build_tiny_model(architecture, values=values)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                signs = torch.randint(0, 2, parameter.shape, generator=random) * 2 - 1
                parameter.copy_(WEIGHT * signs)
    return model


def answers(model: Any) -> Tensor:
    """Return a model's logits of `TOKENS`, in fp32."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor(TOKENS)).logits[0].float()
    return logits


def _vocabulary(self: Any) -> None:
    """Write a vocabulary of 128 words, instead of reading a tokenizer's."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"<{i}>" for i in range(4, 128))]
    writer = self.gguf_writer
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3] * 4 + [1] * (len(words) - 4))
    writer.add_token_merges(["< 4"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def convert(model: Any, file: Path, source: Path) -> None:
    """Let llama.cpp's converter write a model as Q8_0."""
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    gguf = importlib.import_module("gguf")
    conversion = importlib.import_module("conversion")
    base = importlib.import_module("conversion.base")
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        model.save_pretrained(directory)
        (Path(directory) / "tokenizer.json").write_text(
            '{"model": {"vocab": {' + ",".join(f'"{i}": {i}' for i in range(128)) + "}},"
            ' "added_tokens": []}'
        )
        _rename_layers(Path(directory) / "config.json")
        values = base.ModelBase.load_hparams(Path(directory), False)
        kind = conversion.get_model_class(base.get_model_architecture(values, base.ModelType.TEXT))
        kind.set_vocab = _vocabulary
        kind.no_mtp = True
        kind(Path(directory), gguf.LlamaFileType.MOSTLY_Q8_0, file, eager=True).write()


def _rename_layers(file: Path) -> None:
    config = json.loads(file.read_text())
    if names := _LAYERS.get(config["model_type"]):
        config["layer_types"] = [names[kind] for kind in config["layer_types"]]
        file.write_text(json.dumps(config))


def main() -> None:
    """Write the files that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--source", type=Path, required=True)
    arguments = parser.parse_args()
    DATA.mkdir(exist_ok=True)
    expected = load_file(EXPECTED) if EXPECTED.exists() else {}
    for name in arguments.names:
        model = tiny_model(name)
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "model.gguf"
            convert(model, file, arguments.source)
            packed = lzma.compress(file.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        (DATA / f"{name}.gguf.xz").write_bytes(packed)
        expected[name] = answers(model)
        print(f"{name}: {len(packed)} bytes")
    save_file(dict(sorted(expected.items())), EXPECTED)


if __name__ == "__main__":
    main()
