"""The types of Transformers' models for annotations: importing them loads most of Transformers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    PreTrainedConfig = PreTrainedModel = Tokenizer = object

__all__ = ["PreTrainedConfig", "PreTrainedModel", "Tokenizer"]
