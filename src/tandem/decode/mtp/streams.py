"""MTP layers of models with several residual streams: they read all of them, before they are mixed.

So the hidden state of a token is as wide as its streams together, and a layer's streams begin
apart: each is what the model made of the token before, in that stream, and the token's embedding.
"""

from torch import Tensor, nn
from transformers import PreTrainedConfig

from tandem.decode.mtp.embedding import GivenHidden

_MODELS = ("deepseek_v4",)  # others with streams have no MTP layer in a layout that is known


def num_streams(config: PreTrainedConfig) -> int:
    """Return how many streams of a model its MTP layers read; 1: what its output head reads."""
    text = config.get_text_config(decoder=True)
    return int(text.hc_mult) if text.model_type in _MODELS else 1


class StreamedLayer(nn.Module):
    """Stands where a model of one layer has its layer, whose streams `given` tells apart."""

    def __init__(self, layer: nn.Module, hnorm: nn.Module, h_proj: nn.Module, given: GivenHidden):
        """Add `h_proj`(norm of each given stream) to what the embedding gives to all."""
        super().__init__()
        self.layer, self.hnorm, self.h_proj, self.given = layer, hnorm, h_proj, given

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """Return the layer's streams, (b, n_tokens, streams, width)."""
        streams = self.given.now.view(hidden_states.shape)
        made: Tensor = self.layer(hidden_states + self.h_proj(self.hnorm(streams)), **kwargs)
        return made
