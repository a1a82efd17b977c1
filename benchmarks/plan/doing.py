"""Plans a configuration as `tandem plan` does, and does it: loads, fills contexts, decodes."""

import contextlib
import io
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

from benchmarks.loading.large_model import memory_kinds, watching_memory
from benchmarks.plan.draws import Configuration
from benchmarks.plan.verdict import Planned, Taken

import tandem
from tandem.bench.random_model import build_random_model
from tandem.checkpoint.packed import DENSE_FILE
from tandem.cli.main import main as tandem_command
from tandem.core.errors import TandemWarning
from tandem.decode.slots import CachedSlotPool, SlotPool
from tandem.forecast.sizes import model_sizes
from tandem.forecast.speed_forecast import forecast_speed, time_model
from tandem.generate.generator import Generator
from tandem.hf.checkpoint import open_checkpoint
from tandem.hf.config import OffloadConfig
from tandem.hf.packed_layers import PackedModule
from tandem.hf.runtime import require_runtime

_KEPT = ("kv_cache_bytes", "state_bytes", "checkpoint_bytes", "expanded_bytes")
_ROUNDS = 3  # of a forecast and a measurement
_STEPS = 8  # the last tokens of a context; recorded steps are among them


def write_model(configuration: Configuration, folder: Path) -> Path:
    """Write the packed model, if it is not there."""
    if not (folder / "config.json").exists():
        offload = OffloadConfig(expert_dtype=configuration.expert_dtype)
        model = build_random_model(
            configuration.model_shape(), offload,
            dense_dtype=configuration.stored_dense_dtype, is_shared=True,
        )  # fmt: skip
        tandem.save(model, folder)
    return folder


def plan(configuration: Configuration, folder: Path, experts_bytes: int = 0) -> Planned:
    """Ask the command; the experts' bytes are for the device's memory."""
    words = ["plan", str(folder), "--no-measure", "--json"]
    words += ["--context", str(configuration.context), "--dense-dtype", configuration.dense_dtype]
    words += ["--sequences", str(configuration.sequences)]
    for name, value in device_options(configuration, experts_bytes).items():
        words += [f"--{name.replace('_', '-')}", value]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = tandem_command(words)
    if code:
        raise RuntimeError(f"tandem {' '.join(words)} ended with {code}")
    found: dict[str, Any] = json.loads(said.getvalue().splitlines()[-1])
    parts = dict(found["parts_bytes"])
    experts = parts.pop("experts")
    over_disk = found["from_disk"]
    dense = sum(parts.values())
    return Planned(
        fits=found["fits"],
        host=found["host_bytes"] + found["gpu_bytes"]["experts"],
        program=found["load_host_bytes"] - experts - dense,
        experts=experts,
        dense=dense,
        kept=sum(found[name] for name in _KEPT),
        num_experts=found["experts"],
        device_slots=found["expert_slots"],
        slots_over_disk=over_disk and over_disk["slots"],
    )


def device_options(configuration: Configuration, experts_bytes: int) -> dict[str, str]:
    """Return the options of the emulated device, if there is one."""
    if configuration.device_share is None:
        return {}
    num_bytes = int(configuration.device_share * experts_bytes)
    return {"device": "emulated", "gpu_memory": f"{num_bytes >> 10}KiB"}


def do(configuration: Configuration, folder: Path, experts_bytes: int = 0) -> Taken:
    """Load, fill each sequence's context, decode its last tokens."""
    options: dict[str, Any] = {**device_options(configuration, experts_bytes)}
    options |= {"context": configuration.context, "sequences": configuration.sequences}
    with warnings.catch_warnings(), watching_memory() as seen:
        warnings.simplefilter("ignore", TandemWarning)
        model = tandem.load(folder, dense_dtype=configuration.dense_dtype, **options)
        pool = Generator(model).slot_pool(configuration.sequences, capacity=configuration.context)
        _fill(pool, configuration)
    runtime = require_runtime(model)
    cache, slots = runtime.executor.cache, runtime.host_slots
    taken = Taken(
        peak=max(seen) + memory_kinds()["rssfile_bytes"] - _copied_bytes(model, folder),
        experts=runtime.store.num_bytes,
        dense=dense_bytes(model),
        kept=pool.num_bytes if isinstance(pool, CachedSlotPool) else 0,
        device_slots=0 if cache is None else cache.num_slots,
        slots_over_disk=None if slots is None else sum(slots.num_slots),
    )
    runtime.executor.close()
    return taken


def _copied_bytes(model: Any, folder: Path) -> int:
    """Return what is resident of the dense parts' file though all of it was copied.

    These pages go by themselves where memory is short.
    """
    if not any(isinstance(module, PackedModule) for module in model.modules()):
        return 0
    found, is_dense = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            is_dense = line.endswith(str(folder / DENSE_FILE))
        elif is_dense and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def _fill(pool: SlotPool, configuration: Configuration) -> None:
    """Give each sequence a prompt and decode what is left of its context."""
    slots = range(configuration.sequences)
    count = max(1, configuration.context - _STEPS)
    prompt = [3 + 7 * n % (configuration.vocabulary - 3) for n in range(count)]
    pool.prefill(dict.fromkeys(slots, prompt))
    for step in range(configuration.context - count):
        pool.decode(dict.fromkeys(slots, 3 + step))


def dense_bytes(model: Any) -> int:
    """Return the bytes of everything in a model but its experts; what is tied counts once."""
    packed = [module.packed for module in model.modules() if isinstance(module, PackedModule)]
    own: dict[int, int] = {p.matrix.data.data_ptr(): p.num_bytes for p in packed}
    tensors: dict[int, int] = {id(t): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    return sum(own.values()) + sum(tensors.values())


def speed_ratio(configuration: Configuration, folder: Path, cache: Path) -> float | None:
    """Return the forecast decode speed over the measured one; None where there is no forecast."""
    offload = OffloadConfig(dense_dtype=configuration.dense_dtype)
    sizes = model_sizes(open_checkpoint(folder), offload)
    forecast = forecast_speed(sizes, offload, cache_dir=cache, rounds=_ROUNDS)
    if isinstance(forecast, str):
        return None
    model = tandem.load(folder, dense_dtype=configuration.dense_dtype)
    found = statistics.median(time_model(model).decode_seconds for _ in range(_ROUNDS))
    require_runtime(model).executor.close()
    return found / forecast.decode_seconds
