"""A tokenizer that obeys the text: it hangs, computes for ever, or ends its process."""

import os
import time
from typing import Any

HANGS, COMPUTES, ENDS = "hang", "compute", "end"


class StubbornTokenizer:
    """Maps each character to a token."""

    chat_template = None
    all_special_tokens: tuple[str, ...] = ()

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        while text.startswith(HANGS):
            time.sleep(1)
        while text.startswith(COMPUTES):
            pass
        if text.startswith(ENDS):
            os._exit(1)
        return {"input_ids": [ord(character) for character in text]}

    def get_vocab(self) -> dict[str, int]:
        return {chr(number): number for number in range(128)}
