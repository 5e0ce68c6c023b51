"""How large transfers were: how often each size occurs, and exact quantiles."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.trace.questions.base import GROUPINGS, Answer, Column, Events, Unit, check_keys

_MOVES = "size_bytes IS NOT NULL AND phase = 'io'"


def sizes(events: Events, *, by: Sequence[str] = ("op",), top: int = 20) -> tuple[Answer, Answer]:
    """Descriptions by `by`, and the `top` most frequent sizes of each."""
    check_keys(by, GROUPINGS)
    return describe(events, by), value_counts(events, by, top=top)


def describe(events: Events, by: Sequence[str]) -> Answer:
    """Count, mean, sample deviation and exact quantiles, interpolated as pandas does."""
    keys = ", ".join(by)
    rows = events.ask(f"""
        SELECT {keys}, count(*), sum(size_bytes)::BIGINT, avg(size_bytes), stddev_samp(size_bytes),
               min(size_bytes), quantile_cont(size_bytes, 0.25), quantile_cont(size_bytes, 0.5),
               quantile_cont(size_bytes, 0.75), quantile_cont(size_bytes, 0.99), max(size_bytes)
        FROM {{events}} WHERE {_MOVES} GROUP BY {keys} ORDER BY {keys}""")
    names = ("total", "mean", "std", "min", "p25", "median", "p75", "p99", "max")
    columns = [
        *(Column(key) for key in by),
        Column("num_events", Unit.COUNT),
        *(Column(f"{name}_bytes", Unit.BYTES) for name in names),
    ]
    return Answer(name="sizes", title=f"Sizes of transfers by {keys}", columns=columns, rows=rows)


def value_counts(events: Events, by: Sequence[str], *, top: int) -> Answer:
    """How often each size occurs."""
    keys = ", ".join(by)
    rows = events.ask(f"""
        SELECT {keys}, size_bytes, count(*) AS num_events FROM {{events}} WHERE {_MOVES}
        GROUP BY {keys}, size_bytes
        QUALIFY row_number() OVER (PARTITION BY {keys} ORDER BY count(*) DESC, size_bytes) <= {top}
        ORDER BY {keys}, num_events DESC, size_bytes""")
    columns = [
        *(Column(key) for key in by),
        Column("size_bytes", Unit.BYTES),
        Column("num_events", Unit.COUNT),
    ]
    return Answer(name="size_counts", title=f"Most frequent sizes by {keys}", columns=columns, rows=rows)
