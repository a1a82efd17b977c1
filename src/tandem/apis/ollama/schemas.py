"""The bodies of Ollama's API, as far as a model that writes text can follow them.

Ollama loads a model when a request needs it, and its clients always send options for loading:
context length, threads, how long the model stays. The model is already loaded here, so these
options are accepted and ignored. Options that would change the answer are followed or refused.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from tandem.apis.reading import Body, Unsupported, sentence
from tandem.apis.schemas import FunctionDefinition, RequestBody

_Json = dict[str, object]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_Name = Annotated[str, Field(max_length=128)]
_Image = Annotated[str, Field(min_length=1)]
# Ollama calls a model without a tag "model:latest".
_LATEST = ":latest"

_UNSUPPORTED_OPTIONS = {
    "mirostat": Unsupported((0,), "use temperature, top_p and min_p"),
    "tfs_z": Unsupported((1,), "use min_p"),
    "typical_p": Unsupported((1,), "use min_p"),
    "repeat_last_n": Unsupported((-1, 64), "penalties count the whole prompt and answer"),
    "penalize_newline": Unsupported((True,), "penalties count every token"),
    "vocab_only": Unsupported((False,), "the model is loaded whole"),
    "embedding_only": Unsupported((False,), "this server's model writes text"),
}
_TEXT_ONLY = "this server's model writes text only"
_UNSUPPORTED = {
    "template": Unsupported(("",), "the model's own chat template is used; send raw: true"),
}

_UNSUPPORTED_BY_GENERATE = {
    **_UNSUPPORTED,
    "suffix": Unsupported(("",), "this server's model continues texts and does not fill gaps"),
    "context": Unsupported(([],), "send the conversation to /api/chat"),
    **dict.fromkeys(("width", "height", "steps"), Unsupported((0,), _TEXT_ONLY)),
}


class OllamaOptions(Body):
    """Sampling options; options about loading are accepted and ignored."""

    unsupported = _UNSUPPORTED_OPTIONS

    num_predict: int | None = Field(None, ge=-2, le=2**31)
    """The most tokens of an answer; below 1: only the context limits it."""
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    repeat_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    # Options of loading.
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    num_keep: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    # Options of mirostat, which is off.
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


class OllamaBody(RequestBody):
    """The field that all of Ollama's bodies share: the model's name, perhaps with a tag."""

    @field_validator("model", mode="after")
    @classmethod
    def _without_latest(cls, model: str | None) -> str | None:
        return None if model is None else model.removesuffix(_LATEST)


class OllamaRequest(OllamaBody):
    """The fields that the bodies of /api/chat and /api/generate share."""

    options: OllamaOptions | None = None
    format: Literal["", "json"] | _Json | None = None
    keep_alive: float | str | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def is_stream(self) -> bool:
        """Whether the answer is streamed; True unless the body says otherwise."""
        return self.stream is not False

    @field_validator("format", mode="before")
    @classmethod
    def _is_known_form(cls, form: object) -> object:
        if isinstance(form, str) and form not in ("", "json"):
            raise sentence('format is neither "json" nor a JSON schema')
        return form


class OllamaFunctionCall(Body):
    """The function that an earlier answer called."""

    name: _Name
    arguments: _Json
    index: int | None = None


class OllamaToolCall(Body):
    """A tool call in an earlier answer."""

    id: _Name | None = None
    type: str | None = None
    function: OllamaFunctionCall


class OllamaMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[_Image] | None = Field(None, max_length=1024)
    tool_calls: list[OllamaToolCall] | None = Field(None, max_length=128)
    tool_name: _Name | None = None
    name: _Name | None = None
    tool_call_id: _Name | None = None


class OllamaTool(Body):
    """A tool that the model may call."""

    type: Literal["function"] | None = None
    function: FunctionDefinition
    items: object = None


class OllamaChatRequest(OllamaRequest):
    """The body of /api/chat."""

    unsupported = _UNSUPPORTED

    messages: list[OllamaMessage] | None = Field(None, max_length=4096)
    tools: list[OllamaTool] | None = Field(None, max_length=128)


class OllamaGenerateRequest(OllamaRequest):
    """The body of /api/generate."""

    unsupported = _UNSUPPORTED_BY_GENERATE

    prompt: str | None = None
    system: str | None = None
    images: list[_Image] | None = Field(None, max_length=1024)
    raw: bool | None = None


class ShowRequest(OllamaBody):
    """The body of /api/show."""

    name: str | None = Field(None, max_length=512)
    """The model, under the field name of older clients."""
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: _Json | None = None

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if self.model is None and self.name is not None:
            self.model = self.name.removesuffix(_LATEST)
        return self
