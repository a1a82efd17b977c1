"""One prompt and its options. Loads no torch, because it travels through a pipe."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.generate.sampling import SamplingOptions
from tandem.generate.thinking import ThinkingLimit

if TYPE_CHECKING:
    from tandem.decode.images import ImagePrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A generation request: APIs fill it, the engine process takes it and the scheduler runs it."""

    request_id: int = 0
    """By which token outputs name it; given by who submits it."""
    prompt: tuple[int, ...]
    options: SamplingOptions = field(default_factory=SamplingOptions)
    images: "ImagePrompt | None" = None
    """The images of the prompt, which is then `images.ids`."""
    grammar: str | None = None
    """What the answer follows, as the grammar library writes it; None: any text."""
    thinking: ThinkingLimit | None = None
    num_top_logprobs: int | None = None
    """None: no log-probabilities; else how many alternatives beside each token's own."""
    has_prompt_logprobs: bool = False
    """Whether the prompt's tokens have log-probabilities too; then none of it is reused."""
    is_prompt_only: bool = False
    """Whether it ends before its first token: the prompt alone is computed."""
    keeps_special: bool = False
    """Whether special tokens show in the text, for a program that parses it."""
    may_speculate: bool = True
    """Whether tokens may be drafted and verified together; the answer is the same."""
    priority: int = 0
    """Requests of a lower number go first."""
    owner: bytes = b""
    """Whose it is: nothing is reused of what another owner's requests have left."""

    @property
    def keys(self) -> tuple[int, ...]:
        """The prompt as slots store it; prompts with equal keys at the start share a prefix."""
        return self.prompt if self.images is None else self.images.keys
