"""Finds the model that a command names: the demo (built on first use), a file or folder, a hub id.

Also adds the flags that all commands with a model share.
"""

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.cli.keeping import Keeper, cache_dir
from tandem.cli.progress import shows_progress, waiting
from tandem.cli.streams import require_text
from tandem.core.config import add_flags, option
from tandem.core.errors import HostCapacityError, ModelError
from tandem.devices.options import OffloadOptions
from tandem.foreign_types import PreTrainedModel, Tokenizer

if TYPE_CHECKING:
    from tandem.forecast.sizes import ModelSizes
    from tandem.hf.checkpoint import AnyCheckpoint
    from tandem.hf.packed_writer import OnProgress

DEMO_MODELS = ("demo", "demo-equal")
DENSE_DTYPE_HELP = (
    "linear layers beside experts (all of a dense model): none (as loaded), int8, int4, bf16 or "
    "another format; auto: int8 if the model is quantised, else none. A file's own codes stay"
)
_NO_TOKENIZER = "no tokenizer"
_TRIAL = "Hello, 1 2 3\n"  # some tokenizers load but fail on any text
# What a packed copy takes from its source besides the weights.
_CONFIGS = ("config.json", "generation_config.json")
_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The model that a command names; after `find_model`, with its path instead of the name.

    There is no flag for the hub's access token, because other users of the machine can read command
    lines. huggingface_hub reads the token from HF_TOKEN or from what `hf auth login` stored.
    """

    model: str = "demo"
    revision: str | None = option(
        None, help="branch, tag or commit of MODEL, if it is a hub id", metavar="REVISION"
    )
    trust_remote_code: bool = option(
        False, help="run the Python code that comes with MODEL, if it needs it"
    )
    verify: bool = False
    """Whether to verify checksums before loading; only commands that load a model have the flag."""


def add_model(
    parser: argparse.ArgumentParser,
    *,
    default: str | None = "demo",
    is_required: bool = False,
    loads: bool = False,
    help: str = "model directory, hub id (of GGUF with :TYPE), .gguf file, demo or demo-equal",
) -> None:
    """Add the argument MODEL and the flags of `ModelChoice`.

    MODEL may be left out unless it is required. A command that `loads` the model also has
    `--verify`.
    """
    shown = "" if is_required or default is None else f" (default: {default})"
    parser.add_argument(
        "model", nargs=None if is_required else "?", default=default, metavar="MODEL",
        help=help + shown,
    )  # fmt: skip
    add_flags(parser, ModelChoice)
    if loads:
        parser.add_argument(
            "--verify", action="store_true", default=None,
            help="read all of MODEL's files against their checksums before loading it; packed "
            "models and the demo have some",
        )  # fmt: skip


def find_model(choice: ModelChoice, *, quiet: bool) -> ModelChoice:
    """Return the choice with a path instead of a name.

    Builds the demo model, or downloads a model from the hub, if it is not on this machine yet.
    """
    from tandem.checkpoint.hub import HubOptions, find_model_path

    name = require_text(choice.model, "the model's path")  # safetensors opens UTF-8 paths only
    if name in DEMO_MODELS:
        name = _demo_directory(name, quiet=quiet)
    if quiet and not Path(name).exists():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    hub = HubOptions(choice.revision, with_code=choice.trust_remote_code)
    return dataclasses.replace(choice, model=str(find_model_path(name, hub)), revision=None)


def _demo_directory(name: str, *, quiet: bool) -> str:
    from tandem.demo import ensure_demo_model

    source = os.environ.get("TANDEM_DEMO_SOURCE")
    directory = ensure_demo_model(
        name,
        cache_dir=cache_dir(),
        source=Path(source).expanduser() if source else None,
        progress=None if quiet else progress_bar(),
    )
    return str(directory)


def progress_bar() -> Callable[[str, int, int], None]:
    """Return a callback (stage, done, total) that draws one bar per stage on standard error."""
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}

    def update(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            for bar in bars.values():
                bar.close()
            bars[stage] = tqdm(total=total, desc=stage, unit="", file=sys.stderr, leave=True)
        bars[stage].update(done - bars[stage].n)
        if done >= total:
            bars[stage].close()

    return update


def load_model_and_tokenizer(
    choice: ModelChoice,
    offload: OffloadOptions,
    *,
    quiet: bool,
    dense_dtype: str = "none",
    keeper: Keeper | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a model through Tandem, and its tokenizer; progress goes to standard error.

    With a `keeper`, a model that must be converted is read from its packed copy. If there is none,
    a copy is written, provided the user wants it.
    """
    from tandem.devices import kind_of

    found = find_model(choice, quiet=quiet)
    path = Path(found.model)
    import_transformers(quiet=quiet)
    from tandem.hf.checkpoint import open_model
    from tandem.hf.importance import importance_file

    checkpoint = open_model(path, may_run_code=found.trust_remote_code)  # reports damaged files
    tokenizer = load_tokenizer(found)  # first, as loading the model may take minutes
    load = functools.partial(_load, offload=offload, dense_dtype=dense_dtype, quiet=quiet)
    if keeper is None or checkpoint.is_packed or found.trust_remote_code:
        return load(found), tokenizer
    on_device = kind_of(offload.device).holds_dense_parts  # "auto" packs other layers on a device
    options = {
        "expert_dtype": offload.expert_dtype,
        "dense_dtype": f"{dense_dtype} on {offload.device}" if on_device else dense_dtype,
    }
    importance = importance_file(offload.importance, checkpoint, cache_dir())
    if importance is not None:
        options["importance"] = f"{importance.resolve()} of {importance.stat().st_mtime_ns}"
    # A copy's weights are already rounded with the importance.
    of_copy = functools.partial(load, offload=dataclasses.replace(offload, importance=None))
    configs = [file for name in _CONFIGS if (file := path / name).is_file()]
    label = source_label(choice.model, path)
    origin = keeper.origin(label, [*checkpoint.weight_files, *configs], options)
    if (copy := keeper.find(origin)) is not None:
        return of_copy(dataclasses.replace(found, model=str(copy))), tokenizer
    sizes = functools.partial(_sizes, checkpoint, offload, dense_dtype)
    keeper.look_ahead(origin, lambda: sizes().total_bytes)
    begin = time.perf_counter()
    try:
        if offload.expert_memory_bytes is not None:  # only for a copy, which is not there yet
            raise HostCapacityError(f"{label} is not packed, and --expert-memory is given")
        model = load(found)
    except HostCapacityError as error:
        if offload.expert_memory_bytes is not None and sizes().has_plain_experts:
            raise offload.no_slots_for_plain() from None
        num_bytes = sizes().total_bytes
        copy = keeper.packed_on_disk(origin, num_bytes, _packing(path, offload, dense_dtype))
        if copy is None:
            raise HostCapacityError(f"{error}; or {keeper.how_to_pack(num_bytes)}") from None
        return of_copy(dataclasses.replace(found, model=str(copy))), tokenizer
    keeper.begin(origin, model, time.perf_counter() - begin)
    return model, tokenizer


