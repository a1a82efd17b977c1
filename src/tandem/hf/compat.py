"""Private parts of Transformers, and all differences between its versions (5.17 to today)."""

import copy
import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, cache_utils
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
)
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from tandem.foreign_types import ImageFeatures, ModelPart, PreTrainedModel

OLDEST_SUPPORTED = {"torch": (2, 9), "transformers": (5, 17)}
NEWEST_TESTED = {"torch": (2, 13), "transformers": (5, 24)}
# Config flags that make Transformers add hooks to modules, again for each copy.
_CAPTURED_OUTPUTS = {"output_hidden_states", "_output_attentions", "output_router_logits"}

# At the first call of each, it logs that a model's reference implementations run.
_REFERENCE_LOGGER = "transformers.integrations.hub_kernels"


def untested_version(name: str) -> str | None:
    """Return a warning if torch or Transformers is newer than all tested versions; else None."""
    found, newest = version(name), NEWEST_TESTED[name]
    if tuple(int(part) for part in found.split(".")[:2]) <= newest:
        return None
    tested = ".".join(map(str, newest))
    return (
        f"{name} {found} is newer than {tested}, the newest that Tandem is tested with: a "
        f"model may run slower (`tandem run --explain`); pip install '{name}=={tested}.*' goes back"
    )


T = TypeVar("T")


class QuantizerHooks:
    """Makes the quantizer hooks of all versions call two methods, which subclasses override."""

    def prepare_config(self, config: PreTrainedConfig) -> None:
        """Prepare the model's config before the checkpoint's files are looked up."""

    def rewrite_conversions(self, conversions: list[object]) -> list[object]:
        """Return the model's weight conversions; subclasses change them."""
        return conversions

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Call `prepare_config`: the hook since 5.2x that receives the config."""
        self.prepare_config(config)
        return config

    def update_tp_plan(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Call `prepare_config`: the hook of 5.17 that receives the config."""
        self.prepare_config(config)
        return config

    def update_weight_conversions(
        self, weight_conversions: list[object], model: object = None
    ) -> list[object]:
        """Call `rewrite_conversions`; 5.17 passes no model."""
        return self.rewrite_conversions(list(weight_conversions))


def is_expert_merge(converter: object) -> bool:
    """Tell whether a converter only stacks separate experts (and joins gate and up)."""
    if not isinstance(converter, WeightConverter):
        return False
    merge, *rest = converter.operations
    if not (type(merge) is MergeModulelist and merge.dim == 0):
        return False
    return not rest or (len(rest) == 1 and type(rest[0]) is Concatenate and rest[0].dim == 1)


def own_conversions(model: PreTrainedModel) -> list[WeightConverter | WeightRenaming]:
    """Return weight conversions of a model that Transformers does not list for its class.

    These merge experts that a checkpoint stores one by one (an adapter's `SEPARATE`). A text model
    with `MULTIMODAL_TYPE` also gets that type's conversions, except conversions of name prefixes.
    """
    whole_type = getattr(model, "MULTIMODAL_TYPE", None)
    known = [] if whole_type is None else get_checkpoint_conversion_mapping(whole_type) or []
    inner = [one for one in known if not any(x.startswith("^") for x in one.source_patterns)]
    return [*inner, *_separate_experts(model)]


def _separate_experts(model: PreTrainedModel) -> list[WeightConverter]:
    paths = {module.SEPARATE for module in model.modules() if hasattr(module, "SEPARATE")}
    merge, found = MergeModulelist(dim=0), list[WeightConverter]()
    for path in sorted(paths):
        gate, up, down = (f"{path}.*.{part}_proj.weight" for part in ("gate", "up", "down"))
        joined = [merge, Concatenate(dim=1)]
        found.append(WeightConverter([gate, up], f"{path}.gate_up_proj", operations=joined))
        found.append(WeightConverter([down], f"{path}.down_proj", operations=[merge]))
    return found


def target_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return {tensor's name: parameter's name}, according to the model's weight conversions.

    If several tensors form one parameter (the experts of a layer), all map to its name.
    """
    conversions = [*get_model_conversion_mapping(model), *own_conversions(model)]
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    parameters = model.state_dict()
    prefix = model.base_model_prefix
    found = {}
    for name in sorted(names):
        target, _ = rename_source_key(name, renamings, converters, prefix, parameters)
        if target not in parameters and name in parameters:
            target, _ = rename_source_key(name, [], [], prefix, parameters)
        found[name] = target
    return found


def takes_logits_to_keep(model: PreTrainedModel) -> bool:
    """Tell whether a forward can compute the logits of some tokens only.

    Replaces `_supports_logits_to_keep` (5.17 to today), which only models with `generate` have.
    """
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def cache_argument(model: PreTrainedModel) -> str:
    """Return the KV cache's name in a model's arguments and outputs; it changed in 5.24."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def takes_cache(forward: Callable[..., T]) -> Callable[..., T]:
    """Let a forward with an argument `cache` also take it as `past_key_values` (before 5.24)."""

    @functools.wraps(forward)
    def renamed(*args: object, **kwargs: object) -> T:
        if "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        return forward(*args, **kwargs)

    return renamed


