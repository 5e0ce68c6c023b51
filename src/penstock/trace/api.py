"""`penstock.trace.load`: the events of a run in Python, as a DuckDB relation, Arrow, pandas or Dask.

Invariant: no events are in memory until they are asked for in a form that puts them there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.optional_libraries import explained_imports
from penstock.progress import Progress
from penstock.trace.dimensions import Dimensions
from penstock.trace.event_schema import FileAccount
from penstock.trace.questions.events_view import EventsView, view_events
from penstock.trace.reading.event_batch import RANK_PATTERN
from penstock.trace.trace_set import RELATION, TraceSet, open_trace_set

if TYPE_CHECKING:
    import pyarrow as pa
    from duckdb import DuckDBPyConnection, DuckDBPyRelation


@dataclass(frozen=True, slots=True)
class EventRelation:
    """The events of a run, with `tier`, `file_class` and `phase` beside the columns of the event schema.

    It has all methods of a DuckDB relation: `events.filter("op = 'write'").aggregate("sum(size_bytes)")`.
    """

    relation: DuckDBPyRelation
    name: str

    def arrow(self) -> pa.Table:
        """The events as an Arrow table."""
        return self.relation.to_arrow_table()

    def pandas(self) -> Any:
        """The events as a pandas frame."""
        return self.relation.df()

    def dask(self, rows_per_partition: int = 1 << 20) -> Any:
        """The events as a Dask frame; Unavailable if Dask is not installed."""
        with explained_imports("dask"):
            frames = importlib.import_module("dask.dataframe")
        return frames.from_pandas(self.pandas(), npartitions=max(1, -(-len(self) // rows_per_partition)))

    def __len__(self) -> int:
        """The number of events."""
        return len(self.relation)

    def __getattr__(self, name: str) -> Any:
        """Methods of the relation."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.relation, name)


class TraceRun:
    """Traces that stay open until `close`, or the end of a `with` block."""

    def __init__(self, opened: TraceSet, dimensions: Dimensions, resources: ExitStack) -> None:
        self._opened = opened
        self._dimensions = dimensions
        self._resources = resources

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and remove the table that raw files were read into."""
        self._resources.close()

    @cached_property
    def events(self) -> EventRelation:
        """The events with their dimensions."""
        relation = self.connection.sql(f"SELECT * FROM {self.view.relation}")
        return EventRelation(relation=relation, name=self.view.relation)

    @cached_property
    def view(self) -> EventsView:
        """The events as the functions of `penstock.trace.questions` take them."""
        return view_events(self.connection, RELATION, self._dimensions)

    @property
    def connection(self) -> DuckDBPyConnection:
        """The DuckDB connection on which `events` has the columns of the event schema."""
        return self._opened.connection

    @property
    def accounts(self) -> Sequence[FileAccount]:
        """What became of every line of every file."""
        return self._opened.accounts

    def losses(self) -> list[str]:
        """What was lost or guessed, one line each; empty if nothing was."""
        return self._opened.losses()

    def sql(self, query: str) -> DuckDBPyRelation:
        """Run an SQL query over a table `events`."""
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
    """Open traces: a name, glob, folder or table, several of them, or a mapping of runs to them.

    `where` is an SQL expression over the events' columns, as `"path LIKE '%checkpoint%' AND op = 'write'"`;
    only those events are kept in memory. `rank_pattern` is a regular expression whose first group is the rank
    in a file's name. `dask` is `local` or a scheduler's address: its workers read the files. The run of
    `files` without a mapping is called `run`; `dimensions` are the tiers, classes and phases of questions;
    `progress` advances with every file. Raises UsageError for a name that matches no
    file.
    """
    runs = files if isinstance(files, Mapping) else {run: files}
    resources = ExitStack()
    opened = resources.enter_context(
        open_trace_set(
            {name: _patterns(paths) for name, paths in runs.items()},
            progress=progress or Progress(),
            where=where,
            rank_pattern=rank_pattern,
            dask=dask,
        )
    )
    return TraceRun(opened, dimensions or Dimensions(), resources)


def _patterns(files: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(files)] if isinstance(files, str | Path) else [str(path) for path in files]
