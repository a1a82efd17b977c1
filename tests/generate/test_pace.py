"""Tests of prompts beside streams: chunk lengths by the allowed gap, and the streams' share."""

import pytest

from tandem.generate.pace import Pace

MOST = 256


def play(
    pace: Pace,
    *,
    chunk_seconds_per_token: float,
    decode_seconds: float,
    chunk_seconds: float = 0.05,
    num_chunks: int = 40,
) -> tuple[list[float], float]:
    """Return a stream's gaps beside a long prompt, and its share of the time."""
    gaps, streaming = [], 0.0
    for _ in range(num_chunks):
        num_tokens = pace.chunk_tokens(MOST)
        seconds = chunk_seconds + num_tokens * chunk_seconds_per_token
        pace.prefilled(num_tokens, seconds)
        gap = seconds
        while True:
            pace.decoded(decode_seconds)
            gaps.append(gap + decode_seconds)
            streaming += decode_seconds
            gap = 0.0
            if pace.may_prefill:
                break
    return gaps, streaming / sum(gaps)


@pytest.mark.parametrize("per_token", [0.0005, 0.005, 0.02])
def test_gaps_stay_within_their_bound_and_streams_keep_their_share(per_token: float) -> None:
    pace = Pace(0.5, stream_share=0.6)
    gaps, share = play(pace, chunk_seconds_per_token=per_token, decode_seconds=0.03)
    assert share > 0.59
    settled = gaps[len(gaps) // 2 :]
    assert max(settled) < 0.55
    if per_token < 0.001:
        assert pace.chunk_tokens(MOST) == MOST
    else:
        assert max(settled) > 0.35, "no shorter than it must be"


def test_chunks_of_a_large_model_are_not_short_in_vain() -> None:
    """A chunk reads all experts, which takes longer than the gap: few tokens would save little."""
    pace = Pace(0.5)
    gaps, _ = play(
        pace, chunk_seconds_per_token=0.0075, decode_seconds=0.05, chunk_seconds=0.8, num_chunks=80
    )
    assert pace.chunk_tokens(MOST) > 48
    shortest = 0.8 + 16 * 0.0075
    assert max(gaps[len(gaps) // 2 :]) < 1.75 * shortest + 0.05


def test_chunks_of_a_large_model_are_longer_if_many_prompts_wait() -> None:
    lengths = []
    for part in (0.5, 0.25, 0.125):
        pace = Pace(0.5)
        for _ in range(20):
            num_tokens = pace.chunk_tokens(4 * MOST)
            pace.prefilled(num_tokens, 0.8 + 0.008 * num_tokens, part=part)
        lengths.append(pace.chunk_tokens(4 * MOST))
    assert lengths == pytest.approx([100, 300, 700], rel=0.1)


def test_a_slow_first_chunk_does_not_make_the_next_ones_long() -> None:
    pace = Pace(0.5)
    pace.prefilled(16, 9.0)
    gaps, _ = play(pace, chunk_seconds_per_token=0.005, decode_seconds=0.03)
    assert max(gaps[len(gaps) // 2 :]) < 0.55


def test_one_slow_chunk_does_not_shrink_the_next_to_nothing() -> None:
    pace = Pace(0.5)
    pace.decoded(0.03)
    for _ in range(9):
        pace.prefilled(pace.chunk_tokens(MOST), 0.3)
    before = pace.chunk_tokens(MOST)
    pace.prefilled(before, 30.0)
    assert pace.chunk_tokens(MOST) >= before // 2
    pace.prefilled(3, 0.001)  # the end of a prompt
    assert pace.chunk_tokens(MOST) >= before // 2


def test_a_chunk_has_some_tokens_even_where_decode_steps_fill_the_gap() -> None:
    pace = Pace(0.1)
    for _ in range(50):
        pace.decoded(2.0)
        pace.prefilled(pace.chunk_tokens(MOST), 1.0)
    assert pace.chunk_tokens(MOST) >= 16


def test_a_prompt_gets_its_turn_however_slow_decode_steps_become() -> None:
    pace = Pace(0.5)
    pace.decoded(0.001)
    for number in range(200):
        pace.decoded(0.001 * number)
    assert pace.may_prefill
    pace.prefilled(pace.chunk_tokens(MOST), 0.1)
    num_steps = 0
    while not pace.may_prefill:
        num_steps += 1
        pace.decoded(0.5 * num_steps)
    assert num_steps < 400


def test_many_waiting_prompts_get_as_much_time_as_streams() -> None:
    """A stream beside three prompts gets a quarter of the time, and a token with each chunk."""
    pace = Pace(0.5)
    for _ in range(9):
        pace.decoded(0.02)
    pace.prefilled(100, 0.3, part=0.25)
    num_steps = 0
    while not pace.may_prefill:
        num_steps += 1
        pace.decoded(0.02)
    assert num_steps == 5  # a tenth of a second
    pace.prefilled(100, 0.3, part=0.25, has_decoded=True)
    for _ in range(4):
        assert not pace.may_prefill
        pace.decoded(0.02)
    assert pace.may_prefill
