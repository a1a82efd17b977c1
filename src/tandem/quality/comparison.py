"""Runs a model over windows of text and compares its next-token distributions with a reference's.

The model runs as in answering a request: with the kernels, attention and KV cache of a prompt.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.errors import ConfigError
from tandem.foreign_types import PreTrainedModel
from tandem.generate.generator import Generator
from tandem.quality.kept_logits import KeptLogits, LogitsWriter
from tandem.quality.texts import Window

# Tokens whose logits are in memory at once, in several copies: for 128 tokens and a vocabulary of
# 150,000, one takes 77 MB.
_PIECE_TOKENS = 128

Progress = Callable[[int, int], None]  # (tokens done, total)


@dataclass(frozen=True, slots=True)
class Quality:
    """How well a model predicts tokens; without a reference, the fields that need it are None."""

    tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    kl_mean: float | None = None
    """Kullback-Leibler divergence of the model's distribution from the reference's, in nats."""
    kl_p99: float | None = None
    """The divergence that 99 % of tokens stay below (99th percentile)."""
    same_first_choice: float | None = None
    """The share of tokens for which both models have the same most likely next token."""


class Tally:
    """Collects each token's results by domain, and sums them up."""

    def __init__(self) -> None:
        """Start without results."""
        self._found: dict[str, dict[str, list[float]]] = {}

    def add(
        self, domain: str, targets: Sequence[int], logits: Tensor, reference: Tensor | None
    ) -> None:
        """Add the results of consecutive tokens of a window.

        `logits` and `reference` (None: no comparison) are the next-token logits after each token,
        (n_tokens, vocabulary) fp32. `targets` are the tokens that really follow. The last token of
        the text has no target.
        """
        own = self._found.setdefault(
            domain, {name: [] for name in ("loss", "reference_loss", "kl", "is_same")}
        )
        found = logits.log_softmax(-1)
        next_ids = torch.tensor(targets, device="cpu")[:, None]
        own["loss"] += (-found[: len(targets)].gather(1, next_ids)[:, 0]).tolist()
        if reference is None:
            own["kl"] += [math.nan] * len(logits)
            return
        true = reference.log_softmax(-1)
        own["reference_loss"] += (-true[: len(targets)].gather(1, next_ids)[:, 0]).tolist()
        own["is_same"] += (found.argmax(-1) == true.argmax(-1)).float().tolist()
        chance = true.exp()
        apart = torch.where(chance > 0, chance * (true - found), 0.0)  # 0 for forbidden tokens
        own["kl"] += apart.sum(-1).clamp(min=0.0).tolist()

    def by_domain(self) -> dict[str, Quality]:
        """Return the quality in each domain."""
        return {domain: _quality([found]) for domain, found in self._found.items()}

    def total(self) -> Quality:
        """Return the quality over the tokens of all domains."""
        return _quality(list(self._found.values()))


def _quality(parts: Sequence[dict[str, list[float]]]) -> Quality:
    loss, reference_loss, kl, is_same = (
        torch.tensor(
            [value for part in parts for value in part[name]], dtype=torch.float64, device="cpu"
        )
        for name in ("loss", "reference_loss", "kl", "is_same")
    )
    perplexity = float(loss.mean().exp())
    if not len(is_same):
        return Quality(len(kl), perplexity)
    return Quality(
        len(kl), perplexity, float(reference_loss.mean().exp()), float(kl.mean()),
        float(kl.quantile(0.99)), float(is_same.mean()),
    )  # fmt: skip


def measure(
    model: PreTrainedModel,
    windows: Sequence[Window],
    *,
    reference: KeptLogits | None = None,
    writer: LogitsWriter | None = None,
    kv_dtype: str = "auto",
    progress: Progress | None = None,
) -> Tally:
    """Run a model over windows of text; return the results of all tokens.

    If `reference` is given, the model's logits are compared with it; if `writer` is given, it
    writes them. Raises `ConfigError` if model and reference have vocabularies of different sizes.
    """
    tally = Tally()
    total = sum(len(window.ids) for window in windows)
    done, last, true = 0, -1, None
    for number, at, logits in _logits(model, windows, kv_dtype):
        domain, ids = windows[number]
        if reference is not None and number != last:
            if reference.vocabulary != logits.shape[1]:
                raise ConfigError(
                    f"the model has {logits.shape[1]} words and the reference "
                    f"{reference.vocabulary}; compare models of one vocabulary"
                )
            last, true = number, reference.of_window(number)
        end = at + len(logits)
        rows = None if true is None else true[at:end].float()
        tally.add(domain, ids[at + 1 : end + 1], logits, rows)
        if writer is not None:
            writer.add(number, logits)
        done += len(logits)
        if progress is not None:
            progress(done, total)
    return tally


def _logits(
    model: PreTrainedModel, windows: Sequence[Window], kv_dtype: str
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (window's number, first position, next-token logits (n_tokens, vocabulary) fp32)."""
    generator = Generator(model, kv_dtype=kv_dtype, has_replay=False, speculate="none")
    longest = max(len(window.ids) for window in windows)
    pool = generator.slot_pool(1, capacity=longest)
    size = _PIECE_TOKENS if pool.can_prefill_in_chunks else longest
    for number, window in enumerate(windows):
        pool.keep(0, 0)
        for at in range(0, len(window.ids), size):
            logits = pool.prefill_with_logits(0, window.ids[at : at + size])
            yield number, at, logits.float().cpu()
