"""Hardware profiles that come with Tandem, and files of profiles measured on this machine."""

import contextlib
import json
import warnings
from importlib import resources
from pathlib import Path

from tandem.core.errors import ConfigError, TandemWarning
from tandem.core.registry import nearest_names
from tandem.policy.cost import HardwareProfile, ShapeCosts
from tandem.policy.plan import Geometry

DATAPOINT, DATAPOINT_FORMAT = "datapoint", 1
"""A JSON key and its value. They mark a file written by `tandem datapoint`, which contains a
profile."""


def profile_names() -> list[str]:
    """Return the names of the built-in profiles."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name[: -len(".json")] for file in files if file.name.endswith(".json"))


def load_profile(name_or_path: str) -> HardwareProfile:
    """Return a built-in profile by its name, or the profile in a profile file or datapoint file.

    A text with a slash or with the ending .json is a path. Raises `ConfigError` if there is no such
    profile or file, or if the file contains no valid profile.
    """
    if "/" in name_or_path or name_or_path.endswith(".json"):
        path = Path(name_or_path)
        if not path.is_file():
            raise ConfigError(f"{path}: found no such file; expected a hardware profile (JSON)")
        text = _profile_in(path.read_text(encoding="utf-8", errors="replace"))
        return HardwareProfile.from_json(text, where=str(path))
    names = profile_names()
    if name_or_path not in names:
        hint = nearest_names(name_or_path, names)
        raise ConfigError(f"unknown hardware {name_or_path!r}; {hint}; or give a profile's path")
    text = resources.files(__name__).joinpath(f"{name_or_path}.json").read_text(encoding="utf-8")
    return HardwareProfile.from_json(text, where=name_or_path)


def _profile_in(text: str) -> str:
    """Return the profile inside a datapoint's text, as JSON; any other text unchanged.

    Raises `ConfigError` for a datapoint of another format or without a profile.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text  # the profile's reader will report what is wrong
    if not isinstance(values, dict) or DATAPOINT not in values:
        return text
    if values[DATAPOINT] is True or values[DATAPOINT] != DATAPOINT_FORMAT:
        raise ConfigError(
            f"the datapoint's format is {values[DATAPOINT]!r}; expected {DATAPOINT_FORMAT}"
        )
    if values.get("profile") is None:
        raise ConfigError("the datapoint has no profile: nothing was measured there")
    return json.dumps(values["profile"])


def save_profile(profile: HardwareProfile, path: str | Path) -> None:
    """Write a profile atomically; an `OSError` becomes a warning."""
    keep_file(Path(path), profile.to_json())


def keep_file(path: Path, text: str) -> None:
    """Write a file of measurements atomically; an `OSError` becomes a warning."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        warnings.warn(
            f"what was measured is not kept, and the next start measures again: {path.parent}: "
            f"{error.strerror or error}; TANDEM_CACHE names another directory",
            TandemWarning,
            stacklevel=2,
        )


def shape_for(profile: HardwareProfile, model: str, geometry: Geometry) -> ShapeCosts:
    """Return a profile's costs for a model: those with its name, else of the most similar shape."""
    name = model.lower().rsplit("/", 1)[-1]
    for costs in profile.shapes:
        if costs.shape in name or name in costs.shape:
            return costs
    return min(profile.shapes, key=lambda costs: _distance(costs, geometry))


def _distance(costs: ShapeCosts, geometry: Geometry) -> tuple[int, int, int]:
    """Return how far apart shapes are: in number of experts, then top-k, then number of layers."""
    return (
        abs(costs.num_experts - geometry.num_experts),
        abs(costs.top_k - geometry.top_k),
        abs(costs.num_moe_layers - geometry.num_layers),
    )
