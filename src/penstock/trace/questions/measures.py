"""Counts and sums by SQL beside exact unions by one sweep: the rows that most questions are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.trace.sweep import NOTHING, unions

if TYPE_CHECKING:
    from penstock.trace.questions.base import Events


def measured(
    events: Events, by: Sequence[str], *, where: str, extra: Sequence[str] = ()
) -> list[tuple[Any, ...]]:
    """Rows of `by`, num_events, sum_us, union_us, concurrency, and the SQL aggregates `extra`."""
    if "file_class" in by:
        events = events.classified()
    grouping = f"GROUP BY {', '.join(by)}" if by else ""
    selected = ", ".join([*by, "count(*)", "coalesce(sum(dur_us), 0)::BIGINT", *extra])
    counted = events.ask(f"SELECT {selected} FROM {{events}} WHERE {where} {grouping}")
    busy = unions(events, by, first=where)
    width = len(by)
    rows = []
    for row in counted:
        key, (num_events, sum_us, *more) = row[:width], row[width:]
        union_us = busy.get(key, NOTHING).first_us
        rows.append((*key, num_events, sum_us, union_us, sum_us / union_us if union_us else None, *more))
    return rows
