"""Studies of a few handmade events, for tests of tables, findings and checks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import duckdb
from tests.support.trace_events import events_table

from penstock.trace.compare.trace_study import ComparisonSpec, Study
from penstock.trace.dimensions import view_events
from penstock.trace.event_schema import FileAccount


@contextmanager
def small_study(
    rows: Sequence[Mapping[str, Any]],
    *,
    runs: Sequence[str] = ("base", "new"),
    accounts: Mapping[str, Sequence[FileAccount]] | None = None,
    **fields: Any,
) -> Iterator[Study]:
    """A study of `rows`, each with its `run`; tiers are /fast and /slow unless others are given."""
    tiers = fields.pop("tiers", {"fast": "/fast", "slow": "/slow"})
    globs = {run: f"{run}/*" for run in runs}
    spec = ComparisonSpec.model_validate({"runs": globs, "tiers": tiers, **fields})
    with duckdb.connect() as connection:
        connection.register("events", events_table(rows))
        events = view_events(connection, "events", spec.dimensions())
        yield Study(events=events, accounts=accounts or {}, spec=spec)
