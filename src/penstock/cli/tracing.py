"""Tracing of a verb: storage that is opened inside traces into a folder, on this rank and in its workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.environment import TRACE, TRACE_RANK, export_variables, withdraw_variable

if TYPE_CHECKING:
    from penstock.cluster.comm import Comm


@contextmanager
def traced(folder: str | None, comm: Comm) -> Iterator[None]:
    """Trace what happens inside into `folder`, if there is one; the trace is whole when this ends."""
    if not folder:
        yield
        return
    from penstock.trace.capture.recorder import get_recorder

    place = f"{comm.rank}/{comm.size}"
    export_variables({TRACE: str(Path(folder).absolute()), TRACE_RANK: place})
    try:
        yield
    finally:
        get_recorder(str(Path(folder).absolute()), place).close()
        withdraw_variable(TRACE)
        withdraw_variable(TRACE_RANK)
