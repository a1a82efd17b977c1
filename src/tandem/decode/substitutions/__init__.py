"""Substitutes for parts of a model's own code: a file for each kind, most registered here.

Two kinds are registered elsewhere: the attention function, which is in Transformers' registry
(`attention`), and torch's functions between a prompt's layers (`prompt_operations`).
"""

from collections.abc import Callable, Mapping
from functools import partial

from tandem.decode.substitutions import (
    block_indexers,
    compressors,
    distance_bias,
    hyper_connections,
    latents,
    norms,
    recurrences,
    rotary,
    routers,
    state_layers,
    tempered_attention,
)
from tandem.decode.substitutions.substitution import Function, Substitution


def _always(function: Function, own: Function) -> Function:
    return function


METHODS: tuple[Substitution, ...] = (
    latents.LATENTS,
    block_indexers.QWEN4,
    block_indexers.GLM5,
    block_indexers.M3,
    block_indexers.POSITIONS_AS_MASK,
    compressors.COMPRESSOR,
    distance_bias.ATTENTION,
    distance_bias.POSITION_BIAS,
    hyper_connections.CONNECTION,
    hyper_connections.HEAD,
    state_layers.LIGHTNING_ATTENTION,
    state_layers.CONVOLVED_PROJECTION,
    state_layers.EMBEDDED_NGRAMS,
    state_layers.DILATED_CONVOLUTION,
    state_layers.DYNAMIC_CONVOLUTION,
    norms.NORM,
    tempered_attention.ATTENTION,
    routers.WITH_SHARED,
)

_BY_NAME = {**recurrences.RECURRENCES, **distance_bias.DISTANCES}
FUNCTIONS: Mapping[str, Callable[[Function], Function | None]] = {
    "apply_rotary_pos_emb": rotary.rotary_like,
    **{name: partial(_always, function) for name, function in _BY_NAME.items()},
}
"""Maps names of functions in model files to callables that find the functions' substitutes.

A callable takes the model's own function and returns the substitute, or None if there is none.
"""
