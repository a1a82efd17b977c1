"""Converts tokens to text as they come; it never returns half a character or revises its text."""

from tandem.foreign_types import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes. If more tokens than this are incomplete, their text is broken.
_MAX_HELD_TOKENS = 8


class TextStream:
    """Converts token ids, one by one, to pieces of text that together are the whole text."""

    def __init__(self, tokenizer: Tokenizer, *, keeps_special: bool = False) -> None:
        """Take a Transformers tokenizer; the text has special tokens only if `keeps_special`."""
        self._tokenizer = tokenizer
        self._skips_special = not keeps_special
        self._ids: list[int] = []
        self._done = 0  # tokens whose text has been returned
        self._context = 0  # first of the tokens that are decoded again, for the spaces between them

    def add(self, token_id: int) -> str:
        """Add the next token; return the text that is now certain (often one word, maybe none)."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._context : self._done])
        text = self._decode(self._ids[self._context :])
        is_held = text.endswith(_INCOMPLETE) and len(self._ids) - self._done < _MAX_HELD_TOKENS
        if is_held or len(text) <= len(before):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        """Return the text that is still held back; call this after the last token."""
        before = self._decode(self._ids[self._context : self._done])
        text = self._decode(self._ids[self._context :])
        self._context = self._done = len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        # No clean-up: it would change text that has already been returned.
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
        )
        return text
