"""How the next token is chosen: greedy or sampled, and when to stop."""

from dataclasses import dataclass
from typing import Any

from tandem.core.config import option, require_range


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options of one answer; None leaves the model's own generation config in force."""

    max_new_tokens: int = option(512, help="longest answer in tokens", metavar="N")
    temperature: float | None = option(
        None, help="0 is greedy; default: the model's own, greedy if a seed is given", metavar="T"
    )
    top_p: float | None = option(
        None, help="sample from the likeliest tokens that sum to P", metavar="P"
    )
    top_k: int | None = option(None, help="sample from the K likeliest tokens", metavar="K")
    seed: int | None = option(
        None, help="seed of the random numbers: same seed, same text", metavar="SEED"
    )

    def __post_init__(self) -> None:
        """Check every range; `ConfigError` names the field, the value and what is expected."""
        require_range("max_new_tokens", self.max_new_tokens, 1, what="a number of tokens")
        if self.temperature is not None:
            require_range("temperature", self.temperature, 0)
        if self.top_p is not None:
            require_range("top_p", self.top_p, 1e-6, 1)
        if self.top_k is not None:
            require_range("top_k", self.top_k, 1, what="a number of tokens")
        if self.seed is not None:
            require_range("seed", self.seed, 0, 2**63 - 1, what="a whole number")

    def is_sampled(self, model_samples: bool) -> bool:
        """Tell whether tokens are drawn at random; `model_samples` is the model's own default."""
        if self.temperature is not None:
            return self.temperature > 0
        if self.top_p is not None or self.top_k is not None:
            return True
        return model_samples and self.seed is None

    def generation_arguments(self, model_samples: bool) -> dict[str, Any]:
        """Return the arguments for `model.generate`."""
        if not self.is_sampled(model_samples):
            greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
            return {"max_new_tokens": self.max_new_tokens, **greedy}
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": True, **given}
