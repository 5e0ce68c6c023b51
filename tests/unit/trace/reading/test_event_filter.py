"""Prefilters require of a line's bytes only what the expression implies."""

from __future__ import annotations

import pytest

from penstock.errors import UsageError
from penstock.trace.reading.event_filter import NO_PREFILTER, EventFilter, Prefilter


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("name = 'write'", Prefilter((b'"write"',), ())),
        ("'write' = name", Prefilter((b'"write"',), ())),
        ("name IN ('read', 'pread')", Prefilter((b'"read"', b'"pread"'), ())),
        ("cat = 'POSIX' AND name = 'read'", Prefilter((b'"POSIX"',), ())),
        ("path LIKE '%/ckpt/step-1%'", Prefilter((), (b"step-1",))),
        ("contains(path, '/data/') AND op = 'fsync'", Prefilter((b'"fsync"',), (b"data",))),
        ("starts_with(path, '/p/lustre2')", Prefilter((), (b"lustre2",))),
        ("path LIKE '%a%'", NO_PREFILTER),
        ("path = 'é'", NO_PREFILTER),
        ("name = 'wr\"ite'", NO_PREFILTER),
        ("name = 'read' OR dur_us > 5", NO_PREFILTER),
        ("NOT name = 'read'", NO_PREFILTER),
        ("name <> 'read'", NO_PREFILTER),
        ("host LIKE '%node%'", NO_PREFILTER),
        ("ts_us = 5", NO_PREFILTER),
    ],
)
def test_an_expression_asks_for_its_necessary_bytes(where: str, expected: Prefilter) -> None:
    prefilter = EventFilter(where=where).prefilter()
    assert prefilter == expected
    assert prefilter.is_active is (expected != NO_PREFILTER)


def test_a_filter_by_operation_covers_all_its_spellings() -> None:
    patterns = EventFilter(where="op = 'stat'").prefilter().name_patterns
    assert {b'"stat"', b'"statx"', b'"__xstat"'} <= set(patterns)


def test_an_expression_over_unknown_columns_is_refused() -> None:
    with pytest.raises(UsageError, match="--where nonsense = 1"):
        EventFilter(where="nonsense = 1")
