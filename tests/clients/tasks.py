"""Tasks for the clients: a question, a tool, a form."""

from typing import Any

QUESTION = "What is the weather in Rome?"
# Simple enough that a small model's answer has the form even without a grammar.
INVENT = 'Invent a person. Answer in JSON like {"name": "Anna", "age": 3}'
# More tokens than the server's context has.
TOO_LONG = "word " * 4000
MESSAGES: Any = [{"role": "user", "content": QUESTION}]

PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def check_person(found: Any) -> None:
    """Assert that an object has the fields of a person."""
    assert set(found) == {"name", "age"}, found
    assert isinstance(found["age"], int), found


def check_weather(name: str, arguments: Any) -> None:
    """Assert that a call has the form of the weather tool."""
    assert name == "get_weather"
    assert set(arguments) == {"city"}, arguments
