"""Option values: understood, or refused with the option's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.cli import values
from penstock.errors import UsageError


def test_sizes_counts_and_assignments_are_understood() -> None:
    assert values.size("--size", "2GiB") == 2 << 30
    assert values.sizes("--blocks", "1MiB,8MiB") == (1 << 20, 8 << 20)
    assert values.counts("--streams", "1, 8") == (1, 8)
    assert values.assignments("-o", ["a=1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (values.size, "4G"),
        (values.sizes, "1MiB,,2MiB"),
        (values.counts, "one"),
        (values.counts, "-1"),
        (lambda option, text: values.assignments(option, [text]), "novalue"),
        (lambda option, text: values.assignments(option, [text]), "=x"),
    ],
)
def test_a_bad_value_names_its_option_and_the_way_out(read: Callable[[str, str], object], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read("--what", text)
    assert "--what" in str(caught.value)
    assert caught.value.fix
