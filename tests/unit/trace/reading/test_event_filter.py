"""Expressions over events are checked before anything is read."""

import pytest

from penstock.errors import UsageError
from penstock.trace.reading.event_filter import EventFilter


def test_an_expression_over_unknown_columns_is_refused() -> None:
    with pytest.raises(UsageError, match="--where nonsense = 1"):
        EventFilter(where="nonsense = 1")


def test_an_expression_names_the_columns_that_it_reads() -> None:
    assert EventFilter(where="path LIKE '%x' AND dur_us > 5").columns() == {"path", "dur_us"}
    assert EventFilter().columns() == frozenset()
