"""What an MTP layer reads: a token, and what the model made of the one before it."""

import torch
from torch import Tensor, nn

_MOST_FIXED_TOKENS = 32  # of a step that may be recorded


class MtpEmbedding(nn.Module):
    """Stands where a model of one layer embeds its tokens."""

    def __init__(self, embedding: nn.Module, enorm: nn.Module, hnorm: nn.Module, fc: nn.Module):
        """Join `fc`(norm of a token's embedding, norm of what `give` has brought)."""
        super().__init__()
        self.embedding, self.enorm, self.hnorm, self.fc = embedding, enorm, hnorm, fc
        self._fixed: dict[int, Tensor] = {}
        self._given: list[Tensor] = []  # one; shared with shallow copies

    @property
    def weight(self) -> Tensor:
        """The weight of the tokens' own embedding, for code that asks for its size."""
        return self.embedding.get_parameter("weight")

    def give(self, hidden: Tensor) -> None:
        """Say what the model's head read of the tokens before the next ones: (n_tokens, width)."""
        if len(hidden) <= _MOST_FIXED_TOKENS:
            hidden = self.fixed(len(hidden))[0].copy_(hidden)
        self._given[:] = [hidden]

    def fixed(self, num_tokens: int) -> list[Tensor]:
        """Return the tensor that a step of so many tokens reads, in a list of one."""
        if num_tokens not in self._fixed:
            like = self.hnorm.get_parameter("weight")
            with torch.inference_mode(False):
                shape = (num_tokens, len(like))
                self._fixed[num_tokens] = torch.zeros(shape, dtype=like.dtype, device="cpu")
        return [self._fixed[num_tokens]]

    def forward(self, ids: Tensor) -> Tensor:
        """Return (b, n_tokens, width) for ids (b, n_tokens)."""
        (hidden,) = self._given
        hidden = hidden.view(*ids.shape, -1)
        return self.fc(torch.cat([self.enorm(self.embedding(ids)), self.hnorm(hidden)], dim=-1))  # type: ignore[no-any-return]
