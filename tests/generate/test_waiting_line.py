"""Tests of the waiting line: its order, and requests that leave it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.generate.waiting_line import WaitingLine

_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-2, 2)),
        st.tuples(st.just("pop"), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 300)),
    ),
    max_size=300,
)


@settings(deadline=None)
@given(_ACTIONS)
def test_the_line_is_a_sorted_list(actions: list[tuple[str, int]]) -> None:
    line, expected = WaitingLine[int](), list[tuple[int, int]]()
    for number, (action, value) in enumerate(actions):
        if action == "add":
            line.add(number, value, number)
            expected = sorted([*expected, (value, number)])
        elif action == "drop":
            num_left = sum(entry[1] < value for entry in expected)
            assert line.drop(range(value)) == num_left
            expected = [entry for entry in expected if entry[1] >= value]
        elif expected:
            assert line.pop() == expected.pop(0)[1]
        assert len(line) == len(expected)


def test_those_who_come_and_leave_are_forgotten() -> None:
    line = WaitingLine[str]()
    line.add(0, 0, "stays")
    for number in range(1, 10_000):
        line.add(number, 1, "leaves")
        line.drop([number])
    assert len(line._heap) < 100
    assert line.pop() == "stays"


def test_a_number_may_come_again_with_another_priority() -> None:
    line = WaitingLine[str]()
    for priority in (0, 2):
        line.drop([5])
        line.add(5, priority, f"priority {priority}")
    line.add(6, 1, "another")
    assert [line.pop(), line.pop()] == ["another", "priority 2"]
