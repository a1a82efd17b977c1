"""The input of an MTP layer: a token, and the model's hidden state of the token before it."""

import torch
from torch import Tensor, nn

_MOST_FIXED_TOKENS = 32  # of a step that may be recorded


class GivenHidden:
    """For each token of the next forward, the hidden state of the token before it.

    Shallow copies of a model share this object.
    """

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        """Take the width and dtype of hidden states; `now` is zeros for one token at first."""
        self._width, self._dtype = width, dtype
        self._fixed: dict[int, Tensor] = {}
        self.now = self.fixed(1)
        """The hidden states for the next forward's tokens, (n_tokens, width)."""

    def give(self, hidden: Tensor) -> None:
        """Set the hidden states for the next forward's tokens: (n_tokens, width)."""
        if len(hidden) <= _MOST_FIXED_TOKENS:
            hidden = self.fixed(len(hidden)).copy_(hidden)
        self.now = hidden

    def fixed(self, num_tokens: int) -> Tensor:
        """Return the tensor that every recorded step of `num_tokens` tokens reads."""
        if num_tokens not in self._fixed:
            shape = (num_tokens, self._width)
            with torch.inference_mode(False):
                self._fixed[num_tokens] = torch.zeros(shape, dtype=self._dtype, device="cpu")
        return self._fixed[num_tokens]


class MtpEmbedding(nn.Module):
    """Replaces the token embedding in an MTP layer's model."""

    def __init__(
        self,
        embedding: nn.Module,
        enorm: nn.Module,
        hnorm: nn.Module | None,
        fc: nn.Module,
        given: GivenHidden,
    ) -> None:
        """Take the modules of `fc([enorm(token's embedding), hnorm(given hidden state)])`.

        Without `hnorm`, the hidden state is left out here, because the layer itself adds it.
        """
        super().__init__()
        self.embedding, self.enorm, self.hnorm, self.fc = embedding, enorm, hnorm, fc
        self.given = given

    @property
    def weight(self) -> Tensor:
        """The weight of the token embedding, for code that reads its size."""
        return self.embedding.get_parameter("weight")

    def give(self, hidden: Tensor) -> None:
        """Set the hidden states for the next forward's tokens: (n_tokens, width)."""
        self.given.give(hidden)

    def fixed(self, num_tokens: int) -> list[Tensor]:
        """Return, in a list, the tensor that every recorded step of `num_tokens` tokens reads."""
        return [self.given.fixed(num_tokens)]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the layer's input (b, n_tokens, width) for token ids (b, n_tokens)."""
        embedded = self.enorm(self.embedding(ids))
        if self.hnorm is not None:
            hidden = self.given.now.view(*ids.shape, -1)
            embedded = torch.cat([embedded, self.hnorm(hidden)], dim=-1)
        return self.fc(embedded)  # type: ignore[no-any-return]
