"""Checks that the events of Anthropic's streams come in the API's order."""

import json
from typing import Any


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Assemble a message from events, as a client does."""
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    message: dict[str, Any] = events[0]["message"]
    open_block: dict[str, Any] | None = None
    for event in events[1:-1]:
        if event["type"] == "content_block_start":
            assert open_block is None
            assert event["index"] == len(message["content"])
            open_block = {**event["content_block"], "json": ""}
            message["content"].append(open_block)
        elif event["type"] == "content_block_delta":
            assert open_block is not None
            _grow(open_block, event["delta"])
        elif event["type"] == "content_block_stop":
            assert open_block is not None
            written = open_block.pop("json")
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(written)
            open_block = None
        else:
            assert event["type"] == "message_delta"
            message |= {**event["delta"], "usage": event["usage"]}
    assert open_block is None
    return message


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "input_json_delta":
        block["json"] += delta["partial_json"]
    else:
        name = delta["type"].removesuffix("_delta")
        block[name] += delta[name]
