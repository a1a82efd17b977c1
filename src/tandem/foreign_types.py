"""Types of Transformers for annotations; at run time each is `object`, and nothing is imported."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer
    from transformers.modeling_outputs import BaseModelOutputWithPooling as ImageFeatures

    class ModelPart(nn.Module):
        """A module of a model's own code; type checkers accept any attribute of it."""

        def __getattr__(self, name: str) -> Any: ...
else:
    GenerationConfig = PreTrainedConfig = PreTrainedModel = Tokenizer = object
    ImageFeatures = ModelPart = object

__all__ = [
    "GenerationConfig", "ImageFeatures", "ModelPart", "PreTrainedConfig", "PreTrainedModel",
    "Tokenizer",
]  # fmt: skip
