"""One answer for the command line: streamed, timed, and ended by Ctrl-C without ending more."""

from collections.abc import Callable

from tandem.foreign_types import PreTrainedModel, Tokenizer
from tandem.generate.answer import Answer
from tandem.generate.generator import Generator, Prompt
from tandem.generate.sampling import SamplingOptions

__all__ = ["Answer", "generate_answer"]


def generate_answer(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompt: Prompt,
    options: SamplingOptions,
    on_text: Callable[[str], None],
    *,
    generator: Generator | None = None,
) -> Answer:
    """Answer a prompt; `on_text` receives the text as it comes.

    A `generator` that is kept for a conversation does not prefill again what it has seen. Ctrl-C
    (KeyboardInterrupt) ends the answer, not the program: what is there is returned.
    """
    generator = generator or Generator(model, tokenizer)
    batch = generator.start([prompt], options, on_text=lambda _, piece: on_text(piece))
    try:
        while not batch.is_done:
            batch.advance()
    except KeyboardInterrupt:
        batch.interrupt()
    return batch.answers()[0]
