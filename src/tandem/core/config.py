"""Options as frozen dataclasses: one definition gives the checks, the help text and the flags.

A field made by `option` carries its help text; command-line flags, documentation and defaults are
generated from it, so that a fact is written once.
"""

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names

# The group of rarely used flags, which `--help` leaves out.
RARE = "rarely needed"

T = TypeVar("T")


def option(
    default: object = dataclasses.MISSING,
    *,
    help: str,
    choices: Sequence[str] | None = None,
    former: Mapping[str, str] | None = None,
    metavar: str | None = None,
    short: str | None = None,
) -> Any:
    """Declare a dataclass field with its help text; `choices` also limits the flag's values.

    Choices must be in lower case; a flag's value may be in any case. `former` maps former names of
    choices to the present ones. `short` is another name of the flag, such as "-q".
    """
    assert all(choice == choice.lower() for choice in choices or ())
    metadata = {
        "help": help, "choices": choices, "former": former or {},
        "metavar": metavar, "short": short,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def helps(config: type[Any]) -> dict[str, str]:
    """Return the help text of each option of a config class, by name."""
    with_help = (field for field in dataclasses.fields(config) if "help" in field.metadata)
    return {field.name: field.metadata["help"] for field in with_help}


def field_type(annotation: object) -> type:
    """Return the type to which a flag's text is converted: for `X | None` it is X."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        annotation = next(t for t in typing.get_args(annotation) if t is not type(None))
    assert isinstance(annotation, type), f"{annotation!r} cannot be a flag"
    return annotation


def add_flags(
    parser: argparse.ArgumentParser, config: type[Any], *, known: Sequence[str] = ()
) -> None:
    """Add one flag per option of a config class to a parser; absent flags leave the default.

    Options in `known` are skipped: another class has already added their flags. Options in the
    class's `rare`, if it has that attribute, are shown only by `--help-all`.
    """
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if "help" not in field.metadata or field.name in known:
            continue
        flag = "--" + field.name.replace("_", "-")
        shown = "" if field.default in (None, False) else f" (default: {field.default})"
        kwargs: dict[str, Any] = {"help": field.metadata["help"] + shown, "default": None}
        kind = field_type(hints[field.name])
        if kind is bool:
            is_plain = field.default is False  # otherwise users need a --no-... flag
            kwargs["action"] = "store_true" if is_plain else argparse.BooleanOptionalAction
        else:
            choices = field.metadata["choices"]
            named = partial(_choice, former=field.metadata["former"])
            kwargs.update(type=named if choices else kind, choices=choices)
            kwargs["metavar"] = field.metadata["metavar"]
        short = field.metadata["short"]
        group = _rare_flags(parser) if field.name in getattr(config, "rare", ()) else parser
        group.add_argument(*([short] if short else []), flag, **kwargs)


def _choice(text: str, former: Mapping[str, str]) -> str:
    return former.get(text.lower(), text.lower())


def _rare_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    groups = (group for group in parser._action_groups if group.title == RARE)
    return next(groups, None) or parser.add_argument_group(RARE)


def from_flags(config: type[T], flags: argparse.Namespace) -> T:
    """Build a config from parsed flags; flags that were not given keep their defaults."""
    values = {
        field.name: value
        for field in dataclasses.fields(config)  # type: ignore[arg-type]
        if (value := vars(flags).get(field.name)) is not None
    }
    return config(**values)


def from_mapping(config: type[T], values: Mapping[str, object], *, where: str) -> T:
    """Build a config from a JSON file's mapping; `ConfigError` for an unknown key."""
    known = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {nearest_names(key, known)}")
    return config(**values)


def require_types(config: type[Any], values: Mapping[str, object], *, where: str) -> None:
    """Raise `ConfigError` if a value, read from a file, does not have its field's type."""
    hints = typing.get_type_hints(config)
    for key, value in values.items():
        if key in hints and not _fits(value, hints[key]):
            shown = repr(value)[:100]
            expected = getattr(hints[key], "__name__", hints[key])
            raise ConfigError(f"{where}: {key} is {shown}, expected {expected}")


def _fits(value: object, hint: Any) -> bool:
    """Tell whether a value from a JSON file has the type `hint`, such as `list[str] | None`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def require_range(
    name: str, value: float, low: float, high: float = float("inf"), *, what: str = ""
) -> None:
    """Raise `ConfigError` naming field, value and range unless low <= value <= high."""
    if isinstance(value, bool) or not low <= value <= high:
        bound = f">= {low:g}" if high == float("inf") else f"in {low:g}..{_number(high)}"
        raise ConfigError(f"{name} is {value!r}; expected {what or 'a number'} {bound}")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
