"""A small cut of the demo model: a few of its layers and tokens, packed, under 40 MB.

    python -m tests.gpu.demo_cut        where the demo model is; writes build/demo-cut

It brings real weights and real text to a machine with a GPU and no network. Its experts have a
format that both processors compute alike, so that results can be compared closely.
"""

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

import tandem
from tandem.cli.keeping import cache_dir
from tandem.demo.build import CALIBRATION

DIRECTORY = Path(__file__).parents[2] / "build" / "demo-cut"
LAYERS, VOCABULARY, EXPERT_DTYPE = 2, 8192, "mxfp4"
MOST_BYTES = 40_000_000
_PROMPTS, _PROMPT_TOKENS = 4, 96
_TEXTS = "texts.json"


def write_demo_cut(
    demo: Path, directory: Path, *, layers: int = LAYERS, expert_dtype: str = EXPERT_DTYPE
) -> None:
    """Cut a demo checkpoint and pack it into a new directory."""
    with TemporaryDirectory() as folder:
        plain = Path(folder) / "plain"
        _write_plain(demo, plain, layers)
        tandem.pack(plain, directory, expert_dtype=expert_dtype)
    tokenizer: Any = AutoTokenizer.from_pretrained(demo)
    ids = [i for i in tokenizer.encode(CALIBRATION.read_text())[:4096] if i < VOCABULARY]
    texts = [ids[i * _PROMPT_TOKENS :][:_PROMPT_TOKENS] for i in range(_PROMPTS)]
    (directory / _TEXTS).write_text(json.dumps(texts))


def texts_of(directory: Path) -> list[list[int]]:
    """Return token ids of some English text."""
    texts: list[list[int]] = json.loads((directory / _TEXTS).read_text())
    return texts


def size_of(directory: Path) -> int:
    """Return the total bytes of a directory's files."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def find_demo_cut() -> Path | None:
    """Return the cut; write it if the demo model is here; None if there is neither."""
    if DIRECTORY.is_dir():
        return DIRECTORY
    demo = cache_dir() / "models" / "demo"
    if not (demo / "config.json").is_file():
        return None
    DIRECTORY.parent.mkdir(exist_ok=True)
    write_demo_cut(demo, DIRECTORY)
    return DIRECTORY


def _write_plain(demo: Path, directory: Path, layers: int) -> None:
    """Write the first layers and tokens as a checkpoint."""
    directory.mkdir()
    kept = re.compile(rf"model\.layers\.[0-{layers - 1}]\.|model\.(embed_tokens|norm)\.|lm_head\.")
    tensors: dict[str, Tensor] = {}
    for file in sorted(demo.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys() if kept.match(name)}  # noqa: SIM118
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:VOCABULARY].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((demo / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "vocab_size": VOCABULARY}
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    (directory / "config.json").write_text(json.dumps(config))


def main() -> int:
    """Write the cut; return the exit code."""
    found = find_demo_cut()
    if found is None:
        print("the demo model is not here; build it with: tandem run demo")
        return 1
    print(f"{found}: {size_of(found) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
