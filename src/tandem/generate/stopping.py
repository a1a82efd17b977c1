"""Stop strings in streamed text: no part of a stop string is ever emitted."""

from collections.abc import Sequence


class StopStrings:
    """Emits text until a stop string begins; holds back text that may be a stop string's start."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Take the stop strings; if there are none, all text is emitted at once."""
        self._strings = tuple(strings)
        self._held = ""
        self.met: str | None = None
        """The stop string that ended the text; None: none has been found yet."""

    @property
    def is_met(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.met is not None

    def add(self, piece: str) -> str:
        """Add the next piece of text; return the text to emit, which is empty after a stop."""
        if self.is_met or not self._strings:
            return "" if self.is_met else piece
        text = self._held + piece
        found = [(at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if found:
            at, self.met = min(found)
            self._held = ""
            return text[:at]
        held = max(_overlap(text, string) for string in self._strings)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text held back; call this after the last piece of text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of a string."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
