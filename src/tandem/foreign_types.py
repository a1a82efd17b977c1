"""The types of Transformers' models for annotations: importing them loads most of Transformers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    GenerationConfig = PreTrainedConfig = PreTrainedModel = Tokenizer = object

__all__ = ["GenerationConfig", "PreTrainedConfig", "PreTrainedModel", "Tokenizer"]
