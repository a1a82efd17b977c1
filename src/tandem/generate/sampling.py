"""Sampling options of an answer, and the sampling rule that results from them."""

from dataclasses import asdict, dataclass
from typing import Any

from tandem.core.config import option, require_range
from tandem.core.errors import ConfigError
from tandem.foreign_types import GenerationConfig

# Options of a generation config that `SamplingRule` does not support -> the values that have no
# effect.
_NOT_FOLLOWED: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "sequence_bias": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "min_new_tokens": (None, 0),
    "typical_p": (None, 1.0),
    "top_h": (None,),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "guidance_scale": (None, 1.0),
    "penalty_alpha": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
}

# Lower limit of `top_p`, whose 0 means the most likely token.
_LEAST_SHARE = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """The operations on the next token's scores, in this order; None skips an operation."""

    repetition_penalty: float | None = None
    temperature: float = 0.0
    """0 selects the most likely token (greedy); the fields below apply only to sampling."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options of one answer; None means the value in the model's own generation config."""

    max_new_tokens: int = option(512, help="longest answer in tokens", metavar="N")
    temperature: float | None = option(
        None, help="0 is greedy; default: the model's own, greedy if a seed is given", metavar="T"
    )
    top_p: float | None = option(
        None, help="sample from the likeliest tokens that sum to P; 1 is off", metavar="P"
    )
    top_k: int | None = option(
        None, help="sample from the K likeliest tokens; 0 or -1 is off", metavar="K"
    )
    min_p: float | None = option(
        None,
        help="sample from tokens at least P times as likely as the likeliest; 0 is off",
        metavar="P",
    )
    repetition_penalty: float | None = option(
        None, help="above 1, tokens that are there already become less likely", metavar="R"
    )
    seed: int | None = option(
        None,
        help="seed of the random numbers: same seed, same text; -1: another one each time",
        metavar="SEED",
    )
    stop: tuple[str, ...] = ()
    """Strings that end an answer; they are not part of its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer like end-of-sequence tokens."""
    ignore_eos: bool = False
    """Whether generation continues after end-of-sequence tokens."""
    min_tokens: int = 0
    """The number of tokens that must come before an end token or a stop string ends the answer."""
    presence_penalty: float = 0.0
    """Subtracted from the score of every token that the answer already contains."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's score for each occurrence in the answer."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the value that is added to the token's score."""

    def __post_init__(self) -> None:
        """Check every range; a `ConfigError` names the field, its value and the expected values."""
        require_range("max_new_tokens", self.max_new_tokens, 1, what="a number of tokens")
        if self.temperature is not None:
            require_range("temperature", self.temperature, 0)
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None:
                require_range(name, share, 0, 1)
        if self.top_k is not None:
            require_range("top_k", self.top_k, -1, what="a number of tokens")
        if self.repetition_penalty is not None:
            require_range("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        if self.seed is not None:
            # Other sequences of a batch take the seeds after this one.
            require_range("seed", self.seed, -1, 2**62, what="a whole number")
            if self.seed == -1:  # -1 is random, as in llama.cpp
                object.__setattr__(self, "seed", None)
        if isinstance(self.stop, str) or not all(self.stop):
            raise ConfigError(f"stop is {self.stop!r}; expected a tuple of strings, none empty")
        require_range("min_tokens", self.min_tokens, 0, what="a number of tokens")

    def end_ids(self, of_model: frozenset[int]) -> frozenset[int]:
        """Return the token ids that end the answer; `of_model` are the model's end tokens."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else of_model)

    def is_sampled(self, model_samples: bool) -> bool:
        """Tell whether tokens are drawn at random; `model_samples` is the model's own default."""
        if self.temperature is not None:
            return self.temperature > 0
        if self.top_p is not None or (self.top_k or 0) > 0 or self.min_p:
            return True
        return model_samples and self.seed is None

    def rule(self, generation_config: GenerationConfig) -> SamplingRule:
        """Return the sampling rule; options that are None come from `generation_config`."""
        penalty = self._given_or("repetition_penalty", generation_config)
        if not self.is_sampled(bool(generation_config.do_sample)):
            return SamplingRule(penalty)
        temperature = self._given_or("temperature", generation_config)
        top_k, top_p = (self._given_or(name, generation_config) for name in ("top_k", "top_p"))
        return SamplingRule(
            repetition_penalty=penalty,
            temperature=1.0 if temperature is None else temperature,
            top_k=top_k if (top_k or 0) > 0 else None,
            top_p=None if top_p is None else max(top_p, _LEAST_SHARE),
            min_p=self._given_or("min_p", generation_config) or None,
        )

    def _given_or(self, name: str, generation_config: GenerationConfig) -> Any:
        value = asdict(self)[name]
        return vars(generation_config).get(name) if value is None else value


def not_followed(generation_config: GenerationConfig) -> list[str]:
    """Return the names of options that a generation config sets and Tandem's loop ignores."""
    return [
        name
        for name, neutral in _NOT_FOLLOWED.items()
        if vars(generation_config).get(name) not in neutral
    ]