def _packing(
    path: Path, offload: OffloadOptions, dense_dtype: str
) -> Callable[[Path, "OnProgress"], object]:
    """Return a function that packs the model at `path` into a directory, and reports progress."""
    from tandem.hf.pack import pack

    return lambda target, on_progress: pack(
        path, target, on_progress=on_progress, expert_dtype=offload.expert_dtype,
        dense_dtype=dense_dtype, importance=offload.importance, cache_dir=str(cache_dir()),
    )  # fmt: skip


def _sizes(checkpoint: "AnyCheckpoint", offload: OffloadOptions, dense_dtype: str) -> "ModelSizes":
    from tandem.forecast.sizes import model_sizes
    from tandem.hf.config import OffloadConfig

    options = dataclasses.asdict(offload) | {"dense_dtype": dense_dtype}
    return model_sizes(checkpoint, OffloadConfig(**options, isa=os.environ.get("TANDEM_ISA")))


def source_label(model: str, path: Path) -> str:
    """Return the name of a packed copy's source: the demo's name, or the model's full path."""
    return model if model in DEMO_MODELS else str(path.resolve())


def load_model(
    choice: ModelChoice, offload: OffloadOptions, *, quiet: bool, dense_dtype: str = "none"
) -> PreTrainedModel:
    """Load a model through Tandem, without its tokenizer."""
    found = find_model(choice, quiet=quiet)
    import_transformers(quiet=quiet)
    return _load(found, offload=offload, dense_dtype=dense_dtype, quiet=quiet)


