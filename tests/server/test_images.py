"""Tests of images in the requests of all APIs: answers of Transformers, or refusals."""

import base64
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import tandem
from tandem.apis.answering import GenerationRequests
from tandem.apis.errors import ApiError
from tandem.apis.images import ImageReader
from tandem.core.errors import ConfigError
from tandem.generate.images import load_processor
from tests.generate.test_images import huge_png
from tests.images import (
    BEGIN,
    END,
    IMAGE,
    IMAGE_TOKEN,
    image_tokenizer,
    picture,
    save_image_checkpoint,
    transformers_tokens,
)
from tests.server.running import Reply, RunningServer, running_server
from tests.server.test_trimming import INFO, chat_request

pytest.importorskip("PIL", reason="Pillow is in the extra `images`")

QUESTION = "what is it?"
TOKENS = 6


def as_data(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


URLS = [as_data(picture(0)), as_data(picture(1, (40, 90), "JPEG"), "image/jpeg")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_image_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["max_position_embeddings"] = 4096
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    (directory / "a picture.png").write_bytes(picture(0))
    (directory / "link.png").symlink_to(Path(__file__))
    return directory


@pytest.fixture(scope="module")
def seeing(
    checkpoint: Path, files: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    cache = tmp_path_factory.mktemp("cache")
    with running_server(checkpoint, "--image-files", str(files), cache=cache) as running:
        yield running


def ask_chat(server: RunningServer, *urls: str, question: str = QUESTION) -> Reply:
    parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
    content = [*parts, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    return server.chat(messages=messages, max_tokens=TOKENS, temperature=0)


def ask_anthropic(server: RunningServer, *urls: str) -> Reply:
    parts = [{"type": "image", "source": _source(url)} for url in urls]
    content = [*parts, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    return server.post("/v1/messages", messages=messages, max_tokens=TOKENS, temperature=0)


def _source(url: str) -> dict[str, str]:
    if not url.startswith("data:") or ";base64," not in url:
        return {"type": "url", "url": url}
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "base64", "media_type": kind, "data": data}


def ask_responses(server: RunningServer, *urls: str) -> Reply:
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    content = [*parts, {"type": "input_text", "text": QUESTION}]
    items = [{"role": "user", "content": content}]
    return server.post("/v1/responses", input=items, max_output_tokens=TOKENS, temperature=0)


def ask_ollama(server: RunningServer, *urls: str) -> Reply:
    images = [_source(url)["data"] for url in urls]
    messages = [{"role": "user", "content": QUESTION, "images": images}]
    options = {"num_predict": TOKENS, "temperature": 0}
    return server.post("/api/chat", messages=messages, options=options, stream=False)


ASK_FUNCTIONS = [ask_chat, ask_anthropic, ask_responses]


def answered(reply: Reply) -> tuple[str, int]:
    """Return any API's answer text, and the number of prompt tokens."""
    answer = reply.ok
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
    if "output" in answer:
        return answer["output"][-1]["content"][0]["text"], answer["usage"]["input_tokens"]
    if "message" in answer:
        return answer["message"]["content"], answer["prompt_eval_count"]
    usage = answer["usage"]
    return answer["content"][0]["text"], usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_all_apis_answer_as_transformers_does(seeing: RunningServer, checkpoint: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    reader = ImageReader(
        processor=load_processor(str(checkpoint), tokenizer, IMAGE_TOKEN), token_id=IMAGE_TOKEN
    )
    shown = f"{BEGIN}{IMAGE}{END}"
    for urls in (URLS[:1], URLS):
        prompt = reader.write(f"user: {shown * len(urls)}{QUESTION}assistant:", urls)
        tokens = transformers_tokens(tandem.load(checkpoint), prompt, TOKENS)
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        for ask in (*ASK_FUNCTIONS, ask_ollama):
            assert answered(ask(seeing, *urls)) == (expected, len(prompt.ids)), ask.__name__


def test_equal_images_are_remembered_and_others_are_not(seeing: RunningServer) -> None:
    def cached(*urls: str) -> int:
        usage = ask_chat(seeing, *urls, question=QUESTION * 30).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    first, other = as_data(picture(5, (200, 200))), as_data(picture(6, (200, 200)))
    assert cached(first) == cached(other) == 0
    assert cached(first) > 0


def test_files_below_the_allowed_directory_are_read(seeing: RunningServer, files: Path) -> None:
    expected = answered(ask_chat(seeing, URLS[0]))
    for address in (f"file://{files}/a%20picture.png", f"file://localhost{files}/a picture.png"):
        assert answered(ask_chat(seeing, address)) == expected
    for bad in (
        f"file://{files}/link.png", f"file://{files}/../x.png", f"file://{files}",
        "file:///etc/passwd", f"file://elsewhere{files}/a picture.png", "file:///\0", "file://[",
        f"file://{files}/{'x' * 5000}",
    ):  # fmt: skip
        reply = ask_chat(seeing, bad)
        assert reply.status == 400, bad
        assert "not a file below the directory" in reply.error["message"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.org/a.png", "image 2 is an address, and this server downloads nothing"),
        ("HTTP://127.0.0.1/a.png", "image 2 is an address"),
        ("a.png", "image 2 is not a data URL; send it as a data URL"),
        ("", "image 2 is not a data URL"),
        ("data:image/png;base64,%%%", "image 2 is not an image"),
        ("data:image/png;base64,abcde", "image 2 is not base64"),
        ("data:image/png,abc", "image 2 is not base64"),
        (as_data(b"%PDF-1.7"), "image 2 is not an image; expected PNG, JPEG"),
        (as_data(huge_png(100_000, 100_000)), "image 2 has far more pixels"),
        (as_data(huge_png(8192, 4097)), "has 8192 x 4097 pixels and at most 33554432 are read"),
        (as_data(picture(0)[:200]), "image 2 is damaged"),
        (as_data(picture(0, (2000, 2))), "the model's processor cannot read this prompt"),
    ],
    ids=lambda one: one[:24],
)
def test_bad_images_are_each_apis_own_error(seeing: RunningServer, url: str, words: str) -> None:
    for ask in ASK_FUNCTIONS:
        reply = ask(seeing, URLS[0], url)
        assert reply.status == 400, (ask.__name__, reply.body)
        error = reply.json["error"]
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]
        assert "\n" not in error["message"]
    assert "iVBOR" not in seeing.log


def test_odd_image_parts_are_errors(seeing: RunningServer) -> None:
    def chat(*parts: object) -> Reply:
        return seeing.chat(messages=[{"role": "user", "content": parts}], max_tokens=2)

    image_url: Any
    for image_url in (None, {}, {"url": 5}, [], 7):
        assert chat({"type": "image_url", "image_url": image_url}).status == 400
    source: Any
    for source in ({}, {"type": "base64"}, {"type": "file", "file_id": "x"}):
        turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        assert seeing.post("/v1/messages", max_tokens=2, messages=turns).status == 400
    items = [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]
    refused = seeing.post("/v1/responses", input=items)
    assert "no files are kept here" in refused.error["message"]
    # what stands for an image in a prompt, typed by a user
    reply = chat({"type": "text", "text": IMAGE}, {"type": "image_url", "image_url": URLS[0]})
    assert "2 placeholders for 1 images" in reply.error["message"]


def test_images_stand_in_results_of_tools_and_are_counted(seeing: RunningServer) -> None:
    image = {"type": "image", "source": _source(URLS[0])}
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [image]}]},
    ]  # fmt: skip
    body: dict[str, Any] = {"messages": turns, "tools": tools}
    counted = seeing.post("/v1/messages/count_tokens", **body).ok["input_tokens"]
    reply = seeing.post("/v1/messages", **body, max_tokens=2, temperature=0)
    assert answered(reply)[1] == counted


