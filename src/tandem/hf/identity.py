"""Computes a model's identity, under which its heat and residuals are kept across runs."""

import hashlib
import json

import torch
from torch import Tensor

from tandem.devices.cuda.embedding import HostEmbedding
from tandem.foreign_types import ModelPart, PreTrainedModel

# Keys about where a model is stored or how it was loaded, not about what it is.
_CIRCUMSTANCES = ("_name_or_path", "quantization_config", "transformers_version", "dtype")
_SAMPLED_VALUES = 4096


def model_identity(model: PreTrainedModel) -> str:
    """Return 16 hex digits from a model's config and a sample of its embedding."""
    digest = hashlib.sha256()
    config = model.config.to_dict()
    kept = {key: value for key, value in config.items() if key not in _CIRCUMSTANCES}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    embedding = model.get_input_embeddings()
    if isinstance(embedding, HostEmbedding):
        embedding = embedding.on_host
    if embedding is not None and hasattr(embedding, "weight"):
        sample = _first_rows(embedding).detach().flatten()[:_SAMPLED_VALUES]
        digest.update(sample.to("cpu", torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _first_rows(embedding: ModelPart) -> Tensor:
    """Return embeddings' weight; for a `PackedEmbedding`, unpack and return only the first rows."""
    if not hasattr(embedding, "rows"):
        weight: Tensor = embedding.weight
        return weight
    count = min(-(-_SAMPLED_VALUES // embedding.embedding_dim), embedding.num_embeddings)
    rows: Tensor = embedding.rows(torch.arange(count, device="cpu"))
    return rows