def _load(
    found: ModelChoice, *, offload: OffloadOptions, dense_dtype: str, quiet: bool
) -> PreTrainedModel:
    import tandem
    from tandem.demo import is_demo_model, verify_demo_model
    from tandem.hf.runtime import require_runtime

    is_demo = is_demo_model(Path(found.model))
    if found.verify and is_demo:
        verify_demo_model(Path(found.model))
    model = tandem.load(
        found.model,
        trust_remote_code=found.trust_remote_code,
        verify=found.verify and not is_demo,
        isa=os.environ.get("TANDEM_ISA"),
        cache_dir=str(cache_dir()),
        dense_dtype=dense_dtype,
        **dataclasses.asdict(offload),
    )
    if not (quiet or len(require_runtime(model).store)):
        who = "CPU" if model.device.type == "cpu" else "GPU"
        print(f"a dense model: it has no experts to share, the {who} computes all", file=sys.stderr)
    return model


def load_tokenizer(found: ModelChoice) -> Tokenizer:
    """Load the tokenizer of a model from `find_model`; raises `ModelError` if none is usable."""
    from transformers import AutoTokenizer

    from tandem.checkpoint.config_values import foreign_errors
    from tandem.text.gguf_tokenizer import load_gguf_tokenizer
    from tandem.text.tokenizer_files import require_possible_tokenizer

    source = Path(found.model)
    is_gguf = source.suffix == ".gguf"  # GGUF files contain the tokenizer
    if not is_gguf:
        require_possible_tokenizer(source)
    try:
        with foreign_errors(_NO_TOKENIZER):
            if is_gguf:
                tokenizer = load_gguf_tokenizer(source)
            else:
                tokenizer = AutoTokenizer.from_pretrained(
                    source,
                    trust_remote_code=found.trust_remote_code,
                    local_files_only=not found.trust_remote_code,
                )
            has_words = not set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)
            tokenizer.decode(tokenizer(_TRIAL)["input_ids"])
    except ModelError as error:
        if not str(error).startswith(_NO_TOKENIZER):  # the file itself is damaged
            raise
        raise _no_tokenizer(found.model, str(error).removeprefix(f"{_NO_TOKENIZER}: ")) from error
    # Without tokenizer files Transformers gives some models a tokenizer that maps every text to
    # nothing.
    if not has_words:
        raise _no_tokenizer(found.model, "its vocabulary is empty")
    return tokenizer


def _no_tokenizer(source: str, why: str) -> ModelError:
    directory = Path(source)
    if directory.is_dir() and not any(any(directory.glob(name)) for name in _TOKENIZER_FILES):
        return ModelError(
            f"{source} has no tokenizer: expected tokenizer.json, or one of "
            f"{', '.join(_TOKENIZER_FILES[1:])}; copy it from the model's source"
        )
    return ModelError(f"{source} has no tokenizer that loads ({why}); download its files again")


def import_transformers(*, quiet: bool, has_bars: bool = True) -> None:
    """Import Transformers, which takes seconds, and make it log errors only.

    Transformers shows progress bars only with `has_bars`, without `quiet`, and where bars can be
    drawn.
    """
    with waiting("importing torch and Transformers", quiet=quiet):
        from transformers.utils import logging

        import tandem.hf.load  # noqa: F401

    logging.set_verbosity_error()
    if quiet or not has_bars or not shows_progress():
        logging.disable_progress_bar()
