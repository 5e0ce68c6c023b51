"""A step, or results, that programs write themselves: `with manager.output("step-100") as out`.

All ranks enter and leave the block together; in between, each writes to the paths that it was given.
Invariant: a set is committed on all ranks or on none, and only where every rank left its block well.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from penstock.checkpoint.own_files import OwnFiles, check_file_name
from penstock.checkpoint.steps import name_of, step_of
from penstock.cluster.collectives import format_cause
from penstock.errors import RankFailed, UsageError
from penstock.progress import Silent
from penstock.storage.uri import check_key

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from penstock.checkpoint.keeping import Slot
    from penstock.cluster.comm import Comm

InTurn = Callable[[Callable[[], Any]], Any]
"""Calls what it is given between the saves of the background, and returns its result."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _View:
    """How one rank left its block."""

    host: str
    names: tuple[str, ...]
    is_valid: bool
    cause: str
    """Of what was raised in the block; empty where nothing was."""


class Output:
    """One rank's view of a set of files that is being written. `route` and `invalid` are not collective."""

    def __init__(
        self,
        name: str,
        comm: Comm,
        *,
        open_slot: Callable[[], Slot],
        in_turn: InTurn,
        timed: AbstractContextManager[None],
    ) -> None:
        self.name = name
        self.uri = ""
        """Where the set lies once it is committed; empty before, and where it was discarded."""
        self._comm = comm
        self._open_slot = open_slot
        self._in_turn = in_turn
        self._timed = timed
        self._slot: Slot | None = None
        self._names: dict[str, Path] = {}
        self._is_valid = True

    @property
    def is_committed(self) -> bool:
        """Whether the set was committed."""
        return bool(self.uri)

    def route(self, file_name: str) -> Path:
        """Where to write this rank's file of that name; the same path, however often it is asked for."""
        if self._slot is None:
            raise UsageError("route() outside of its block", where=self.name, fix="Call it in the `with`.")
        check_file_name(file_name)
        if file_name not in self._names:
            self._names[file_name] = self._slot.path(file_name)
        return self._names[file_name]

    def invalid(self) -> None:
        """Say that this rank's files are not good: the set is discarded on all ranks when the block ends."""
        self._is_valid = False

    def __enter__(self) -> Self:
        self._slot = self._in_turn(self._open_slot)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._slot is not None, "it was entered"
        slot, self._slot = self._slot, None
        with ExitStack() as undo:
            undo.callback(self._in_turn, slot.abandon)
            if kind is not None and not issubclass(kind, Exception):
                # Interrupted: the program ends, and whoever waits for this rank learns it by that.
                return
            view = _View(
                self._comm.host,
                tuple(self._names),
                self._is_valid,
                "" if error is None else format_cause(error),
            )
            views = self._comm.gather(view, awaiting=f"all ranks to finish writing {self.name}")
            if error is not None or not _is_good(views, self.name):
                return
            undo.pop_all()
        files = OwnFiles(tuple(self._names), rank=self._comm.rank, num_ranks=self._comm.size)
        with self._timed:
            self.uri, _ = self._in_turn(lambda: slot.complete(files, files, Silent()))
        logger.info("Committed %s", self.uri)


def set_name(name: str | int, *, checkpoint: bool) -> str:
    """What a set is called; `UsageError` where its name does not fit what it is."""
    if isinstance(name, int):
        name = name_of(name)
    if checkpoint == (step_of(name) is None):
        raise UsageError(
            f"{name!r} {'is no step' if checkpoint else 'is the name of a step'}",
            where="output",
            fix="Call a checkpoint step-NUMBER, or give the number; results are called otherwise, with "
            "checkpoint=False.",
        )
    check_key(name, "output")
    if "/" in name or name.startswith("."):
        raise UsageError(f"{name!r} is no plain name", where="output", fix="Give one like results-7.")
    return name


def _is_good(views: list[_View], name: str) -> bool:
    """Whether all ranks left well; raises on all of them what went wrong on any."""
    for rank, view in enumerate(views):
        if view.cause:
            raise RankFailed(rank, view.host, f"writing {name}: {view.cause}")
    bad = [rank for rank, view in enumerate(views) if not view.is_valid]
    if bad:
        logger.warning("%s is discarded: rank %d called its files invalid", name, bad[0])
        return False
    counts = Counter(file_name for view in views for file_name in view.names)
    shared = [file_name for file_name, count in counts.items() if count > 1]
    if shared:
        ranks = [rank for rank, view in enumerate(views) if shared[0] in view.names]
        raise UsageError(
            f"Ranks {ranks[0]} and {ranks[1]} both wrote {shared[0]}",
            where=name,
            fix="Put the rank into the names of files; all files of a step lie in one folder.",
        )
    return True
