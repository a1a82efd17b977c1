"""The supported architectures of GGUF files, by `general.architecture`."""

from tandem.checkpoint.sources.gguf_models import (
    compressed_attention,
    dense,
    full_attention,
    latent_attention,
    linear_attention,
    state_space,
    windows,
)
from tandem.checkpoint.sources.gguf_models.architecture import Architecture, Recipe

__all__ = ["ARCHITECTURES", "Architecture", "Recipe"]

ARCHITECTURES = {
    **compressed_attention.ARCHITECTURES,
    **dense.ARCHITECTURES,
    **full_attention.ARCHITECTURES,
    **latent_attention.ARCHITECTURES,
    **linear_attention.ARCHITECTURES,
    **state_space.ARCHITECTURES,
    **windows.ARCHITECTURES,
}
