"""MTP layers of models with several residual streams: such a layer reads all streams unmixed.

The hidden state of a token is as wide as all of its streams together. An MTP layer's input streams
differ: each is the sum of the token's projected embedding, which is the same for all streams, and
the previous token's projected hidden state in that stream.
"""

from torch import Tensor, nn
from transformers import PreTrainedConfig

from tandem.decode.mtp.embedding import GivenHidden

_MODELS = ("deepseek_v4",)  # the layout of other models' MTP layers with streams is unknown


def num_streams(config: PreTrainedConfig) -> int:
    """Return how many residual streams of a token a model's MTP layers read.

    1 means that they read the output head's input.
    """
    text = config.get_text_config(decoder=True)
    return int(text.hc_mult) if text.model_type in _MODELS else 1


class StreamedLayer(nn.Module):
    """Replaces the layer of a one-layer model; reads the hidden state's streams from `given`."""

    def __init__(self, layer: nn.Module, hnorm: nn.Module, h_proj: nn.Module, given: GivenHidden):
        """Take the layer to wrap; `hnorm` and `h_proj` will be applied to each given stream."""
        super().__init__()
        self.layer, self.hnorm, self.h_proj, self.given = layer, hnorm, h_proj, given

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """Run the layer on its input plus the projected streams: (b, n_tokens, streams, width)."""
        streams = self.given.now.view(hidden_states.shape)
        made: Tensor = self.layer(hidden_states + self.h_proj(self.hnorm(streams)), **kwargs)
        return made
