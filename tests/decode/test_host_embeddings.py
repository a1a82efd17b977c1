"""Tests of embeddings on the host beside a GPU: equal logits in captured steps and prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tandem
from tandem.decode.padded import PaddedBatch
from tandem.devices.cuda.embedding import HostEmbedding, given_rows
from tandem.forecast.sizes import model_sizes
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.dense_place import keep_embeddings_on_host
from tandem.hf.identity import model_identity
from tests.decode.twin_capture import TwinCapture
from tests.decode.whole_pool import cuda_pool, logits_of
from tests.hf.tiny import save_tiny_checkpoint
from tests.loading.gguf_files import tiny_model, write_gguf

PROMPTS, TOKENS = [[40, 41, 42], [50, 51]], [60, 71, 82, 93, 104]


def on_host(directory: Path, **options: Any) -> tuple[Any, Any]:
    """Return a model, and the same model with its embeddings on the host."""
    model, other = (tandem.load(directory, dtype="fp32", **options) for _ in range(2))
    keep_embeddings_on_host(other, other.device)
    return model, other


@pytest.mark.parametrize("name", ["mixtral", "gemma4"])  # the latter's head is tied to them
def test_a_captured_step_reads_the_rows_that_the_host_brings(tmp_path: Path, name: str) -> None:
    model, other = on_host(save_tiny_checkpoint(tmp_path / "tiny", name))
    is_tied = model.config.get_text_config().tie_word_embeddings
    assert isinstance(other.get_input_embeddings(), HostEmbedding) == (not is_tied)
    pool = cuda_pool(other, PROMPTS, 20, make_capture=TwinCapture)
    found = logits_of(pool, 2, TOKENS)
    assert pool.step.is_replaying, pool.step.why_not
    expected = logits_of(PaddedBatch(model, PROMPTS, 0), 2, TOKENS)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_nothing_else_is_different(tmp_path: Path) -> None:
    directory = save_tiny_checkpoint(tmp_path / "tiny")
    model, other = on_host(directory)
    ids = torch.tensor([[3, 1, 4]])
    embeddings = other.get_input_embeddings()
    assert torch.equal(embeddings(ids), model.get_input_embeddings()(ids))
    with given_rows(torch.ones(1, 2, embeddings.embedding_dim)):  # of other ids
        assert torch.equal(embeddings(ids), model.get_input_embeddings()(ids))
    assert model_identity(other) == model_identity(model)
    assert other.num_parameters() == model.num_parameters()
    assert set(other.state_dict()) == set(model.state_dict())
    assert not any(p is embeddings.weight for p in other.parameters())
    sizes = model_sizes(open_model(directory), OffloadConfig(device="cuda"))
    assert sizes.host_bytes == embeddings.weight.nbytes
    assert sizes.device_bytes == sizes.total_dense_bytes - sizes.host_bytes


def test_tied_embeddings_stay_unless_both_have_codes(tmp_path: Path) -> None:
    source = tiny_model("llama", {"tie_word_embeddings": True})
    write_gguf(tmp_path / "model.gguf", source, "IQ4_NL", "llama")
    for dense_dtype, is_apart in (("none", False), ("auto", True)):
        model, other = on_host(tmp_path / "model.gguf", dense_dtype=dense_dtype)
        embeddings, ids = other.get_input_embeddings(), torch.tensor([[3, 1, 4]])
        assert isinstance(embeddings, HostEmbedding) == is_apart
        assert torch.equal(embeddings(ids), model.get_input_embeddings()(ids))
        config = OffloadConfig(device="cuda", dense_dtype=dense_dtype)
        sizes = model_sizes(open_model(tmp_path / "model.gguf"), config)
        assert (sizes.host_bytes > 0) == is_apart
        assert sizes.device_bytes == sizes.total_dense_bytes  # the head has its own
