"""A routing trace in memory, and its validation, without access to files.

Sequences are concatenated and split by `seq_offsets`. `weights`, `token_ids` and `predicted` are
optional. `predicted[t, l, p]` are the experts that predictor `p` named for token t in MoE layer l
before that layer's router ran; `meta.predictors` names the predictors.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.core.errors import FileFormatError
from tandem.policy.plan import Geometry

Array = npt.NDArray[Any]

# A check of at most this many tokens at a time keeps temporary arrays small.
_CHUNK_TOKENS = 8192


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeta:
    """The metadata of a trace; `more` keeps keys that Tandem does not use."""

    model: str
    n_moe_layers: int
    n_experts: int
    top_k: int
    predictors: tuple[str, ...] = ()
    by_token: tuple[int, ...] = ()
    """MoE layers that are routed by token id, ascending; their loads are known before a step."""
    more: dict[str, object] = dataclasses.field(default_factory=dict)

    @property
    def geometry(self) -> Geometry:
        """The numbers of layers, experts and experts per token, on which planning depends."""
        return Geometry(self.n_moe_layers, self.n_experts, self.top_k)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """The routers' choices for all tokens of whole sequences; only `check` validates them."""

    meta: TraceMeta
    experts: Array  # (tokens, moe_layers, top_k), unsigned
    seq_offsets: Array  # (sequences + 1,), int64
    weights: Array | None = None  # (tokens, moe_layers, top_k), float16
    token_ids: Array | None = None  # (tokens,), int32
    predicted: Array | None = None  # (tokens, moe_layers, predictors, k), unsigned

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return int(self.experts.shape[0])

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return len(self.seq_offsets) - 1

    def sequences(self, first: int, last: int) -> "RoutingTrace":
        """Return the sequences first .. last - 1 as a trace; its arrays of tokens are views."""
        start, end = int(self.seq_offsets[first]), int(self.seq_offsets[last])

        def part_of(array: Array | None) -> Array | None:
            return None if array is None else array[start:end]

        return RoutingTrace(
            meta=self.meta,
            experts=self.experts[start:end],
            seq_offsets=self.seq_offsets[first : last + 1] - start,
            weights=part_of(self.weights),
            token_ids=part_of(self.token_ids),
            predicted=part_of(self.predicted),
        )

    def check(self, where: str) -> None:
        """Raise `FileFormatError` if the trace is not valid.

        The message names `where`, the index, what was found and what was expected.
        """
        meta = self.meta
        shape = (self.num_tokens, meta.n_moe_layers, meta.top_k)
        _require_kind(where, "experts", self.experts, "u", "uint8 or uint16")
        _require_shape(where, "experts", self.experts, shape)
        if self.num_tokens == 0:
            raise FileFormatError(f"{where}: experts has 0 tokens; expected at least 1")
        self._check_offsets(where)
        _check_ids(where, "experts", self.experts, meta.n_experts)
        if self.weights is not None:
            _require_kind(where, "weights", self.weights, "f", "float16")
            _require_shape(where, "weights", self.weights, shape)
            if not np.isfinite(self.weights).all():
                token = int(np.argwhere(~np.isfinite(self.weights))[0][0])
                raise FileFormatError(
                    f"{where}: weights at token {token} are not finite; expected router weights"
                )
        if self.token_ids is not None:
            _require_kind(where, "token_ids", self.token_ids, "iu", "int32")
            _require_shape(where, "token_ids", self.token_ids, (self.num_tokens,))
        if self.predicted is not None:
            self._check_predicted(where, self.predicted)

    def _check_offsets(self, where: str) -> None:
        offsets = self.seq_offsets
        _require_kind(where, "seq_offsets", offsets, "i", "int64")
        if offsets.ndim != 1 or len(offsets) < 2:
            raise FileFormatError(
                f"{where}: seq_offsets has shape {offsets.shape}; expected (sequences + 1,)"
            )
        if offsets[0] != 0 or offsets[-1] != self.num_tokens:
            raise FileFormatError(
                f"{where}: seq_offsets run from {offsets[0]} to {offsets[-1]}; "
                f"expected 0 to {self.num_tokens}, the number of tokens"
            )
        falls = np.flatnonzero(np.diff(offsets) <= 0)
        if len(falls):
            at = int(falls[0]) + 1
            raise FileFormatError(
                f"{where}: seq_offsets[{at}] is {offsets[at]} after {offsets[at - 1]}; "
                "expected growing offsets"
            )

    def _check_predicted(self, where: str, predicted: Array) -> None:
        meta = self.meta
        _require_kind(where, "predicted", predicted, "u", "uint8 or uint16")
        expected = (self.num_tokens, meta.n_moe_layers, len(meta.predictors))
        if predicted.ndim != 4 or predicted.shape[:3] != expected:
            raise FileFormatError(
                f"{where}: predicted has shape {predicted.shape}; expected {(*expected, 'k')} "
                "(tokens, moe_layers, predictors named in meta, k)"
            )
        _check_range(where, "predicted", predicted, meta.n_experts)


def _require_kind(where: str, name: str, array: Array, kinds: str, expected: str) -> None:
    if array.dtype.kind not in kinds:
        raise FileFormatError(f"{where}: {name} has dtype {array.dtype}; expected {expected}")


def _require_shape(where: str, name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise FileFormatError(f"{where}: {name} has shape {array.shape}; expected {shape}")


def _check_range(where: str, name: str, ids: Array, num_experts: int) -> None:
    if int(ids.max(initial=0)) >= num_experts:
        at = tuple(int(i) for i in np.argwhere(ids >= num_experts)[0])
        raise FileFormatError(
            f"{where}: {name}{list(at)} is {ids[at]}; expected ids of 0..{num_experts - 1}"
        )


def _check_ids(where: str, name: str, ids: Array, num_experts: int) -> None:
    _check_range(where, name, ids, num_experts)
    for start in range(0, len(ids), _CHUNK_TOKENS):
        ordered = np.sort(ids[start : start + _CHUNK_TOKENS], axis=-1)
        twice = ordered[..., 1:] == ordered[..., :-1]
        if twice.any():
            token, layer, at = (int(i) for i in np.argwhere(twice)[0])
            raise FileFormatError(
                f"{where}: {name}[{start + token}, {layer}] names expert "
                f"{ordered[token, layer, at]} twice; expected distinct experts in a top-k"
            )