def has_dynamic_cache(model: PreTrainedModel) -> bool:
    """Tell whether `generate` would make a `DynamicCache` for a model (5.17 to today)."""
    return bool(model._supports_default_dynamic_cache())


def is_empty_cache_layer(layer: object) -> bool:
    """Tell whether a KV cache's layer only stands for a model layer without state (not in 5.17)."""
    return type(layer).__name__ == "DummyLayer"


def compresses_windows(layer: object) -> bool:
    """Tell whether a KV cache's layer has compressed keys beside a sliding window.

    True for DeepSeek-V4's layers, whose classes are in the model's own file (not in 5.17).
    """
    return hasattr(layer, "sliding_window") and hasattr(layer, "compress_rate")


def selects_by_head(layer: object) -> bool:
    """Tell whether each head of a KV cache's layer selects its own positions by index keys.

    True for MiniMax-M3's layers, whose classes are in the model's own file (not in 5.17).
    """
    return hasattr(layer, "update_index") and hasattr(layer, "idx_keys")


def keeps_prompt(layer: object) -> bool:
    """Tell whether a KV cache's layer keeps the whole prompt, but only a window of decoded tokens.

    True for Unlimited-OCR's layers, whose class is in the model's own file (not in 5.17).
    """
    return hasattr(layer, "sliding_window") and hasattr(layer, "prefill_length")


def layers_again(config: PreTrainedConfig, layers: list[T]) -> list[T]:
    """Return the layers that a forward repeats after its first pass, in the order of execution.

    Inkling 2 loops like this; its code copies the KV cache's layers for each pass (not in 5.17).
    """
    if not hasattr(config, "loop_num_passes"):
        return []
    looped = layers[config.loop_layer_index_start : config.loop_layer_index_end]
    return looped * (int(config.loop_num_passes) - 1)


def cache_layer_kinds(*names: str) -> tuple[type, ...]:
    """Return Transformers' classes of KV cache layers with these names; 5.17 lacks some names."""
    return tuple(vars(cache_utils)[name] for name in names if name in vars(cache_utils))


def own_cache_class(model: PreTrainedModel) -> type[DynamicCache] | None:
    """Return the KV cache class that a model's own file defines and requires; None: no class."""
    own = vars(sys.modules[type(model).__module__]).values()
    kinds = (kind for kind in own if isinstance(kind, type) and issubclass(kind, DynamicCache))
    return next((kind for kind in kinds if kind.__module__ == type(model).__module__), None)


def forget_positions(cache: object) -> None:
    """Delete the positions that Qwen4 stores on a KV cache, so that a prompt starts at 0 (5.17)."""
    vars(cache).pop("position_ids", None)


def first_position_ids(model: PreTrainedModel, ids: Tensor, kwargs: dict[str, object]) -> Tensor:
    """Return the positions that `generate` gives a prompt's tokens (5.17 to today).

    Models with images keep in `rope_deltas` by how much a prompt's positions differ from its
    length. A later forward without positions would add that difference to any prompt, so the old
    value is restored.
    """
    noting = vars(getattr(model, "model", model))
    before = noting.get("rope_deltas")
    positions: Tensor = model._prepare_position_ids_for_generation(ids, dict(kwargs))
    if "rope_deltas" in noting:
        noting["rope_deltas"] = before
    return positions


def next_step_kwargs(
    model: PreTrainedModel, outputs: object, kwargs: dict[str, object]
) -> dict[str, object]:
    """Return the arguments of the step after `outputs`, as `generate` sets them (5.17 to today)."""
    updated: dict[str, object] = model._update_model_kwargs_for_generation(outputs, kwargs)
    return updated


def config_to_step(
    config: PreTrainedConfig, attention: str, copies: dict[int, PreTrainedConfig]
) -> PreTrainedConfig:
    """Return a copy of a config that names `attention`, for a forward that returns only logits.

    Replaces `set_attn_implementation`, which changes the config that all other code reads (5.17 to
    today). `copies` collects copies by the original's `id`, as configs may contain each other.
    """
    if id(config) not in copies:
        own = copies[id(config)] = copy.copy(config)
        for name, value in vars(config).items():
            if isinstance(value, PreTrainedConfig):
                vars(own)[name] = config_to_step(value, attention, copies)
            elif name in _CAPTURED_OUTPUTS:
                vars(own)[name] = False
        own._attn_implementation_internal = attention
    return copies[id(config)]


