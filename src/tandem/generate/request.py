"""One prompt and its options. Loads no torch, because requests are sent through a pipe."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.generate.sampling import SamplingOptions
from tandem.generate.thinking import ThinkingLimit

if TYPE_CHECKING:
    from tandem.decode.images import ImagePrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A generation request: an API creates it, and the engine process's scheduler runs it."""

    request_id: int = 0
    """Identifies the request in token outputs; the submitter assigns it."""
    prompt: tuple[int, ...]
    options: SamplingOptions = field(default_factory=SamplingOptions)
    images: "ImagePrompt | None" = None
    """The prompt with its images, if it has any; `prompt` must then be `images.ids`."""
    grammar: str | None = None
    """The grammar of the answer in the grammar library's format; None allows any text."""
    thinking: ThinkingLimit | None = None
    num_top_logprobs: int | None = None
    """How many likeliest tokens to report with each token's log-probability; None: no
    log-probabilities."""
    has_prompt_logprobs: bool = False
    """Whether to report log-probabilities of prompt tokens; no prefix is then reused."""
    is_prompt_only: bool = False
    """Whether to compute only the prompt, and end the request without a token."""
    keeps_special: bool = False
    """Whether the text contains special tokens, for programs that parse it."""
    may_speculate: bool = True
    """Whether speculative decoding is allowed; it does not change the answer."""
    priority: int = 0
    """Requests with lower numbers run first."""
    owner: bytes = b""
    """The request's owner; prefixes left by requests of other owners are not reused."""

    @property
    def keys(self) -> tuple[int, ...]:
        """The prompt as slots store it; prompts with equal keys at the start share a prefix."""
        return self.prompt if self.images is None else self.images.keys
