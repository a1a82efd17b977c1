"""The types of Transformers' models for annotations: importing them loads most of Transformers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer
    from transformers.modeling_outputs import BaseModelOutputWithPooling as ImageFeatures

    class ModelPart(nn.Module):
        """A module of a model's own code, which alone knows what its attributes are."""

        def __getattr__(self, name: str) -> Any: ...
else:
    GenerationConfig = PreTrainedConfig = PreTrainedModel = Tokenizer = object
    ImageFeatures = ModelPart = object

__all__ = [
    "GenerationConfig", "ImageFeatures", "ModelPart", "PreTrainedConfig", "PreTrainedModel",
    "Tokenizer",
]  # fmt: skip
