"""Plans a configuration as `tandem plan` does, and runs it: load, contexts, decode."""

import contextlib
import io
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.generation.gguf_file import write_random_gguf
from benchmarks.loading.large_model import memory_kinds, watching_memory
from benchmarks.plan.draws import Configuration
from benchmarks.plan.verdict import Planned, Taken

import tandem
from tandem.bench.random_model import build_random_model
from tandem.checkpoint.packed import DENSE_FILE
from tandem.cli.main import main as tandem_command
from tandem.core.errors import TandemWarning
from tandem.decode.images import ImagePrompt
from tandem.decode.slots import CachedSlotPool, SlotPool
from tandem.forecast.sizes import model_sizes
from tandem.forecast.speed_forecast import forecast_speed, time_model
from tandem.generate.generator import Generator
from tandem.generate.speculation.small_model import load_small
from tandem.hf.checkpoint import open_model
from tandem.hf.config import OffloadConfig
from tandem.hf.packed_layers import PackedModule
from tandem.hf.runtime import require_runtime

_KEPT = ("kv_cache_bytes", "state_bytes", "checkpoint_bytes", "expanded_bytes")
_ROUNDS = 3  # of a forecast and a measurement
_DRAFT = "draft"  # the folder of a model that drafts
_DRAFTED = 4  # tokens at once
_STEPS = 8  # the last tokens of a context; recorded steps are among them


def write_model(configuration: Configuration, folder: Path) -> Path:
    """Write the packed model, or a GGUF file, unless it exists; return its path.

    A draft model is in a directory beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = model_path(configuration, folder)
    if configuration.has_draft and not (folder / _DRAFT / "config.json").exists():
        draft = build_random_model(
            configuration.draft_shape(), OffloadConfig(), dense_dtype="none", is_shared=True
        )
        tandem.save(draft, folder / _DRAFT)
    if path.suffix == ".gguf":
        if not path.exists():
            shape, kind = configuration.model_shape(), configuration.gguf_type
            write_random_gguf(path, shape, configuration.vocabulary, str(kind))
    elif not (path / "config.json").exists():
        offload = OffloadConfig(expert_dtype=configuration.expert_dtype)
        model = build_random_model(
            configuration.model_shape(), offload,
            dense_dtype=configuration.stored_dense_dtype, is_shared=True,
        )  # fmt: skip
        tandem.save(model, path)
    return path


def model_path(configuration: Configuration, folder: Path) -> Path:
    """Return the model's path: a directory, or a GGUF file."""
    return folder / ("model" if configuration.gguf_type is None else "model.gguf")


def plan(configuration: Configuration, folder: Path, experts_bytes: int = 0) -> Planned:
    """Run the command; the experts' bytes set the device's memory."""
    words = ["plan", str(model_path(configuration, folder)), "--no-measure", "--json"]
    words += ["--context", str(configuration.context), "--dense-dtype", configuration.dense_dtype]
    words += ["--sequences", str(configuration.sequences)]
    words += ["--image-tokens", str(configuration.image_tokens)]
    words += ["--draft", str(folder / _DRAFT)] if configuration.has_draft else []
    for name, value in offload_options(configuration, experts_bytes).items():
        words += [f"--{name.replace('_', '-')}", value]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = tandem_command(words)
    if code:
        raise RuntimeError(f"tandem {' '.join(words)} ended with {code}")
    found: dict[str, Any] = json.loads(printed.getvalue().splitlines()[-1])
    parts = dict(found["parts_bytes"])
    experts, dense = parts.pop("experts"), sum(parts.values())
    if (over_disk := found["from_disk"]) and experts_bytes:
        experts = over_disk["memory_bytes"]
    return Planned(
        fits=found["fits"],
        host=found["host_bytes"] + found["gpu_bytes"]["experts"],
        program=found["load_host_bytes"] - experts - dense,
        experts=experts,
        dense=dense,
        kept=sum(found[name] for name in _KEPT),
        draft=found["draft_bytes"],
        num_experts=found["experts"],
        device_slots=found["expert_slots"],
        slots_over_disk=over_disk and over_disk["slots"],
    )


def offload_options(configuration: Configuration, experts_bytes: int) -> dict[str, str]:
    """Return the options for the experts' memory, on a device or over the disk."""
    found: dict[str, str] = {}
    if (share := configuration.device_share) is not None:
        found |= {"device": "emulated", "gpu_memory": f"{int(share * experts_bytes) >> 10}KiB"}
    if (share := configuration.expert_memory_share) is not None and experts_bytes:
        found["expert_memory"] = f"{int(share * experts_bytes) >> 10}KiB"
    return found


