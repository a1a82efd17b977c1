"""Tests that one owner's requests do not find what another's left in memory or on disk."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tandem
from tandem.generate.scheduler import Scheduler
from tandem.generate.speculation.drafters import DRAFTERS
from tandem.kv_cache.prefix_files import SEGMENT_TOKENS
from tests.generate.test_kept_prefixes import NUM_SEGMENTS, PROMPT, long_model, scheduler_of
from tests.generate.test_scheduler import finish, request_of

MINE, YOURS = b"mine", b"yours"


def reused(scheduler: Scheduler, owner: bytes) -> int:
    scheduler.add(request_of(1, PROMPT, max_new_tokens=2, temperature=0.0, owner=owner))
    (found,) = finish(scheduler).values()
    return found[0].reused_tokens


def test_prefixes_are_shared_within_an_owner_alone(tmp_path: Path) -> None:
    model: Any = long_model()
    scheduler = scheduler_of(model, tmp_path, slots=2)
    assert reused(scheduler, MINE) == 0
    assert reused(scheduler, YOURS) == 0
    assert reused(scheduler, MINE) > 0
    assert reused(scheduler, YOURS) > 0
    assert reused(scheduler, b"") == 0
    scheduler.prefixes.close(30)
    again = scheduler_of(model, tmp_path, slots=2)
    assert reused(again, b"other") == 0
    assert reused(again, YOURS) == NUM_SEGMENTS * SEGMENT_TOKENS


def test_prompts_at_once_of_two_owners_are_each_computed(tmp_path: Path) -> None:
    scheduler = tandem.Generator(long_model()).scheduler(2)
    for number, owner in enumerate((MINE, YOURS)):
        scheduler.add(request_of(number, PROMPT, max_new_tokens=2, temperature=0.0, owner=owner))
    assert [found[0].reused_tokens for found in finish(scheduler).values()] == [0, 0]


@pytest.mark.parametrize("shares_answers", [True, False])
def test_drafts_come_from_earlier_answers_only_where_those_are_shared(
    shares_answers: bool,
) -> None:
    parts: Any = SimpleNamespace(shares_answers=shares_answers)
    drafting: Any = DRAFTERS.factory("lookup")(parts)
    answer = list(range(100, 140))
    first = drafting.make_drafter()
    first.draft([1, 2, *answer[:1]])
    first.draft([1, 2, *answer])
    first.end()
    second = drafting.make_drafter()
    drafted = second.draft([7, 8, *answer[:10]])
    assert bool(drafted.tokens) == shares_answers
