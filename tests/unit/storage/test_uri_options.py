from dataclasses import dataclass, field
from typing import Literal

import pytest

from penstock.errors import UsageError
from penstock.storage.uri import parse_options


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    part_bytes: int = 8
    num_parts: int = 4
    timeout_s: float = 1.5
    ratio: float = 0.5
    verify: bool = True
    mode: Literal["fast", "safe"] = "safe"
    endpoints: tuple[str, ...] = ()
    region: str | None = None
    limit_bytes: int | None = None
    derived: int = field(default=0, init=False)


def parse(**given: str) -> SampleOptions:
    return parse_options(SampleOptions, given, where="s3://bucket")


def test_what_is_not_given_keeps_its_default() -> None:
    assert parse() == SampleOptions()


def test_values_are_parsed_after_their_names_and_types() -> None:
    parsed = parse(
        part_bytes="16MiB",
        num_parts="12",
        timeout_s="250ms",
        ratio="0.25",
        verify="no",
        mode="fast",
        endpoints="http://a,http://b,",
        region="eu-1",
        limit_bytes="1kB",
    )
    assert parsed == SampleOptions(
        part_bytes=16 * 2**20,
        num_parts=12,
        timeout_s=0.25,
        ratio=0.25,
        verify=False,
        mode="fast",
        endpoints=("http://a", "http://b"),
        region="eu-1",
        limit_bytes=1000,
    )


@pytest.mark.parametrize("word", ["true", "Yes", "ON", "1"])
def test_yes_has_many_words(word: str) -> None:
    assert parse(verify=word).verify is True


def test_an_unknown_option_names_the_place_and_the_nearest_known_one() -> None:
    with pytest.raises(UsageError) as caught:
        parse(part_byte="1")
    message = str(caught.value)
    assert "Unknown option 'part_byte'" in message
    assert "s3://bucket" in message
    assert "Did you mean 'part_bytes'?" in message


def test_an_option_far_from_all_known_ones_lists_them() -> None:
    with pytest.raises(UsageError) as caught:
        parse(zzz="1")
    assert "Did you mean" not in str(caught.value)
    assert "num_parts" in str(caught.value)


def test_a_derived_field_is_not_an_option() -> None:
    with pytest.raises(UsageError, match="Unknown option 'derived'"):
        parse(derived="1")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("part_bytes", "16M", "ambiguous unit"),
        ("num_parts", "4.5", "not a whole number"),
        ("num_parts", "-1", "not a whole number"),
        ("timeout_s", "soon", "not a duration"),
        ("verify", "maybe", "neither true nor false"),
        ("mode", "slow", "not a valid choice"),
    ],
)
def test_a_bad_value_names_its_option_and_the_place(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(**{name: text})
    assert f"Option {name!r}" in str(caught.value)
    assert "s3://bucket" in str(caught.value)
    assert caught.value.fix


def test_a_ratio_that_is_not_a_number_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="ratio"):
        parse(ratio="half")
