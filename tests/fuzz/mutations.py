"""Mutates files as a careless or hostile writer would: JSON values, GGUF fields, bytes."""

import json
import random
import struct
from typing import Any

# Numbers that are too large, too small, or of another kind.
_NUMBERS = (
    -1, 0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 1000, 65_535, 1_000_003, 1 << 31,
    (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 53) + 1, 1 << 60, (1 << 63) - 1, 1 << 63, 1 << 64,
    -(1 << 63), 1 << 200, 0.5, -0.5, 1e308, float("inf"), float("nan"),
)  # fmt: skip
_TEXTS = (
    "", " ", "\0", "a", "é", "\ud800", "../..", "/etc/passwd", "a/b", "x" * 1000, "{}", "auto",
    "evil/kernel", "F32", "I64", "float8_e4m3fn", "full_attention", "sliding_attention", "cuda",
)  # fmt: skip
_ABSURD_WORDS = (0, 1, 2, 3, 5, 7, 8, 9, 12, 64, 255, 1000, 0xFFFF, 1_000_003, 1 << 31, -1)
_KEYS = (
    "attn_implementation", "quantization_config", "text_config", "auto_map", "dtype", "rope_theta",
    "rope_parameters", "layer_types", "num_hidden_layers", "tie_word_embeddings", "architectures",
    "per_layer_config", "shape", "data_offsets", "__metadata__", "weight_map", "metadata", "id",
    "content", "normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding",
    "extra_special_tokens", "model_max_length", "tokenizer_class", "chat_template", "type",
    "sliding_window", "head_dim", "use_cache", "problem_type", "id2label", "is_encoder_decoder",
    "expert_dtype", "dense_dtype", "expert_formats", "dense_formats", "packed_format", "device",
    "quant_method", "bits", "group_size", "desc_act", "threads", "cache_dir", "sha256",
    "attention_chunk_size", "chunk_size_feed_forward", "generation_config", "pad_token_id",
)  # fmt: skip
_CHANGES = (1, 1, 1, 2, 3)


def mutate_json(data: bytes, chance: random.Random) -> bytes:
    """Change values of a JSON text; change bytes if it is not JSON."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, chance)
    if chance.random() < 0.1:
        return mutate_bytes(data, chance)
    for _ in range(chance.choice(_CHANGES)):
        content = _changed(content, chance)
    text = json.dumps(content)
    return text.encode(errors="surrogatepass")


def mutate_headed_json(data: bytes, chance: random.Random) -> bytes:
    """Change the header of a safetensors file: its length, then its JSON."""
    header = mutate_json(data[8:], chance)
    length = chance.choice(_ABSURD_WORDS) if chance.random() < 0.05 else len(header)
    return struct.pack("<Q", length & (1 << 64) - 1) + header


def mutate_words(data: bytes, chance: random.Random, keys: list[bytes]) -> bytes:
    """Change the header of a GGUF file: values of known keys, lengths, bytes."""
    if chance.random() < 0.3:
        return mutate_bytes(data, chance)
    damaged = bytearray(data)
    for _ in range(chance.choice(_CHANGES)):
        key = chance.choice(keys)
        at = data.find(key)
        if at < 0 or at + len(key) + 12 > len(data):
            continue
        place = at + len(key) + (0 if chance.random() < 0.2 else 4)  # its type, or its value
        word = struct.pack("<q", chance.choice(_ABSURD_WORDS))[: chance.choice((4, 8))]
        damaged[place : place + len(word)] = word
    return bytes(damaged)


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flip bytes, remove or repeat parts, insert extreme numbers."""
    damaged = bytearray(data or b"\0")
    at = chance.randrange(len(damaged))
    match chance.randrange(4):
        case 0:
            for _ in range(chance.randint(1, 8)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        case 1:
            del damaged[at:]
        case 2:
            width = chance.choice(("<i", "<q"))
            word = struct.pack(width, chance.choice(_ABSURD_WORDS[:-2]))
            damaged[at : at + len(word)] = word
        case 3:
            piece = damaged[at : at + chance.randint(1, 64)]
            damaged[at : at + len(piece)] = piece * chance.choice((0, 2, 3))
    return bytes(damaged)


def _changed(content: Any, chance: random.Random) -> Any:
    """Return a JSON value with one value inside it changed."""
    if not isinstance(content, dict | list) or not content:
        return _any_value(content, chance)
    place = chance.choice(list(content) if isinstance(content, dict) else range(len(content)))
    inner = content[place]
    if isinstance(inner, dict | list) and inner and chance.random() < 0.8:
        content[place] = _changed(inner, chance)
        return content
    match chance.randrange(8):
        case 0:
            del content[place]
        case 1 if isinstance(content, dict):
            content[chance.choice((*_KEYS, *map(str, content)))] = _any_value(inner, chance)
        case 2 if isinstance(content, list):
            content += [inner] * chance.choice((1, 2, 300))
        case 3 if isinstance(content, dict):
            content[chance.choice(list(content))] = inner
        case _:
            content[place] = _any_value(inner, chance)
    return content


def _any_value(value: Any, chance: random.Random) -> Any:
    """Return another value, often of the same type and close."""
    match chance.randrange(8):
        case 0:
            return chance.choice((None, True, False, [], {}, [0], {"a": 1}, [[]]))
        case 1:
            return chance.choice(_TEXTS)
        case 2:
            deep: Any = 0
            for _ in range(chance.choice((5, 40, 200))):
                deep = [deep] if chance.random() < 0.5 else {"a": deep}
            return deep
        case 3 | 4 if isinstance(value, str) and value:
            at = chance.randrange(len(value))
            return value[:at] + chance.choice(_TEXTS) + value[at + 1 :]
        case 5 | 6 if isinstance(value, int):
            return value + chance.choice((-1, 1, value, -value, 2 * value, 64 - value))
        case 7 if value is not None:
            return [value]
    return chance.choice(_NUMBERS)
