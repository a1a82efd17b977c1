"""`OffloadConfig`: the user's options about offloading, as Transformers' `quantization_config`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.quantization_config import QuantizationConfigMixin

from tandem.core.config import from_mapping, require_types
from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.devices.options import OffloadOptions
from tandem.kernels.formats.weight_format import (
    ALIASES,
    FORMATS,
    ExpertFormat,
    WeightFormat,
    find_expert_format,
    find_format,
)

QUANT_METHOD = "tandem"
# Version of packed files. Any change of the layout or the meaning of bytes increases it.
PACKED_FORMAT_VERSION = 4
_READABLE_VERSIONS = (2, 3, 4)
"""In version 2, experts lie at any offset, without gaps. Up to version 3, IQ2 and IQ3 had one code
per weight, and no grids."""
_FIRST_WITH_GRIDS = 4

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}

_PACKED_DTYPES = {torch.bfloat16: find_format("bf16"), torch.float16: find_format("fp16")}

# The format of "auto" on the CPU if experts are quantised. Perplexity of the demo model with int4
# experts: 22.00 with dense layers as loaded, 21.99 with this format, 22.10 with groups of 128.
DEFAULT_DENSE_FORMAT = "int8-g32"


def plain_name(dtype: str | torch.dtype) -> str:
    """Return a dtype's name in lower case without prefix: "bfloat16" for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.").lower()


def parse_expert_dtype(name: str | torch.dtype) -> torch.dtype | ExpertFormat | None:
    """Return a torch dtype for "bf16" and the like, or a packed format for "int4" and the like.

    "q4_k+q6_k" names one format for the first projection and one for the second. "auto" gives None:
    experts keep the dtype in which they are loaded. Raises `ConfigError` for an unknown name.
    """
    name = plain_name(name)
    if name in ("auto", *_DTYPES):
        return parse_dtype(name, field="expert_dtype")
    packed = [f.name for f in FORMATS if f.group_size is not None] + list(ALIASES)
    if any(part not in packed for part in name.split("+", 1)):
        hint = nearest_names(name, ["auto", *_DTYPES, *packed])
        raise ConfigError(f"expert_dtype is {name!r}, which Tandem does not know; {hint}")
    return find_expert_format(name)


def parse_dense_dtype(name: str) -> WeightFormat | None:
    """Return the format of a `dense_dtype`; None for "none": linear layers stay as loaded.

    "auto" gives `DEFAULT_DENSE_FORMAT`. Raises `ConfigError` for an unknown name.
    """
    name = plain_name(name)
    if name == "none":
        return None
    names = [fmt.name for fmt in FORMATS] + list(ALIASES)
    if name == "auto":
        return find_format(DEFAULT_DENSE_FORMAT)
    if name not in names:
        hint = nearest_names(name, ["auto", "none", *names])
        raise ConfigError(f"dense_dtype is {name!r}, which Tandem does not know; {hint}")
    return find_format(name)


def stored_format(
    expert_dtype: torch.dtype | ExpertFormat | None, source_dtype: torch.dtype
) -> torch.dtype | ExpertFormat:
    """Return the format of experts in memory; fp32 stays a dtype, for the torch reference.

    bf16 and fp16 become the packed formats of these names. If `expert_dtype` is None, the result is
    that of `source_dtype`.
    """
    dtype = expert_dtype or source_dtype
    return _PACKED_DTYPES.get(dtype, dtype) if isinstance(dtype, torch.dtype) else dtype


def parse_dtype(name: str | torch.dtype, *, field: str) -> torch.dtype | None:
    """Return the torch dtype of "bf16", "float16", ...; None for "auto"; else `ConfigError`."""
    name = plain_name(name)
    if name == "auto":
        return None
    if name not in _DTYPES:
        hint = nearest_names(name, ["auto", *_DTYPES])
        raise ConfigError(f"{field} is {name!r}, which is not a dtype that Tandem knows; {hint}")
    return _DTYPES[name]


