"""Statistics of sizes, exact, from how often each size occurs: calls have few different ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.trace.event_cells import EACH_SIZE, add_up

if TYPE_CHECKING:
    from penstock.trace.questions.events_view import EventsView


def count_sizes(events: EventsView, by: Sequence[str], *, where: str) -> tuple[EventsView, str]:
    """A query for how often each size occurs, and the events that it is about.

    It gives `by`, `size`, `num` and `busy_us`; events without a size have one row for all of them.
    """
    keys = ", ".join(by)
    return (
        add_up(events, (*by, where, EACH_SIZE)),
        f"""
        SELECT {keys}, {EACH_SIZE} AS size, sum(num_events)::BIGINT AS num, sum(sum_us) AS busy_us
        FROM {{events}} WHERE {where} GROUP BY {keys}, {EACH_SIZE}""",
    )


def measure_sizes(
    events: EventsView, by: Sequence[str], measures: Sequence[str], *, where: str, order: str
) -> list[tuple[Any, ...]]:
    """Rows of `by` and of measures, of which `MEASURES` and `quantile_sql` have the SQL."""
    keys = ", ".join(by)
    cells, histogram = count_sizes(events, by, where=where)
    return cells.ask(f"""
        WITH placed AS (
            SELECT *, size::HUGEINT * num AS bytes,
                   sum(num) OVER (PARTITION BY {keys} ORDER BY size NULLS LAST) AS until,
                   sum(num) FILTER (WHERE size IS NOT NULL) OVER (PARTITION BY {keys}) AS total,
                   sum(size::HUGEINT * num) OVER (PARTITION BY {keys})::DOUBLE / total AS mean
            FROM ({histogram}))
        SELECT {", ".join([*by, *measures])} FROM placed GROUP BY {keys} ORDER BY {order}""")


NUM_EVENTS = "sum(num)::BIGINT"
SUM_US = "sum(busy_us)::BIGINT"
TOTAL = "sum(bytes)::BIGINT"
MEAN = "any_value(mean)"
DEVIATION = "sqrt(sum(num * (size - mean) ** 2) / nullif(any_value(total) - 1, 0))"
SMALLEST, LARGEST = "min(size)", "max(size)"


def quantile_sql(share: float) -> str:
    """A quantile, interpolated as in pandas."""
    place = f"((any_value(total) - 1) * {share}::DOUBLE)"
    below, above = (
        f"min(size) FILTER (WHERE until > {rounded}((total - 1) * {share}::DOUBLE))"
        for rounded in ("floor", "ceil")
    )
    return f"({below} + ({above} - {below}) * ({place} - floor({place})))"
