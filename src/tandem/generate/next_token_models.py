"""The properties of a model that a decode loop needs: context, vocabulary, end tokens, adapters."""

from transformers import GenerationMixin

from tandem.checkpoint.config_values import value_of
from tandem.core.errors import UnsupportedModelError
from tandem.foreign_types import PreTrainedModel


def without_adapters_wrapper(model: PreTrainedModel) -> PreTrainedModel:
    """Return the Transformers model inside a PEFT model; return any other model unchanged.

    The returned model's layers contain the adapters. Raises `UnsupportedModelError` for adapters
    that are not in layers but put something before the prompt.
    """
    if not (hasattr(model, "get_base_model") and hasattr(model, "peft_config")):
        return model
    for name, config in model.peft_config.items():
        if value_of(config, "is_prompt_learning"):
            raise UnsupportedModelError(
                f"adapter {name!r} is {config.peft_type} and puts something before the prompt, "
                "which Tandem's loop does not; call model.generate(...)"
            )
    return model.get_base_model()


def adapter_state(model: PreTrainedModel) -> tuple[object, ...]:
    """Return which adapters of a model are active, disabled or merged; () without adapters.

    Keys and values that were computed in another state must not be used.
    """
    if not hasattr(model, "peft_config"):
        return ()
    return tuple(
        (tuple(active), bool(layer.disable_adapters), bool(layer.merged))
        for layer in model.modules()
        # In Transformers' own models `active_adapters` is a method.
        if isinstance(active := getattr(layer, "active_adapters", None), list)
    )


def require_next_token_model(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` unless a model generates text token by token."""
    name = type(model).__name__
    if not model.can_generate():
        raise UnsupportedModelError(f"{name} cannot generate text")
    if not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(
            f"{name} does not write token by token but in a way of its own; "
            "call model.generate(...)"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder, which Tandem's loop does not drive; "
            "call model.generate(...)"
        )


def context_tokens(model: PreTrainedModel) -> int | None:
    """Return the longest sequence that a model supports; None if unknown."""
    longest: int | None = value_of(model.config.get_text_config(), "max_position_embeddings")
    return longest


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of token ids that a model can read."""
    return int(model.get_input_embeddings().weight.shape[0])


def end_of_sequence_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the token ids that end an answer."""
    ids = model.generation_config.eos_token_id
    return frozenset(() if ids is None else (ids if isinstance(ids, list | tuple) else (ids,)))
