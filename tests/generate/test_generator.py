"""Tests of `Generator` on a tiny model: limits, stop strings, streams, bad input."""

from typing import Any

import pytest
import torch

import tandem
from tandem.core.errors import ConfigError
from tandem.generate.sampling import SamplingOptions
from tests.architecture_sizes import VOCABULARY
from tests.architectures import build_tiny_model
from tests.hf.tiny import byte_tokenizer

CONTEXT = 256


def test_a_prompt_is_text_messages_or_token_ids(generator: tandem.Generator) -> None:
    ids = byte_tokenizer()("hello")["input_ids"]
    text, plain, tensor = (
        generator.generate(prompt, max_new_tokens=5)
        for prompt in ("hello", ids, torch.tensor([ids]))
    )
    assert text[0].token_ids == plain[0].token_ids == tensor[0].token_ids
    chat = generator.generate([{"role": "user", "content": "hello"}], max_new_tokens=5)
    assert chat[0].prompt_tokens > text[0].prompt_tokens


def test_a_conversation_goes_on_without_prefilling_again(model: Any) -> None:
    random = torch.Generator().manual_seed(2)
    first = torch.randint(32, VOCABULARY, (20,), generator=random).tolist()
    talk = tandem.Generator(model)
    (answer,) = talk.generate(first, max_new_tokens=5)
    for reply in ([50, 51], [60]):
        longer = [*first, *answer.token_ids, *reply]
        (again,) = talk.generate(longer, max_new_tokens=5)
        assert again.reused_tokens == len(first) + len(answer.token_ids) - 1
        assert (
            again.token_ids
            == tandem.Generator(model).generate(longer, max_new_tokens=5)[0].token_ids
        )
        first, answer = longer, again


def test_another_prompt_shares_only_its_beginning(model: Any) -> None:
    talk = tandem.Generator(model)
    talk.generate([40, 41, 42, 43], max_new_tokens=5)
    for prompt, reused in (([40, 41, 99], 2), ([40, 41, 99], 2), ([77], 0)):
        (answer,) = talk.generate(prompt, max_new_tokens=5)
        assert answer.reused_tokens == reused
        alone = tandem.Generator(model).generate(prompt, max_new_tokens=5)
        assert answer.token_ids == alone[0].token_ids


def test_prompts_longer_than_a_step_are_cut(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[40 + i % 60 for i in range(n)] for n in (30, 3, 11)]
    whole = tandem.Generator(model).generate(prompts, max_new_tokens=4)
    for module in ("generate.generator", "decode.cpu_slots"):
        monkeypatch.setattr(f"tandem.{module}.MAX_STEP_TOKENS", 8)
    cut = tandem.Generator(model).generate(prompts, max_new_tokens=4)
    assert [a.token_ids for a in cut] == [a.token_ids for a in whole]


def test_an_interrupted_step_leaves_the_conversation_whole(model: Any) -> None:
    prompt = [40, 41, 42, 43]
    expected = tandem.Generator(model).generate(prompt, max_new_tokens=5)[0].token_ids
    talk = tandem.Generator(model)
    talk.generate(prompt, max_new_tokens=2)
    layer = model.model.layers[-1]
    hook = layer.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        with pytest.raises(KeyboardInterrupt):
            talk.generate(prompt, max_new_tokens=5)
    finally:
        hook.remove()
    assert talk.generate(prompt, max_new_tokens=5)[0].token_ids == expected


def test_several_prompts_are_answered_in_their_order(generator: tandem.Generator) -> None:
    prompts = ["a", "hello there", "xyz"]
    together = generator.generate(prompts, max_new_tokens=8)
    alone = [generator.generate(prompt, max_new_tokens=8)[0] for prompt in prompts]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert [a.text for a in together] == [a.text for a in alone]


def test_a_row_that_ends_early_does_not_change_the_others(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[40, 41, 42], [50, 51]]
    free = tandem.Generator(model).generate(prompts, max_new_tokens=8)
    end = free[0].token_ids[2]
    monkeypatch.setattr(model.generation_config, "eos_token_id", end)
    ended = tandem.Generator(model).generate(prompts, max_new_tokens=8)
    assert ended[0].token_ids == free[0].token_ids[:3]
    assert ended[0].finish_reason == "stop"
    expected = free[1].token_ids
    stop = expected.index(end) + 1 if end in expected else len(expected)
    assert ended[1].token_ids == expected[:stop]


def test_stop_strings_end_a_row_and_are_not_shown(generator: tandem.Generator) -> None:
    (free,) = generator.generate("hello", max_new_tokens=30)
    stop = free.text[4:7]
    (stopped,) = generator.generate("hello", max_new_tokens=30, stop=stop)
    assert stopped.text == free.text.partition(stop)[0]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < 30


