"""From runs.yaml to a study: traces of all runs opened as one relation, and accounts kept apart by run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.progress import Progress, Silent
from penstock.trace.compare.study import Study
from penstock.trace.opened import find_files, open_traces
from penstock.trace.questions.base import through_lens
from penstock.trace.reading.selection import Selection
from penstock.trace.table import read_facts

if TYPE_CHECKING:
    from penstock.trace.compare.description import Comparison
    from penstock.trace.event import FileAccount

_IN_MEMORY_EVENTS: Final = 500_000
"""So many events are looked at through the lens once; of more, each question looks at what it needs."""


@contextmanager
def open_study(
    asked: Comparison, folder: Path, *, progress: Progress | None = None, dask: str = ""
) -> Iterator[Study]:
    """Open what `asked` names; globs are relative to `folder`; `dask` as in `open_traces`."""
    runs = {run: _patterns(globs, folder) for run, globs in asked.runs.items()}
    selection = Selection(where=asked.where)
    with open_traces(runs, progress=progress or Silent(), selection=selection, dask=dask) as traces:
        relation = traces.relation
        if sum(each.events + each.salvaged for each in traces.accounts) <= _IN_MEMORY_EVENTS:
            traces.connection.execute(f"CREATE TEMP TABLE penstock_study AS SELECT * FROM {relation}")
            relation = "penstock_study"
        events = through_lens(traces.connection, relation, asked.lens())
        yield Study(events=events, accounts=_by_run(runs, traces.accounts), asked=asked)


def _patterns(globs: str | Sequence[str], folder: Path) -> list[str]:
    return [str(folder / each) for each in ([globs] if isinstance(globs, str) else globs)]


def _by_run(
    runs: Mapping[str, Sequence[str]], accounts: Sequence[FileAccount]
) -> dict[str, Sequence[FileAccount]]:
    """Accounts come in the order of runs, as many of each as its files and tables have."""
    parted: dict[str, Sequence[FileAccount]] = {}
    position = 0
    for run, patterns in runs.items():
        number = sum(
            1 if facts is None else len(facts.accounts) for facts in map(read_facts, find_files(patterns))
        )
        parted[run] = accounts[position : position + number]
        position += number
    return parted
