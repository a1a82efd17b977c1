"""DALI's residual vectors: mean differences between the inputs of consecutive layers' routers.

They are running means over all tokens (equation 11), either learned while the model runs, or fixed
by `tandem calibrate` and kept with the model's identity.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.core.errors import ConfigError, FileFormatError

# After this many tokens the mean hardly moves; older tokens fade.
FORGET_AFTER_TOKENS = 1 << 16


class Residuals:
    """One vector per MoE layer but the last: mean of (next router's input - own router's input)."""

    def __init__(
        self, num_layers: int, hidden_size: int, device: torch.device | str = "cpu"
    ) -> None:
        """Start with zeros on the routers' device; with zeros, this is plain look-ahead."""
        self.means = torch.zeros(max(0, num_layers - 1), hidden_size, device=device)
        self.tokens = [0] * max(0, num_layers - 1)
        self.is_fixed = False

    def learn(self, layer: int, hidden: Tensor, following: Tensor) -> None:
        """Update a layer's mean from router inputs (n_tokens, hidden_size), unless it is fixed.

        `hidden` is the input of the layer's own router, `following` the input of the next layer's.
        """
        if self.is_fixed:
            return
        count = min(self.tokens[layer] + len(hidden), FORGET_AFTER_TOKENS)
        self.tokens[layer] = count
        mean = self.means[layer]
        change = (following.float() - hidden.float()).sum(0).sub_(mean, alpha=len(hidden))
        mean.add_(change, alpha=1.0 / count)

    def save(self, path: Path, identity: str) -> None:
        """Write the vectors with the identity of the model that they belong to."""
        meta = {"identity": identity, "tokens": self.tokens}
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(file, means=self.means.cpu().numpy(), meta=np.array(json.dumps(meta)))
        partial.replace(path)

    @classmethod
    def load(
        cls,
        path: Path,
        identity: str,
        num_layers: int,
        hidden_size: int,
        device: torch.device | str = "cpu",
    ) -> "Residuals":
        """Read vectors from a file; `learn` does not change them.

        Raises `FileFormatError` for a damaged file, and `ConfigError` for vectors of another model.
        """
        try:
            with np.load(path, allow_pickle=False) as archive:
                means, meta = archive["means"], json.loads(str(archive["meta"]))
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise FileFormatError(
                f"{path}: found no residual vectors ({error}); write them with tandem calibrate"
            ) from None
        expected = (max(0, num_layers - 1), hidden_size)
        if meta.get("identity") != identity or means.shape != expected:
            raise ConfigError(
                f"{path} holds the residual vectors {means.shape} of model "
                f"{meta.get('identity')!r}, and this is {identity!r}, which needs {expected}; "
                "run tandem calibrate on this model"
            )
        found = cls(num_layers, hidden_size, device)
        found.means.copy_(torch.from_numpy(means))
        found.tokens = [int(count) for count in meta["tokens"]]
        found.is_fixed = True
        return found