def test_a_stop_string_that_never_comes_changes_nothing(generator: tandem.Generator) -> None:
    (free,) = generator.generate("hello", max_new_tokens=10)
    (kept,) = generator.generate("hello", max_new_tokens=10, stop=["never \N{SNOWMAN}"])
    assert (kept.text, kept.finish_reason) == (free.text, "length")


def test_streamed_pieces_are_the_text(generator: tandem.Generator) -> None:
    (whole,) = generator.generate("hello", max_new_tokens=12)
    pieces = list(generator.stream("hello", max_new_tokens=12))
    assert len(pieces) > 1
    assert "".join(pieces) == whole.text


def test_on_text_names_the_row(generator: tandem.Generator) -> None:
    texts = ["", ""]

    def collect(row: int, piece: str) -> None:
        texts[row] += piece

    answers = generator.generate(["ab", "xyz"], max_new_tokens=6, on_text=collect)
    assert texts == [answer.text for answer in answers]


def test_sampling_repeats_with_its_seed_and_varies_without(generator: tandem.Generator) -> None:
    def sample(**fields: Any) -> list[int]:
        options = SamplingOptions(max_new_tokens=16, temperature=1.5)
        return generator.generate("hello", options, **fields)[0].token_ids

    assert sample(seed=3) == sample(seed=3) != sample(seed=4)
    assert sample() != sample()


def test_repetition_penalty_of_the_generation_config_is_followed(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.tensor([[40, 41, 42]])
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 1.7)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[0, 3:].tolist()
    (answer,) = tandem.Generator(model).generate(ids, max_new_tokens=12)
    assert answer.token_ids == expected


def test_a_generation_config_that_asks_for_more_is_named(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.generation_config, "no_repeat_ngram_size", 2)
    with pytest.warns(UserWarning, match="no_repeat_ngram_size"):
        tandem.Generator(model)


def test_an_answer_ends_where_the_context_does(generator: tandem.Generator) -> None:
    prompt = [40] * (CONTEXT - 3)
    (answer,) = generator.generate(prompt, max_new_tokens=50)
    assert (len(answer.token_ids), answer.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        ("", "is empty"),
        ([[40], []], "prompt 1 is empty"),
        ([], "there is no prompt"),
        ([40, VOCABULARY], f"token id {VOCABULARY}, but the model knows 0 to {VOCABULARY - 1}"),
        ([-1], "token id -1"),
        ([40] * CONTEXT, f"the model's context is {CONTEXT}"),
    ],
)
def test_bad_prompts_get_one_sentence(
    generator: tandem.Generator, prompts: Any, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        generator.generate(prompts, max_new_tokens=4)


@pytest.mark.parametrize("fields", [{"max_new_tokens": 0}, {"stop": [""]}, {"heat": 1.0}])
def test_bad_options_are_refused_by_name(
    generator: tandem.Generator, fields: dict[str, Any]
) -> None:
    (name,) = fields
    with pytest.raises(ConfigError, match=name):
        generator.generate("hello", **fields)


def test_text_without_a_tokenizer_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        tandem.Generator(model).generate("hello")
    with pytest.raises(ConfigError, match="need a tokenizer"):
        tandem.Generator(model).generate([40], stop="x")


def test_control_c_ends_the_answer_and_keeps_what_is_there(generator: tandem.Generator) -> None:
    pieces: list[str] = []

    def interrupt_at_the_third(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    ids = torch.tensor([[40, 41]])
    options = SamplingOptions(max_new_tokens=20)
    answer = generator.answer(ids, options, interrupt_at_the_third)
    assert answer.is_interrupted
    assert answer.text.startswith("".join(pieces))
    assert 3 <= len(answer.token_ids) < 20


def test_a_new_call_interrupts_one_that_was_left(generator: tandem.Generator) -> None:
    left = generator.start([40, 41, 42], max_new_tokens=20)
    left.advance()
    (answer,) = generator.generate([40, 41, 42], max_new_tokens=4)
    assert left.is_done
    (early,) = left.answers()
    assert early.finish_reason == "interrupted"
    assert early.token_ids == answer.token_ids[:1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_each_prompt_of_a_call_has_the_room_that_its_own_length_leaves(dtype: torch.dtype) -> None:
    """In float16 a model runs padded, where finished sequences are still stepped."""
    model: Any = build_tiny_model("qwen3_moe").to(dtype)
    model.generation_config.eos_token_id = None
    model.config.max_position_embeddings = 24
    generator = tandem.Generator(model)
    prompts = [[40 + i for i in range(20)], [60] * 5]
    answers = generator.generate(prompts, max_new_tokens=100)
    assert [len(answer.token_ids) for answer in answers] == [4, 19]
    assert [answer.finish_reason for answer in answers] == ["length"] * 2
    assert (generator.why_padded is None) == (dtype == torch.float32)
