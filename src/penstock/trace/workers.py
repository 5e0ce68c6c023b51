"""Dask workers read and convert trace files; DuckDB answers over what they made.

Place in the flow: instead of threads in `table.py`, where files are many and machines several. Workers and
caller share a file system. Invariant: the tables are those that threads would have made, file by file.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import Unavailable, UsageError
from penstock.progress import Progress, Silent
from penstock.trace.table import Form, TableFacts, convert, join

if TYPE_CHECKING:
    from penstock.trace.reading.files import TraceFile
    from penstock.trace.reading.selection import Selection

LOCAL: Final = "local"
"""The scheduler of this machine's own workers."""

_TIMEOUT: Final = "120s"
"""For a scheduler to answer: workers of a busy machine take their time to start."""


@contextmanager
def workers(scheduler: str) -> Iterator[Any]:
    """A Dask client of `scheduler` (`local`, or an address as tcp://host:8786).

    Raises Unavailable where Dask is missing, UsageError where nobody answers.
    """
    try:
        distributed = importlib.import_module("distributed")
    except ImportError as error:
        raise Unavailable(
            "Dask is not installed", where="--dask", fix="pip install 'penstock[dask]'"
        ) from error
    with ExitStack() as resources:
        if scheduler == LOCAL:
            cluster = distributed.LocalCluster(
                dashboard_address="127.0.0.1:0", threads_per_worker=1, host="127.0.0.1"
            )
            resources.enter_context(cluster)
            scheduler = cluster.scheduler_address
        try:
            client = resources.enter_context(distributed.Client(scheduler, timeout=_TIMEOUT))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"No Dask scheduler answers: {error}",
                where=f"--dask {scheduler}",
                fix="Write --dask local, or the address that dask scheduler printed, as tcp://host:8786.",
            ) from error
        yield client


def convert_by_workers(
    client: Any,
    files: Sequence[TraceFile],
    folder: Path,
    *,
    progress: Progress,
    selection: Selection,
    form: Form = Form.PASSING,
) -> tuple[list[Path], list[TableFacts]]:
    """Make a table of each file in `folder`, which workers must see; the tables, and what they say."""
    distributed = importlib.import_module("distributed")
    progress.begin("reading traces", float(len(files)))
    targets = [folder / f"{number:06d}.events" for number in range(len(files))]
    futures = client.map(
        _convert_one, files, targets, [selection] * len(files), [form] * len(files), pure=False
    )
    facts: dict[Any, TableFacts] = {}
    for future, result in distributed.as_completed(futures, with_results=True):
        facts[future.key] = result
        progress.advance(1)
    return targets, [facts[future.key] for future in futures]


def load_by_workers(
    scheduler: str,
    files: Sequence[TraceFile],
    target: Path,
    *,
    progress: Progress,
    selection: Selection,
    strict: bool = False,
) -> TableFacts:
    """Make the table that `convert` would make; workers must see the target's folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=f".{target.name}.{os.getpid()}.", dir=target.parent.absolute()) as folder,
        workers(scheduler) as client,
    ):
        tables, facts = convert_by_workers(
            client, files, Path(folder), progress=progress, selection=selection, form=Form.KEPT
        )
        return join(tables, facts, target, strict=strict)


def _convert_one(file: TraceFile, target: Path, selection: Selection, form: Form) -> TableFacts:
    return convert([file], target, progress=Silent(), selection=selection, form=form, threads=1)
