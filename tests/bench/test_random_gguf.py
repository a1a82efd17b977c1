"""Tests that random GGUF files have as many weights as the models of Transformers."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from benchmarks.generation.gguf_architectures import ARCHITECTURES
from benchmarks.generation.gguf_file import SHAPES, write_random_gguf
from transformers import AutoConfig

from tandem.bench.model_shapes import find_shape
from tandem.hf.load import empty_model
from tests.bench.test_random_model import VOCABULARY, tiny


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_has_the_weights_of_the_model(name: str) -> None:
    shape = find_shape(name)
    config = AutoConfig.for_model(shape.model_type, **shape.values)
    config.dtype = torch.bfloat16
    expected = sum(parameter.numel() for parameter in empty_model(config).parameters())
    matrices = list(ARCHITECTURES[shape.model_type].matrices(shape.values))
    assert len({matrix.name for matrix in matrices}) == len(matrices)
    found = sum(int(np.prod(matrix.shape)) for matrix in matrices)
    # Router biases and rotary factors are no parameters of Transformers' models.
    assert 0 <= found - expected < 3000


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_can_be_read(name: str, tmp_path: Path) -> None:
    shape = tiny(name).sample(4)
    write_random_gguf(tmp_path / "random.gguf", shape, VOCABULARY, "Q4_0")
    reader = gguf.GGUFReader(tmp_path / "random.gguf")
    architecture = ARCHITECTURES[shape.model_type]
    assert reader.fields["general.architecture"].contents() == architecture.name
    assert reader.fields[f"{architecture.name}.block_count"].contents() == 4
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    assert kinds["token_embd.weight"] == gguf.GGMLQuantizationType.Q4_0
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.isfinite(values).all(), tensor.name
