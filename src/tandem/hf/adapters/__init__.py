"""Adapters: modules for experts that do not use Transformers' experts interface.

Each architecture has one file. An adapter replaces a module of Transformers in a model that is
about to be loaded. It keeps the module's other parts and holds its experts as an `AdaptedExperts`.
Parameters have the names that Transformers gives the checkpoint's tensors. If they cannot, the
adapter has `STACKED`, a tuple of `StackedRows`, or `SEPARATE`, the path of experts that a
checkpoint may store one by one, each with three projections. A text model that Transformers has
only together with a tower is a whole model here (`text_class`).
"""

from collections.abc import Callable, Mapping
from importlib import import_module

from torch import nn

from tandem.foreign_types import ModelPart, PreTrainedConfig, PreTrainedModel
from tandem.hf.adapters.adapted_experts import StackedRows
from tandem.hf.adapters.dbrx import DbrxExperts
from tandem.hf.adapters.llama4 import Llama4Moe, with_image_outputs
from tandem.hf.adapters.longcat_flash import LongcatFlashExperts
from tandem.hf.adapters.step3p7 import Step3p7Experts

Adapter = Callable[[ModelPart, PreTrainedConfig], nn.Module]

ADAPTERS: Mapping[str, Adapter] = {
    "dbrx.modeling_dbrx.DbrxExperts": DbrxExperts,
    "llama4.modeling_llama4.Llama4TextMoe": Llama4Moe,
    "longcat_flash.modeling_longcat_flash.LongcatFlashExperts": LongcatFlashExperts,
    "step3p7.modeling_step3p7.Step3p7Experts": Step3p7Experts,
    "llama4.modeling_llama4.Llama4ForCausalLM": with_image_outputs,
}
"""Adapters by class, named as in `transformers.models`."""

TEXT_MODELS: Mapping[str, str] = {"step3p5": "Step3p5ForCausalLM"}
"""Class names by model type; each class is in this folder's module named like the model type."""


def text_class(model_type: str) -> type[PreTrainedModel] | None:
    """Return Tandem's own class for a text model; None: Tandem has none for this model type."""
    if model_type not in TEXT_MODELS:
        return None
    found: type[PreTrainedModel] = getattr(
        import_module(f"{__name__}.{model_type}"), TEXT_MODELS[model_type]
    )
    return found


def put_on_interface(model: PreTrainedModel) -> None:
    """Replace each module that has an adapter by the adapter; a second call changes nothing."""
    config = model.config.get_text_config()
    for path, module in list(model.named_modules()):
        adapter = adapter_of(type(module))
        if adapter is not None and path:
            model.set_submodule(path, adapter(module, config))


def stacked_rows(model: nn.Module) -> list[StackedRows]:
    """Return the stacked checkpoint tensors that a model's adapters read."""
    kinds = {type(module) for module in model.modules()}
    return [rows for kind in kinds for rows in getattr(kind, "STACKED", ())]


def adapter_of(kind: type) -> Adapter | None:
    """Return the adapter for modules of a class; None: the modules stay as they are."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return ADAPTERS.get(name.removeprefix("transformers.models."))