def execute(configuration: Configuration, folder: Path, experts_bytes: int = 0) -> Taken:
    """Load, fill each sequence's context, decode its last tokens."""
    path = model_path(configuration, folder)
    options: dict[str, Any] = {**offload_options(configuration, experts_bytes)}
    options |= {"context": configuration.context, "sequences": configuration.sequences}
    with warnings.catch_warnings(), watching_memory() as seen:
        warnings.simplefilter("ignore", TandemWarning)
        model = tandem.load(path, dense_dtype=configuration.dense_dtype, **options)
        draft = load_small(folder / _DRAFT) if configuration.has_draft else None
        generator = Generator(model, draft=draft)
        pool = generator.slot_pool(configuration.sequences, capacity=configuration.context)
        prompt = _fill(pool, configuration, model)
        drafted = _draft(generator, pool, prompt, configuration)
    runtime = require_runtime(model)
    cache, slots = runtime.executor.cache, runtime.host_slots
    taken = Taken(
        peak=max(seen) + memory_kinds()["rssfile_bytes"] - _copied_bytes(model, path),
        experts=runtime.store.num_bytes if slots is None else slots.num_bytes,
        dense=dense_bytes(model),
        kept=pool.num_bytes if isinstance(pool, CachedSlotPool) else 0,
        draft=0 if draft is None else dense_bytes(draft) + drafted,
        device_slots=0 if cache is None else cache.num_slots,
        slots_over_disk=None if slots is None else sum(slots.num_slots),
    )
    runtime.executor.close()
    return taken


def _copied_bytes(model: Any, path: Path) -> int:
    """Return the resident bytes of files whose contents were copied entirely.

    The system drops these pages when memory is short. They belong to packed dense parts, experts
    with slots, and GGUF files.
    """
    copied = [str(path)] if path.is_file() else []
    if any(isinstance(module, PackedModule) for module in model.modules()):
        copied.append(str(path / DENSE_FILE))
    if require_runtime(model).host_slots is not None:
        copied += [str(file) for file in path.glob("*.safetensors")]
    found, is_copied = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            is_copied = line.endswith(tuple(copied))
        elif is_copied and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def _fill(pool: SlotPool, configuration: Configuration, model: Any) -> list[int]:
    """Give each sequence a prompt and decode the rest of its context; return the prompt."""
    slots = range(configuration.sequences)
    count = max(1, configuration.context - _STEPS)
    prompt = [3 + 7 * n % (configuration.vocabulary - 3) for n in range(count)]
    if configuration.image_side:
        shown = _with_image(prompt, configuration.image_side, model)
        prompt = list(shown.keys)
        for slot in slots:
            pool.show(slot, shown)
    pool.prefill(dict.fromkeys(slots, prompt))
    for step in range(configuration.context - count):
        pool.decode(dict.fromkeys(slots, 3 + step))
    return prompt


def _with_image(prompt: list[int], side: int, model: Any) -> ImagePrompt:
    """Return the prompt with a square image of random pixels first, of the same length."""
    vision, token = model.config.vision_config, model.config.image_token_id
    merge = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    text = [one if one < token or one > token + 3 else 3 for one in prompt[side**2 :]]
    ids = [token] * side**2 + text
    random = np.random.default_rng(0)
    return ImagePrompt(
        tuple(ids),
        tuple([-1] * side**2 + text),
        {
            "pixel_values": random.random(((side * merge) ** 2, width), dtype=np.float32),
            "image_grid_thw": np.array([[1, side * merge, side * merge]]),
            "mm_token_type_ids": np.array([[int(one == token) for one in ids]]),
        },
    )


def _draft(
    generator: Generator, pool: SlotPool, prompt: list[int], configuration: Configuration
) -> int:
    """Let the drafter read all sequences and draft; return the bytes that it keeps of them."""
    speculation, kept = generator.speculation, 0
    assert speculation is not None
    slots = range(configuration.sequences)
    for drafter in speculation.models:
        drafter.follow(pool)
        histories = {slot: [3 if one < 0 else one for one in prompt] for slot in slots}
        drafter.draft(histories, dict.fromkeys(slots, _DRAFTED), 0.0)
        kept += drafter.num_bytes
    return kept


def dense_bytes(model: Any) -> int:
    """Return the bytes of a model without its experts; tied weights count once."""
    packed = [module.packed for module in model.modules() if isinstance(module, PackedModule)]
    own: dict[int, int] = {p.matrix.data.data_ptr(): p.num_bytes for p in packed}
    tensors: dict[int, int] = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    return sum(own.values()) + sum(tensors.values())


def speed_ratio(configuration: Configuration, folder: Path, cache: Path) -> float | None:
    """Return the forecast decode speed over the measured one; None without a forecast."""
    offload = OffloadConfig(dense_dtype=configuration.dense_dtype)
    path = model_path(configuration, folder)
    sizes = model_sizes(open_model(path), offload)
    forecast = forecast_speed(sizes, offload, cache_dir=cache, rounds=_ROUNDS)
    if isinstance(forecast, str):
        return None
    model = tandem.load(path, dense_dtype=configuration.dense_dtype)
    found = statistics.median(time_model(model).decode_seconds for _ in range(_ROUNDS))
    require_runtime(model).executor.close()
    return found / forecast.decode_seconds
