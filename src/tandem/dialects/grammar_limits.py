"""How complex a grammar may be: what following it costs at each token stays within bounds.

Measured over a vocabulary of 150,000 tokens with grammars made to be slow: one mask takes up to
30 ms. One that goes over a limit may take 150 ms, once: its answer ends there with an error. With
llguidance's own limits `s: s s | s s s | "a" | "b"` takes 330 ms at each token. Objects of 300
optional properties need 1,199 items in a row, and more than 2,500 in a step.
"""

import llguidance

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1_200,
    step_max_items=5_000,
    step_lexer_fuel=200_000,
    verbose_errors=False,  # else an error repeats the grammar and the answer
)


def new_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Return what follows a grammar from its beginning; it may be in error, and never raises."""
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def complaint(message: str, what: str = "grammar") -> str:
    """Return the sentence for what llguidance says of a grammar that it cannot follow."""
    return f"the {what} cannot be followed: {message.strip().partition(chr(10))[0]}"
