"""Named implementations behind one interface; the names are the command line's choices."""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from typing import Generic, TypeVar

from tandem.core.errors import ConfigError

T = TypeVar("T")


def nearest_names(name: str, known: list[str]) -> str:
    """Return "did you mean X?" for a name like a known one, ignoring case; else all known names."""
    by_lower = {each.lower(): each for each in known}
    close = [by_lower[lower] for lower in get_close_matches(name.lower(), by_lower, n=2)]
    if close:
        return f"did you mean {' or '.join(repr(c) for c in close)}?"
    return f"known: {', '.join(known)}"


class Registry(Generic[T]):
    """Factories by name, in the order in which they were registered."""

    def __init__(self, kind: str) -> None:
        """Start without factories; `kind` is the noun for them in error messages."""
        self.kind = kind
        self._factories: MutableMapping[str, Callable[..., T]] = {}
        self.former: MutableMapping[str, str] = {}
        """The present name for each former name that is still accepted."""

    def register(
        self, name: str, *, formerly: str | None = None
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Return a decorator that registers a factory as `name`, found also as `formerly`."""

        def add(factory: Callable[..., T]) -> Callable[..., T]:
            assert name not in self._factories, f"{self.kind} {name!r} is registered twice"
            self._factories[name] = factory
            if formerly is not None:
                self.former[formerly] = name
            return factory

        return add

    def extended(self, more: Mapping[str, Callable[..., T]]) -> "Registry[T]":
        """Return a new registry: `more`, and all names of this one, also those registered later."""
        longer: Registry[T] = Registry(self.kind)
        longer._factories = ChainMap(dict(more), self._factories)
        longer.former = self.former
        return longer

    def today(self, name: str) -> str:
        """Return the present name for a former name; other names are returned unchanged."""
        return self.former.get(name, name)

    def factory(self, name: str) -> Callable[..., T]:
        """Return the factory of a present or former name; `ConfigError` for an unknown name."""
        try:
            return self._factories[self.today(name)]
        except KeyError:
            hint = nearest_names(name, self.names())
            raise ConfigError(f"unknown {self.kind} {name!r}; {hint}") from None

    def names(self) -> list[str]:
        """Return all names in registration order."""
        return list(self._factories)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._factories)
