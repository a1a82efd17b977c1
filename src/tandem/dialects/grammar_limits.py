"""How complex a grammar may be: what following it costs at each token stays within bounds.

An object of 190 optional properties needs between 3,000 and 5,000 items in a step, in masks of
1 ms; 7,000 items of a grammar made to be slow (`s: s s | s s s | "a" | "b"`) take 40 ms, 10,000
of them 110. So items are limited by what objects need, and the time of an answer's masks besides:
`python -m benchmarks.server.grammar_masks`.
"""

import llguidance

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    step_max_items=7_000,
    step_lexer_fuel=200_000,
    verbose_errors=False,  # else an error repeats the grammar and the answer
)
# Masks that take longer are slow, and what an answer's slow ones may take beyond that in all.
SLOW_MASK_SECONDS, MOST_SLOW_SECONDS = 0.05, 0.2


def new_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Return what follows a grammar from its beginning; it may be in error, and never raises."""
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def complaint(message: str, what: str = "grammar") -> str:
    """Return the sentence for what llguidance says of a grammar that it cannot follow."""
    return f"the {what} cannot be followed: {message.strip().partition(chr(10))[0]}"