@dataclass(kw_only=True, repr=False)
class OffloadConfig(OffloadOptions, QuantizationConfigMixin):  # type: ignore[misc]
    """Options of a model whose experts, if any, Tandem keeps in host memory.

    Pass it as `quantization_config` to `from_pretrained`, or its fields to `tandem.load`.
    """

    quant_method: str = dataclasses.field(default=QUANT_METHOD, init=False)
    dense_dtype: str = "none"
    """The format of linear layers: "none" (as loaded), "int8", "int4", "bf16" or another packed
    format. "auto" keeps the codes of layers that the checkpoint has quantised. If the experts (in a
    dense model: any linear layers) are quantised, "auto" stores the other layers as int8-g32,
    otherwise as loaded."""
    isa: str | None = None
    """Instruction set of the CPU kernels; None selects the processor's best."""
    cache_dir: str | None = None
    """The folder of profiles, heat and residuals; None is `~/.cache/tandem`."""
    packed_format: int | None = None
    """Version of the packed files; set only in checkpoints written by `tandem.save` or
    `tandem.pack`."""
    expert_formats: list[str] | None = None
    """The format of each MoE layer, replacing `expert_dtype`: for packed checkpoints whose layers
    differ, and for recipes of `tandem.pack`."""
    dense_formats: dict[str, str] | None = None
    """By path: the formats of packed embeddings, and of linear layers whose format differs from
    `dense_dtype`; "none" leaves a layer unpacked."""

    def __post_init__(self) -> None:
        """Check every field; `ConfigError` names the field, the value and what is expected."""
        self.expert_dtype = plain_name(self.expert_dtype)
        self.dense_dtype = plain_name(self.dense_dtype)
        parse_expert_dtype(self.expert_dtype)
        parse_dense_dtype(self.dense_dtype)
        super().__post_init__()
        if self.packed_format not in (None, *_READABLE_VERSIONS):
            raise ConfigError(
                f"the checkpoint is packed in format {self.packed_format!r}, and this Tandem reads "
                f"formats {' and '.join(map(str, _READABLE_VERSIONS))}; pack it again with "
                "tandem.save"
            )
        self._require_grids()

    def _require_grids(self) -> None:
        """Raise `ConfigError` for IQ2 or IQ3 weights packed in a format version without grids."""
        if self.packed_format is None or self.packed_format >= _FIRST_WITH_GRIDS:
            return
        names = [self.expert_dtype, self.dense_dtype, *(self.expert_formats or ())]
        names += (self.dense_formats or {}).values()
        for name in names:
            if any(of_grid in name for of_grid in ("iq2_", "iq3_")):
                raise ConfigError(
                    f"the checkpoint has {name} as format {self.packed_format} had it, and this "
                    "Tandem reads it as files of GGUF have it; pack the GGUF file again"
                )

    @property
    def parsed_expert_dtype(self) -> torch.dtype | ExpertFormat | None:
        """The experts' dtype or packed format in host memory; None keeps the source's dtype."""
        return parse_expert_dtype(self.expert_dtype)

    @property
    def cache_path(self) -> Path:
        """The folder where Tandem keeps what it learns about models and this machine."""
        return Path(self.cache_dir) if self.cache_dir else Path.home() / ".cache" / "tandem"

    @classmethod
    def from_dict(
        cls, config_dict: dict[str, object], return_unused_kwargs: bool = False, **kwargs: object
    ) -> Any:
        """Build from config.json's `quantization_config`; an unknown key raises `ConfigError`."""
        values = {k: v for k, v in config_dict.items() if k != "quant_method"}
        require_types(cls, values, where="quantization_config")
        config = from_mapping(cls, values | kwargs, where="quantization_config")
        return (config, {}) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, object]:
        """Return the fields for config.json, without default values and options of a single run."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in (
            "cache_dir",
            "importance",
            "context",
            "sequences",
        ):  # options of a run, not of the model
            del defaults[name]
        kept = ("quant_method", "expert_dtype")
        values = {name: vars(self).get(name, default) for name, default in defaults.items()}
        return {k: v for k, v in values.items() if k in kept or v != defaults[k]}