def test_a_conversation_with_an_image_goes_on(seeing: RunningServer) -> None:
    first = ask_responses(seeing, URLS[0])
    body = {"previous_response_id": first.json["id"], "max_output_tokens": 3}
    second = seeing.post("/v1/responses", input="and now?", **body)
    assert answered(second)[1] > answered(first)[1]


def test_what_takes_images_says_so(seeing: RunningServer, server: RunningServer) -> None:
    taken = [
        one.ask("GET", "/v1/models").json["data"][0]["capabilities"]["image_input"]["supported"]
        for one in (seeing, server)
    ]
    assert taken == [True, False]


@pytest.mark.parametrize("ask", ASK_FUNCTIONS)
def test_a_model_of_text_refuses_images(server: RunningServer, ask: Any) -> None:
    reply = ask(server, URLS[0])
    assert reply.status == 400
    assert "reads text only; send no images" in reply.json["error"]["message"]


def test_a_model_without_a_processor_says_why() -> None:
    reader = ImageReader(processor=None, token_id=IMAGE_TOKEN, why_none="it has no processor")
    with pytest.raises(ApiError, match="it has no processor"):
        reader.write("text", URLS)


def test_turns_with_images_are_dropped_and_a_model_may_say_no(checkpoint: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    processor = load_processor(str(checkpoint), tokenizer, IMAGE_TOKEN)
    reader = ImageReader(processor=processor, token_id=IMAGE_TOKEN)
    requests = GenerationRequests(tokenizer, context=None, trims=True, images=reader)
    shown: Any = [{"type": "image_url", "image_url": URLS[0]}, {"type": "text", "text": "x" * 100}]
    turns = [
        {"role": role, "content": shown if role == "user" else "yes"}
        for _ in range(5)
        for role in ("user", "assistant")
    ]
    body = chat_request([*turns, {"role": "user", "content": shown}], max_tokens=10)
    (request,) = requests.chat(body, INFO)
    images = request.request.images
    assert images is not None
    assert 0 < request.num_dropped_turns < 5
    assert request.request.prompt == images.ids
    assert len(images.inputs["image_grid_thw"]) == 6 - request.num_dropped_turns
    assert requests.capabilities(INFO)["image_input"] == {"supported": True}
    info = dataclasses.replace(INFO, why_no_images="Gemma takes no images here: it may not")
    assert requests.capabilities(info)["image_input"] == {"supported": False}
    with pytest.raises(ApiError, match="Gemma takes no images here"):
        requests.chat(body, info)


def test_there_are_bounds_for_all_images_of_a_request(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = load_processor(str(checkpoint), image_tokenizer(), IMAGE_TOKEN)
    reader = ImageReader(processor=processor, token_id=IMAGE_TOKEN)
    with pytest.raises(ApiError, match="129 images; at most 128"):
        reader.write("text", URLS[:1] * 129)
    monkeypatch.setattr("tandem.apis.images._MOST_PIXELS", 6000)
    with pytest.raises(ApiError, match="more than 6000 pixels in total"):
        reader.write("text", URLS)


def test_the_allowed_directory_must_be_there(tmp_path: Path) -> None:
    from tandem.apis.images import allowed_directory

    assert allowed_directory(None) is None
    assert allowed_directory(str(tmp_path)) == tmp_path.resolve()
    with pytest.raises(ConfigError, match="is not a directory"):
        allowed_directory(str(tmp_path / "none"))
