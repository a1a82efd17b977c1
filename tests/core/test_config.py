import argparse
from dataclasses import dataclass

import pytest

from tandem.core.config import add_flags, from_flags, from_mapping, option, require_range
from tandem.core.errors import ConfigError
from tandem.core.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Options:
    slots: int = option(4, help="number of slots")
    rate: float | None = option(None, help="a rate")
    policy: str = option("lru", help="a policy", choices=("lru", "fifo"))
    json: bool = option(False, help="print JSON", short="-j")
    hidden: int = 3


def parse(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    add_flags(parser, Options)
    return from_flags(Options, parser.parse_args(words))


def test_flags_come_from_the_fields() -> None:
    assert parse() == Options()
    assert parse("--slots", "7", "--rate", "0.5", "--policy", "fifo", "--json") == Options(
        slots=7, rate=0.5, policy="fifo", json=True
    )


def test_a_flag_may_have_a_short_name() -> None:
    assert parse("-j") == parse("--json")


def test_fields_without_help_have_no_flag() -> None:
    with pytest.raises(SystemExit):
        parse("--hidden", "4")


def test_help_names_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    assert "number of slots (default: 4)" in capsys.readouterr().out


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="profile: unknown key 'slotz'; did you mean 'slots'"):
        from_mapping(Options, {"slotz": 1}, where="profile")


@pytest.mark.parametrize("value", [-1, 1.5, float("nan"), True])
def test_range_errors_name_field_value_and_range(value: float) -> None:
    with pytest.raises(ConfigError, match=rf"share is {value}; expected a number in 0\.\.1"):
        require_range("share", value, 0, 1)


def test_a_large_bound_is_written_out() -> None:
    with pytest.raises(ConfigError, match=rf"seed is -1; expected a number in 0\.\.{2**62}"):
        require_range("seed", -1, 0, 2**62)


def test_registry_finds_lists_and_suggests() -> None:
    registry: Registry[str] = Registry("policy")
    registry.register("lru")(lambda: "LRU")
    assert registry.factory("lru")() == "LRU"
    assert registry.names() == list(registry) == ["lru"]
    with pytest.raises(ConfigError, match="unknown policy 'lrv'; did you mean 'lru'"):
        registry.factory("lrv")
    with pytest.raises(ConfigError, match="unknown policy 'belady'; known: lru"):
        registry.factory("belady")


def test_a_former_name_is_taken_as_todays() -> None:
    registry: Registry[int] = Registry("cook")
    registry.register("chef", formerly="cook")(lambda: 1)
    assert registry.names() == ["chef"]
    assert registry.factory("cook")() == registry.extended({}).factory("cook")() == 1
    assert registry.today("cook") == registry.today("chef") == "chef"

    @dataclass(frozen=True)
    class Kitchen:
        cook: str = option("chef", help="who cooks", choices=("chef",), former=registry.former)

    parser = argparse.ArgumentParser()
    add_flags(parser, Kitchen)
    assert from_flags(Kitchen, parser.parse_args(["--cook", "Cook"])).cook == "chef"
