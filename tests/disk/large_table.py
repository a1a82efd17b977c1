"""Answers with a model whose table of n-grams is a sparse file of 50 GB; prints its peak memory.

`python -m tests.disk.large_table FOLDER` writes the model to FOLDER and keeps it.
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

import tandem
from tandem.checkpoint.file_writer import write_tensors
from tandem.checkpoint.packed import DENSE_FILE, rows_file
from tandem.checkpoint.sources.safetensors_header import read_header
from tandem.experts.store.host_memory import peak_process_bytes
from tandem.hf.row_tables import tables_on_disk
from tests.architectures import build_tiny_model

# As in the released model: 160 values per row, 16 heads of this many rows.
EMBEDDED, ROWS_OF_A_HEAD, ROW_BYTES = 2560, 5_000_000, 640
MEMORY_BYTES = 8 << 30


def make_model(folder: Path) -> Path:
    """Write a tiny packed model whose table is a file of its own."""
    values = {"ple_layer_ids": [1], "ple_embed_dim": EMBEDDED}
    build_tiny_model("qwen4_exp", values=values).save_pretrained(folder / "plain")
    with mock.patch("tandem.hf.row_tables._LEAST_BYTES", 0):
        return tandem.save(tandem.load(folder / "plain", expert_dtype="int8"), folder / "packed")


def enlarge(packed: Path) -> tuple[list[int], Tensor]:
    """Enlarge the table to its maximum size; return the numbers and values of some rows."""
    config = json.loads((packed / "config.json").read_text())
    config["ngram_vocab_size_base"] = ROWS_OF_A_HEAD
    (packed / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        whole = Qwen4ExpTextNGramEmbedding(AutoConfig.from_pretrained(packed), EMBEDDED, 0)
    dense = load_file(packed / DENSE_FILE)
    for name in dense:
        if name.endswith("ngram_heads_vocab_sizes"):
            dense[name] = torch.tensor(whole.head_vocab_sizes)
        if name.endswith("ngram_heads_offsets"):
            dense[name] = torch.tensor(whole.head_offsets)
    write_tensors(packed, DENSE_FILE, dense)
    num_rows = whole.ngram_embedding.num_embeddings
    numbers = [0, 1, num_rows // 2 + 3, num_rows - 1]
    return numbers, write_sparse(packed / rows_file(0), num_rows, numbers)


def write_sparse(file: Path, num_rows: int, numbers: list[int]) -> Tensor:
    """Write a table of zeros with some other rows; return these rows."""
    ((name, _),) = read_header(file).items()
    entry = {"dtype": "F32", "shape": [num_rows, ROW_BYTES // 4]}
    header = json.dumps({name: entry | {"data_offsets": [0, num_rows * ROW_BYTES]}}).encode()
    header = header.ljust(4096 - 8)
    rows = torch.randn(len(numbers), ROW_BYTES // 4)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(4096 + num_rows * ROW_BYTES)
        for number, row in zip(numbers, rows, strict=True):
            stream.seek(4096 + number * ROW_BYTES)
            stream.write(row.numpy().tobytes())
    return rows


def main(folder: Path) -> dict[str, Any]:
    """Load the model and answer; return the memory and time."""
    packed = make_model(folder)
    numbers, rows = enlarge(packed)
    where = "tandem.experts.store.host_memory.available_bytes"
    with mock.patch(where, return_value=MEMORY_BYTES):
        model = tandem.load(packed)
    (table,) = tables_on_disk(model)
    assert torch.equal(table(torch.tensor(numbers)), rows)
    prompt = list(range(40, 100))
    (answer,) = tandem.Generator(model).generate(prompt, max_new_tokens=20, ignore_eos=True)
    return {
        "table_bytes": table.place.num_bytes,
        "file_bytes": (packed / rows_file(0)).stat().st_blocks * 512,
        "peak_bytes": peak_process_bytes(),
        "tokens": len(answer.token_ids),
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
