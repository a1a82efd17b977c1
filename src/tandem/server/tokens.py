"""/tokenize and /detokenize, with vLLM's and llama.cpp's fields."""

from typing import Annotated

from pydantic import Field

from tandem.apis.answering import GenerationRequests
from tandem.apis.errors import ApiError
from tandem.apis.schemas import ChatRequest, Message, RequestBody, Tool
from tandem.engine.messages import ModelInfo
from tandem.foreign_types import Tokenizer

_Json = dict[str, object]


class TokenizeRequest(RequestBody):
    """The body of /tokenize: a text, or a conversation."""

    prompt: str | None = None
    content: str | None = None
    """The text, under llama.cpp's name."""
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096)
    tools: list[Tool] | None = Field(None, max_length=1024)
    chat_template_kwargs: _Json | None = Field(None, max_length=16)
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(RequestBody):
    """The body of /detokenize."""

    tokens: Annotated[list[int], Field(max_length=1_000_000)]


def detokenized(requests: GenerationRequests, body: DetokenizeRequest, info: ModelInfo) -> _Json:
    """Return the response of /detokenize."""
    text = requests.text_of(body.tokens, info)
    return {"prompt": text, "content": text}


def tokenized(
    requests: GenerationRequests, tokenizer: Tokenizer, body: TokenizeRequest, info: ModelInfo
) -> _Json:
    """Return the response of /tokenize."""
    ids = _ids(requests, body, info)
    answer: _Json = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": requests.limit(info),
    }
    if body.return_token_strs or body.with_pieces:
        pieces = tokenizer.convert_ids_to_tokens(ids)
        answer["token_strs"] = pieces
        if body.with_pieces:
            together = zip(ids, pieces, strict=True)
            answer["tokens"] = [{"id": one, "piece": piece} for one, piece in together]
    return answer


def _ids(requests: GenerationRequests, body: TokenizeRequest, info: ModelInfo) -> list[int]:
    text = body.prompt if body.prompt is not None else body.content
    if (text is None) == (body.messages is None):
        raise ApiError(400, "give either prompt (a text) or messages", param="prompt")
    if text is not None:
        # By default vLLM adds special tokens and llama.cpp does not.
        is_added = body.add_special if body.content is not None else body.add_special_tokens
        has_special = body.content is None if is_added is None else is_added
        return requests.text_ids(text, info, has_special=has_special)
    chat = ChatRequest.model_construct(
        messages=body.messages,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
    )
    return requests.chat_ids(chat, info)
