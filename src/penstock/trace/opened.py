"""Traces that can be asked: raw files, tables or both as one relation of DuckDB, and what was lost of them.

Place in the flow: between whoever asks (command line, `load`, questions) and tables. Raw files become a table
in a folder of their own, which goes when the traces are closed. Invariant: a table that is older than its
sources is made again before it is asked.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import duckdb

from penstock.errors import UsageError
from penstock.trace.capture.segments import COUNT_SUFFIX
from penstock.trace.event import COLUMNS, FileAccount
from penstock.trace.reading.files import RANK_PATTERN, TraceFile
from penstock.trace.reading.selection import EVERYTHING, Selection
from penstock.trace.table import Form, TableFacts, convert, read_facts
from penstock.trace.workers import convert_by_workers, workers

if TYPE_CHECKING:
    from penstock.progress import Progress

logger = logging.getLogger(__name__)

RELATION: Final = "events"
"""What questions and people's SQL call the events."""

_TRACES: Final = ("*.pfw", "*.pfw.gz", "*.strace", "*.strace.[0-9]*")
"""What a folder is searched for: tracers' files, and strace's of whole programs and of single processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTraces:
    """A connection on which `relation` holds the events of `accounts`."""

    connection: duckdb.DuckDBPyConnection
    accounts: Sequence[FileAccount]
    relation: str = RELATION

    def losses(self) -> list[str]:
        """What was lost or guessed, for people, a line each; empty if nothing was."""
        return [line for account in self.accounts for line in account.losses()]


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that names, globs and folders stand for, each once, in the order of names."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            matches = sorted(each for kind in _TRACES for each in path.rglob(kind))
        else:
            matches = [path] if path.exists() else _globbed(pattern)
        if not matches:
            raise UsageError(
                "No trace there" if path.is_dir() else "No such file",
                where=pattern,
                fix="Name trace files, a folder of them, a glob in quotes, or a table of events.",
            )
        found.update(dict.fromkeys(each for each in matches if not each.is_dir()))
    return list(found)


def _globbed(pattern: str) -> list[Path]:
    """What a glob stands for, less the counts that lie beside unfinished traces."""
    found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute globs, too
    return [Path(each) for each in found if not each.endswith(COUNT_SUFFIX)]


def trace_files(paths: Sequence[Path], *, run: str, rank_pattern: str = RANK_PATTERN) -> list[TraceFile]:
    """Files to read, each under the shortest name that tells it from the others."""
    names = [path.name for path in paths]
    unique = len(set(names)) == len(names)
    return [
        TraceFile(path=path, name=path.name if unique else str(path), run=run, rank_pattern=rank_pattern)
        for path in paths
    ]


@contextmanager
def open_traces(
    runs: Mapping[str, Sequence[str]],
    *,
    progress: Progress,
    selection: Selection = EVERYTHING,
    rank_pattern: str = RANK_PATTERN,
    dask: str = "",
) -> Iterator[OpenTraces]:
    """Open the files of named runs (names, globs, folders, tables) as one relation `events`.

    With `dask` (`local`, or a scheduler's address) its workers read raw files. They must see the same
    folders, that of temporary files included.
    """
    with TemporaryDirectory(prefix="penstock-trace-") as folder, duckdb.connect() as connection:
        connection.execute("SET temp_directory = ?", [folder])
        tables: list[tuple[str, Path]] = []
        accounts: list[FileAccount] = []
        for number, (run, patterns) in enumerate(runs.items()):
            raw: list[Path] = []
            for path in find_files(patterns):
                facts = read_facts(path)
                if facts is None:
                    raw.append(path)
                    continue
                tables.append((run, path))
                accounts.extend(_fresh(path, facts, progress).accounts)
            if raw:
                files = trace_files(raw, run=run, rank_pattern=rank_pattern)
                made = Path(folder) / str(number)
                made.mkdir()
                for target, facts in _convert(files, made, progress, selection, dask):
                    tables.append((run, target))
                    accounts.extend(facts.accounts)
        connection.execute(f"CREATE TEMP VIEW {RELATION} AS {_union(tables, selection)}")
        yield OpenTraces(connection=connection, accounts=accounts)


def _convert(
    files: Sequence[TraceFile], folder: Path, progress: Progress, selection: Selection, dask: str
) -> list[tuple[Path, TableFacts]]:
    """Tables of raw files in `folder`, and what they say of themselves."""
    if not dask:
        target = folder / "run.events"
        return [(target, convert(files, target, progress=progress, selection=selection, form=Form.PASSING))]
    with workers(dask) as client:
        targets, facts = convert_by_workers(client, files, folder, progress=progress, selection=selection)
    return list(zip(targets, facts, strict=True))


def _fresh(path: Path, facts: TableFacts, progress: Progress) -> TableFacts:
    """The facts of a table that is as new as its sources."""
    if not facts.is_stale():
        return facts
    if not facts.can_be_made_again():
        raise UsageError(
            "This table is older than its trace files, and some of those are gone",
            where=str(path),
            fix="Load the files that there are into a new table: penstock trace load.",
        )
    logger.info("%s is older than its trace files: it is made again", path)
    files = [source.file for source in facts.sources]
    return convert(files, path, progress=progress, selection=Selection(where=facts.where))


def _union(tables: Sequence[tuple[str, Path]], selection: Selection) -> str:
    where = f" WHERE {selection.where}" if selection.where else ""
    parts = [f"SELECT {_columns(run)} FROM read_parquet({_quoted(str(path))})" for run, path in tables]
    return f"SELECT * FROM ({' UNION ALL '.join(parts)}){where}"


def _columns(run: str) -> str:
    """All columns, with the name that a run was opened by; a table's own names stay where none was given."""
    renamed = f"{_quoted(run)} AS run" if run else "run"
    return ", ".join(renamed if each.name == "run" else f'"{each.name}"' for each in COLUMNS)


def _quoted(text: str) -> str:
    escaped = text.replace("'", "''")
    return f"'{escaped}'"
