"""`penstock.trace.load`: the events of a run in Python, as a DuckDB relation, Arrow, pandas or Dask.

Invariant: no events are in memory until the caller asks for a form that holds them in memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.optional_libraries import explained_imports
from penstock.progress import Progress
from penstock.trace.dimensions import Dimensions, view_events
from penstock.trace.event_schema import RANK_PATTERN
from penstock.trace.trace_set import RELATION, TraceSet, open_trace_set

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyRelation


class EventRelation:
    """The events of a run, with the columns of the event schema and `tier`, `file_class` and `phase`.

    It has all methods of a DuckDB relation: `events.filter("op = 'write'").aggregate("sum(size_bytes)")`.
    """

    def __init__(self, relation: DuckDBPyRelation, name: str) -> None:
        self.relation = relation
        self.name = name

    def arrow(self) -> pa.Table:
        """Return the events as an Arrow table."""
        return self.relation.to_arrow_table()

    def pandas(self) -> Any:
        """Return the events as a pandas DataFrame."""
        return self.relation.df()

    def dask(self, rows_per_partition: int = 1 << 20) -> Any:
        """Return the events as a Dask DataFrame. Raises `Unavailable` if Dask is not installed."""
        with explained_imports("dask"):
            frames = importlib.import_module("dask.dataframe")
        return frames.from_pandas(self.pandas(), npartitions=max(1, -(-len(self) // rows_per_partition)))

    def __len__(self) -> int:
        return len(self.relation)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.relation, name)


class TraceRun(ExitStack):
    """Traces that stay open until `close`, or until the end of a `with` block.

    `connection` is a DuckDB connection on which the table `events` has the columns of the event schema.
    `accounts` record the fate of every line of every file, and `losses()` returns what was lost or guessed,
    one line each.
    """

    def __init__(self, traces: AbstractContextManager[TraceSet], dimensions: Dimensions) -> None:
        super().__init__()
        opened = self.enter_context(traces)
        self.connection = opened.connection
        self.accounts = opened.accounts
        self.losses = opened.losses
        self._dimensions = dimensions

    @cached_property
    def events(self) -> EventRelation:
        """The events with their dimensions."""
        name = view_events(self.connection, RELATION, self._dimensions).relation
        return EventRelation(self.connection.sql(f"SELECT * FROM {name}"), name)

    def sql(self, query: str) -> DuckDBPyRelation:
        """Run an SQL query over the table `events`."""
        return self.connection.sql(query)


def load(
    files: str | Path | Sequence[str | Path] | Mapping[str, str | Sequence[str]],
    *,
    where: str = "",
    run: str = "",
    dimensions: Dimensions | None = None,
    rank_pattern: str = RANK_PATTERN,
    progress: Progress | None = None,
    dask: str = "",
) -> TraceRun:
    """Open traces: a name, glob, folder or table, several of these, or a mapping of run names to these.

    `where` is an SQL expression over the events' columns, such as `"path LIKE '%checkpoint%' AND op =
    'write'"`; only matching events are kept in memory. `rank_pattern` is a regular expression whose first
    group is the rank in a file's name. `dask` is `local`, or the address of a Dask scheduler, whose workers
    then read the files. Unless `files` is a mapping, the run is called `run`. `dimensions` define the tiers,
    file classes and phases; `progress` advances with every file. Raises `UsageError` for a name that matches
    no file.
    """
    given = files if isinstance(files, Mapping) else {run: files}
    runs = {
        name: [str(paths)] if isinstance(paths, str | Path) else list(map(str, paths))
        for name, paths in given.items()
    }
    traces = open_trace_set(
        runs, progress=progress or Progress(), where=where, rank_pattern=rank_pattern, dask=dask
    )
    return TraceRun(traces, dimensions or Dimensions())
