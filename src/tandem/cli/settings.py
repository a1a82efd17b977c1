"""`/set` in a chat: shows and changes the options for the next answers."""

import dataclasses
import typing
from typing import Any

from tandem.cli.session import Session
from tandem.core.config import field_type
from tandem.core.errors import ConfigError
from tandem.core.registry import nearest_names
from tandem.generate.sampling import SamplingOptions

DEFAULT = "default"
_SYSTEM = "system"


class ChatSettings:
    """Shows and changes a session's sampling options and system message by name."""

    def __init__(self, session: Session) -> None:
        """Take the session's present values as those that `default` restores."""
        self._session = session
        self._first_sampling = session.sampling
        self._first_system = session.options.system
        hints = typing.get_type_hints(SamplingOptions)
        self._types = {
            field.name: field_type(hints[field.name])
            for field in dataclasses.fields(SamplingOptions)
            if "help" in field.metadata
        }

    def set(self, words: str) -> str:
        """Execute the words after `/set`, and return the text to print.

        Raises `ConfigError` for an unknown name or a wrong value.
        """
        name, _, text = words.strip().partition(" ")
        if not name:
            return "\n".join(self._line(each) for each in [*self._types, _SYSTEM])
        name, text = name.replace("-", "_"), text.strip()
        if name not in (*self._types, _SYSTEM):
            known = [*self._types, _SYSTEM]
            raise ConfigError(f"/set knows no {name!r}; {nearest_names(name, known)}")
        if not text:
            return self._line(name)
        if name == _SYSTEM:
            self._session.set_system(self._first_system if text == DEFAULT else text)
        else:
            value = self._value(name, text)
            self._session.sampling = dataclasses.replace(self._session.sampling, **{name: value})
        return self._line(name)

    def _value(self, name: str, text: str) -> Any:
        if text == DEFAULT:
            return dataclasses.asdict(self._first_sampling)[name]
        kind = self._types[name]
        try:
            return kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{name} is {text!r}; expected {what}, or {DEFAULT}") from None

    def _line(self, name: str) -> str:
        sampling, options = self._session.sampling, self._session.options
        value = options.system if name == _SYSTEM else dataclasses.asdict(sampling)[name]
        unset = "none" if name == _SYSTEM else "the model's own"
        return f"{name} = {unset if value is None else value}"