def use_experts(config: PreTrainedConfig, name: str) -> None:
    """Set, by name, the experts function of all modules that read a config.

    Replaces `set_experts_implementation`, which models have and configs lack (5.17 to today).
    """
    config._experts_implementation = name


def choose_no_implementation(config: PreTrainedConfig) -> None:
    """Clear a config's experts function, and its attention function unless "eager" or "sdpa".

    Transformers then chooses both, also in nested configs. 5.17 to today; no public name.
    """
    if config._attn_implementation not in (None, "eager", "sdpa"):
        config._attn_implementation = None
    config._experts_implementation = None


def gating(module: ModelPart) -> Callable[[Tensor], Tensor]:
    """Return an experts module's private method that applies the gate (5.17 to today)."""
    gate: Callable[[Tensor], Tensor] = module._apply_gate
    return gate


def dispensable_weights(model: PreTrainedModel) -> Collection[str]:
    """Return name patterns of weights that a checkpoint may lack.

    Apart from Tandem, only Transformers' loader reads these patterns (5.17 to today).
    """
    return model._keys_to_ignore_on_load_missing or ()


def ignore_in_files(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Make Transformers ignore the weights `names` in a checkpoint's files without a warning.

    5.17 to today; no public name.
    """
    known = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*known, *map(re.escape, names)}


def parts_in_fp32(model: PreTrainedModel) -> Collection[str]:
    """Return words that mark weights which `from_pretrained` loads in fp32, whatever the dtype.

    Such a word is a part of the weight's name. 5.17 to today; no public name.
    """
    return model._keep_in_fp32_modules_strict or ()


@contextmanager
def reference_warnings_held() -> Iterator[list[logging.LogRecord]]:
    """Hold back Transformers' warnings about reference implementations; yield them as a list.

    For trials of operations that Tandem later computes itself. Transformers gives each warning once
    per process (since 5.2x), so the caller must repeat the warnings that prove true.
    """
    logger = logging.getLogger(_REFERENCE_LOGGER)
    held: list[logging.LogRecord] = []

    def passes(record: logging.LogRecord) -> bool:
        is_held = "falling back to its reference" in record.getMessage()
        if is_held:
            held.append(record)
        return not is_held

    logger.addFilter(passes)
    try:
        yield held
    finally:
        logger.removeFilter(passes)


def repeat_warnings(held: Iterable[logging.LogRecord]) -> None:
    """Log the warnings that `reference_warnings_held` has held back."""
    for record in held:
        logging.getLogger(record.name).handle(record)


def image_tower(model: PreTrainedModel) -> ModelPart | None:
    """Return the module that merges image features into a model's embeddings; None: no module."""
    inner: ModelPart | None = getattr(model, "model", None)
    return inner if hasattr(inner, "get_image_features") else None


def image_features(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> ImageFeatures:
    """Run the vision tower on a processor's outputs; return the features for a model's forward."""
    tower = image_tower(model)
    assert tower is not None  # otherwise no processor could have prepared images
    names = inspect.signature(tower.get_image_features).parameters
    with torch.inference_mode():
        own = {name: value for name, value in inputs.items() if name in names}
        return tower.get_image_features(**own, return_dict=True)


def image_positions(
    model: PreTrainedModel, ids: Sequence[int], inputs: Mapping[str, Tensor]
) -> Tensor:
    """Return the positions (kinds, n_tokens) that `generate` gives a prompt with images.

    Kinds are time, height and width. Text positions, which some models put first, are left out.
    """
    tokens = torch.tensor([list(ids)], device="cpu")
    kwargs: dict[str, object] = {**inputs, "attention_mask": torch.ones_like(tokens)}
    positions = first_position_ids(model, tokens, kwargs)
    kinds = positions[:, 0] if positions.dim() == 3 else positions  # (kinds, n_tokens)
    return kinds[1:] if len(kinds) > 3 else kinds


def model_of(
    kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Build a model of class `kind` in a dtype; no public method of Transformers can (today)."""
    return kind._from_config(config, dtype=dtype)


@contextmanager
def given_features(
    model: PreTrainedModel, features: ImageFeatures | None
) -> Iterator[dict[str, Tensor]]:
    """Make `model`, a shallow copy, use `features` in place of its tower inside the context.

    Yields the arguments that a forward needs for this; without features, none. Works with all
    versions: 5.23 has an argument for features, 5.17 has none.
    """
    if features is None:
        yield {}
        return
    tower = image_tower(model)
    assert tower is not None  # its features are the argument
    own = vars(tower)
    own["get_image_features"] = lambda *_, **__: features
    try:
        yield {"pixel_values": torch.zeros(1, device="cpu")}
    finally:
        del own["get_image_features"]
