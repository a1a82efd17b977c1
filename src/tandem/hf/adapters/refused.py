"""Architectures whose experts no adapter can put on the interface, and why."""

from collections.abc import Mapping

REFUSED: Mapping[str, str] = {
    "doge": "its experts are rows of embeddings, and no matrices",
    "jetmoe": "queries and outputs of its attention are experts, too",
    "nllb_moe": "it is an encoder with a decoder, which Tandem does not run",
    "switch_transformers": "it is an encoder with a decoder, which Tandem does not run",
    "vitpose_backbone": "it finds poses in images, and writes no text",
}
"""The reason for refusing a model, by its folder in `transformers.models` (the model type without
hyphens)."""


def why_no_adapter(model_type: str) -> str | None:
    """Return why a model type has no adapter; None: `REFUSED` does not list it."""
    return REFUSED.get(model_type.replace("-", "_"))
