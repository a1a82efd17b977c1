"""Checks the values of config.json and generation_config.json before anything is built from them.

Transformers rejects some wrong values too, but late and with its own messages; `foreign_errors`
turns such a message into one sentence.
"""

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.checkpoint.json_files import JsonObject, is_int, read_json, shown
from tandem.core.errors import ModelError, TandemError, exhaustion
from tandem.core.registry import nearest_names
from tandem.foreign_types import PreTrainedConfig

# Names of counts in Transformers' configs.
_COUNTS = (
    "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "attention_chunk_size", "index_block_size", "index_topk_blocks",
    "sparse_block_size", "sparse_topk_blocks",
)  # fmt: skip
# Configs within a config. DBRX keeps its experts in the second, MiniMax-M3 its indexers in the
# third.
_PARTS = ("text_config", "ffn_config", "sparse_attention_config")
# For these, 0 means that the model has none or derives the size from another key.
_OPTIONAL_COUNTS = ("head_dim", "index_topk", "intermediate_size", "moe_intermediate_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
    "moe_top_k",
)
_ITERATIONS = ("hc_sinkhorn_iters",)  # per layer and token; released models have 20
_MOST_ITERATIONS = 1000
_ACTIVATIONS = ("hidden_act", "hidden_activation")
_DTYPES = ("dtype", "torch_dtype")
_TOKEN_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LONGEST_MESSAGE = 400  # characters
GENERATION_CONFIG = "generation_config.json"


def require_possible_values(where: str, config: JsonObject) -> None:
    """Raise `ModelError` naming the first config field with an impossible value."""
    for part in _configs_in(config):
        for name in _COUNTS:
            _require_count(where, name, part.get(name), least=1)
        for name in _OPTIONAL_COUNTS:
            _require_count(where, name, part.get(name), least=0)
        for name in _ITERATIONS:
            _require_few(where, name, part.get(name))
        require_top_k(where, part)
        for name in _DTYPES:
            _require_dtype(where, name, part.get(name))
        for name in _ACTIVATIONS:
            _require_activation(where, name, part.get(name))


def _configs_in(config: JsonObject) -> Iterator[JsonObject]:
    yield config
    for name in _PARTS:
        if isinstance(part := config.get(name), dict):
            yield from _configs_in(part)


def require_readable_config(directory: Path, model_type: str) -> None:
    """Raise `ModelError` if Transformers cannot parse config.json as a config of `model_type`."""
    from transformers import AutoConfig

    with foreign_errors(f"{directory}/config.json is not a config of {model_type}"):
        AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)


def value_of(config: PreTrainedConfig, name: str) -> Any:
    """Return a config value that only some models have; None if it is absent."""
    return getattr(config, name, None)


def experts_per_token(config: PreTrainedConfig) -> int:
    """Return how many experts per layer compute each token; 1 if the config has no such number.

    DBRX keeps this number in the nested `ffn_config`.
    """
    parts = [part for part in (config, value_of(config, "ffn_config")) if part is not None]
    return next((int(k) for part in parts for name in _TOP_K if (k := value_of(part, name))), 1)


def require_generation_config(directory: Path) -> None:
    """Raise `ModelError` for a value of the wrong type in generation_config.json, if it exists.

    Transformers would silently ignore such a file.
    """
    if not (directory / GENERATION_CONFIG).exists():
        return
    where, config = f"{directory}/{GENERATION_CONFIG}", read_json(directory, GENERATION_CONFIG)
    for name in _TOKEN_IDS:
        value = config.get(name)
        ids = value if isinstance(value, list) else [value]
        if value is not None and not all(is_int(one) for one in ids):
            raise ModelError(f"{where}: {name} is {shown(value)}, expected a token id")
    for name in _SAMPLING:
        value = config.get(name)
        if value is not None and not (is_int(value) or isinstance(value, float)):
            raise ModelError(f"{where}: {name} is {shown(value)}, expected a number")


@contextmanager
def foreign_errors(what: str) -> Iterator[None]:
    """Turn another library's error in the `with` body into a `ModelError` that begins with `what`.

    Failed assertions in Tandem's own code pass through, because they show a defect of Tandem.
    """
    try:
        yield
    except TandemError:
        raise
    except BaseException as error:
        # A panic in the Rust code of tokenizers and safetensors is not an `Exception`.
        is_panic = type(error).__name__ == "PanicException"
        if not (isinstance(error, Exception) or is_panic) or _is_own_assertion(error):
            raise
        raise ModelError(f"{what}: {short_message(error)}") from error


def _is_own_assertion(error: BaseException) -> bool:
    if not isinstance(error, AssertionError):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__")).startswith("tandem.")


def short_message(error: BaseException) -> str:
    """Return one line of another library's error message, cut after 400 characters."""
    sentence = _sentence(error)
    return sentence if len(sentence) <= _LONGEST_MESSAGE else f"{sentence[:_LONGEST_MESSAGE]}..."


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"it does not know {error}"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if (exhausted := exhaustion(error)) is not None:
        return str(exhausted)
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if lines[0].endswith(":") and len(lines) > 1:  # the next line names the field again
        return re.sub(r"^\w+Error: ", "", lines[1])
    return lines[0]


def _require_count(where: str, name: str, value: object, *, least: int) -> None:
    """Raise `ModelError` unless a value is None, an int from `least` up, or a list of ints >= 0."""
    if isinstance(value, list):
        is_possible = all(is_int(one) and one >= 0 for one in value)
    else:
        is_possible = value is None or (is_int(value) and value >= least)
    if not is_possible:
        raise ModelError(f"{where}: {name} is {shown(value)}, expected a whole number from {least}")


def _require_few(where: str, name: str, value: object) -> None:
    if value is not None and not (is_int(value) and 1 <= value <= _MOST_ITERATIONS):
        raise ModelError(
            f"{where}: {name} is {shown(value)}, expected a whole number up to {_MOST_ITERATIONS}"
        )


def require_top_k(where: str, part: Mapping[str, object]) -> None:
    """Raise `ModelError` if a config's number of experts or of experts per token is impossible."""
    counts = [(name, count) for name in _EXPERTS if is_int(count := part.get(name))]
    for name, count in counts:
        if count < 0:
            raise ModelError(f"{where}: {name} is {count}, expected 0 or more")
    if not counts:
        return
    experts, most = max(counts, key=lambda pair: pair[1])
    least = min(most, 1)  # a dense model has 0 experts and chooses 0
    for name in _TOP_K:
        top_k = part.get(name)
        if is_int(top_k) and not least <= top_k <= most:
            raise ModelError(
                f"{where}: {name} is {top_k} and {experts} is {most}, expected {least} to {most} "
                "experts a token"
            )


def _require_dtype(where: str, name: str, value: object) -> None:
    """Raise `ModelError` unless a value is the name of a torch dtype, "auto" or None.

    In a dict, this applies to each of its values.
    """
    import torch

    for one in value.values() if isinstance(value, dict) else (value,):
        is_dtype = isinstance(one, str) and isinstance(
            vars(torch).get(one.removeprefix("torch.")), torch.dtype
        )
        if not is_dtype and one not in (None, "auto"):
            raise ModelError(f"{where}: {name} is {shown(one)}, expected a dtype such as bfloat16")


def _require_activation(where: str, name: str, value: object) -> None:
    from transformers.activations import ACT2FN

    if isinstance(value, str) and value not in ACT2FN:
        hint = nearest_names(value, list(ACT2FN))
        raise ModelError(
            f"{where}: {name} is {shown(value)}, which Transformers does not know; {hint}"
        )
