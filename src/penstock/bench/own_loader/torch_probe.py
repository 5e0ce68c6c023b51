"""Watches every torch DataLoader of this process from outside, whoever made it: batches, workers, waits.

The iterators of all DataLoaders, of subclasses too, report while the block runs: when a batch was asked for
and given, and by which worker. Workers begin with a probe. Invariant: the loader yields what it would.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from penstock.bench.own_loader.own_reads import OwnReads
from penstock.bench.own_loader.worker_probe import (
    FetchProbe,
    ProbedWorker,
    fetches_path,
    probe_fetcher,
    read_fetches,
)
from penstock.errors import UsageError

OWN_PROCESS = -1
"""The number of the worker that is this process: of a loader without workers."""


class Delivery(NamedTuple):
    """A batch that was asked for and given, and whose it was: fetch `seq` of this worker."""

    asked_ns: int
    given_ns: int
    worker: int
    seq: int


@dataclass(slots=True)
class WatchedLoader:
    """One iterator of a DataLoader with workers, or all those without: settings, and what it did."""

    folder: Path
    num_workers: int
    prefetch: int
    is_persistent: bool
    reads: OwnReads
    began_ns: int
    made_ns: int = 0
    """When all its workers had been begun."""
    moments: array[int] = field(default_factory=lambda: array("q"))
    """For each batch since the last look: when it was asked for, when it was given, and by which worker."""
    worker: int = OWN_PROCESS
    """Whose batch is being given."""
    _found: list[Delivery] = field(default_factory=list)
    _num_passed: dict[int, int] = field(default_factory=dict)

    def read_fetches(self, worker: int) -> NDArray[np.void]:
        """What a worker has fetched so far."""
        return read_fetches(self.reads.read(fetches_path(self.folder, worker)))

    def take_deliveries(self) -> list[Delivery]:
        """The batches since the last call."""
        self._resolve()
        found, self._found = self._found, []
        return found

    def begin_again(self) -> None:
        """Workers that stay are ready for another epoch, and idle: what they had not delivered is dropped."""
        self._resolve()
        for worker in range(self.num_workers):
            self._num_passed[worker] = len(self.read_fetches(worker))

    def _resolve(self) -> None:
        """Find whose fetches the batches were: each worker gives what it fetches, in its order."""
        moments, self.moments = np.array(self.moments, np.int64).reshape(-1, 3), array("q")
        if self.num_workers == 0:
            rows = self.read_fetches(OWN_PROCESS)[self._num_passed.get(OWN_PROCESS, 0) :]
            self._num_passed[OWN_PROCESS] = self._num_passed.get(OWN_PROCESS, 0) + len(rows)
            rows = rows[rows["is_batch"] > 0]
            self._found += [
                Delivery(began_ns, ended_ns, OWN_PROCESS, seq)
                for began_ns, ended_ns, seq in rows[["began_ns", "ended_ns", "seq"]].tolist()
            ]
        pending: dict[int, Iterator[int]] = {}
        for asked_ns, given_ns, worker in moments.tolist():
            if worker not in pending:
                rows = self.read_fetches(worker)[self._num_passed.get(worker, 0) :]
                pending[worker] = iter(rows["seq"][rows["is_batch"] > 0].tolist())
            seq = next(pending[worker], -1)
            self._found.append(Delivery(asked_ns, given_ns, worker, seq))
            self._num_passed[worker] = max(self._num_passed.get(worker, 0), seq + 1)


class TorchProbe:
    """Watches while its block runs what this thread iterates.

    `changes` are settings that loaders get before they are iterated.
    """

    def __init__(self, changes: Mapping[str, Any] | None = None, *, reads: OwnReads) -> None:
        self._changes = dict(changes or {})
        self._reads = reads
        self._consumer = threading.get_ident()
        self._own: FetchProbe | None = None
        self._alone: WatchedLoader | None = None
        self._undo = ExitStack()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-loader-"))
        self.loaders: list[WatchedLoader] = []

    def __enter__(self) -> Self:
        # The user's own torch: it is never imported for this.
        dataloader: Any = sys.modules["torch.utils.data.dataloader"]
        several: Any = dataloader._MultiProcessingDataLoaderIter  # noqa: SLF001 - what all loaders iterate by
        single: Any = dataloader._SingleProcessDataLoaderIter  # noqa: SLF001
        patch = self._patch
        patch(several, "__init__", self._begin_workers)
        patch(several, "_reset", _watch_resets)
        patch(several, "_process_data", _watch_order)
        patch(several, "_next_data", self._watch_deliveries)
        patch(single, "__init__", self._begin_alone)
        if self._changes:
            patch(dataloader.DataLoader, "__iter__", self._change)
        return self

    def __exit__(self, *_: object) -> None:
        """Let loaders be what they were. What was recorded stays until `remove`."""
        self._undo.close()
        if self._own is not None:
            self._own.finish()

    def label(self) -> str:
        """What the consumer does at this moment where its stack can't tell; "" where it can."""
        return self._own.label() if self._own else ""

    def remove(self) -> None:
        """Delete the records."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _patch(self, kind: Any, name: str, make: Callable[[Any], Any]) -> None:
        plain = kind.__dict__[name]
        setattr(kind, name, make(plain))
        self._undo.callback(setattr, kind, name, plain)

    def _change(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def iterate(loader: Any) -> Any:
            for name, value in self._changes.items():
                # Past DataLoader's own refusal to change once it is made: nothing has been iterated yet.
                loader.__dict__[name] = value
            if loader.num_workers and loader.prefetch_factor is None:
                loader.prefetch_factor = 2
            return plain(loader)

        return iterate

    def _begin(self, loader: Any, folder: Path) -> WatchedLoader:
        watched = WatchedLoader(
            folder=folder,
            num_workers=loader.num_workers,
            prefetch=loader.prefetch_factor or 0,
            is_persistent=bool(loader.persistent_workers),
            reads=self._reads,
            began_ns=time.monotonic_ns(),
        )
        self.loaders.append(watched)
        return watched

    def _begin_workers(self, plain: Callable[..., None]) -> Callable[..., None]:
        def begin(iterator: Any, loader: Any) -> None:
            folder = self.folder / str(len(self.loaders))
            folder.mkdir()
            watched, users = self._begin(loader, folder), loader.worker_init_fn
            loader.worker_init_fn = ProbedWorker(watched.folder, users)
            try:
                plain(iterator, loader)
            finally:
                loader.worker_init_fn = users
            watched.made_ns = time.monotonic_ns()
            iterator.penstock = watched

        return begin

    def _begin_alone(self, plain: Callable[..., None]) -> Callable[..., None]:
        def begin(iterator: Any, loader: Any) -> None:
            began_ns = time.monotonic_ns()
            plain(iterator, loader)
            if threading.get_ident() != self._consumer:
                return
            if self._own is None or self._alone is None:
                self._alone = self._begin(loader, self.folder)
                self._own = FetchProbe(self.folder, OWN_PROCESS, reads=self._reads, samples=False)
            self._alone.began_ns = began_ns
            probe_fetcher(iterator._dataset_fetcher, self._own)  # noqa: SLF001

        return begin

    def _watch_deliveries(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        consumer, now_ns, get_ident = self._consumer, time.monotonic_ns, threading.get_ident

        def give(iterator: Any) -> Any:
            asked_ns = now_ns()
            batch = plain(iterator)
            # What another thread awaits, the consumer may not be waiting for.
            if get_ident() == consumer and (watched := getattr(iterator, "penstock", None)) is not None:
                watched.moments.extend((asked_ns, now_ns(), watched.worker))
            return batch

        return give


def _watch_order(plain: Callable[..., Any]) -> Callable[..., Any]:
    def take(iterator: Any, content: Any, worker: int, *args: Any) -> Any:
        # Workers that stay may have been begun before anything was watched.
        if (watched := getattr(iterator, "penstock", None)) is not None:
            watched.worker = worker
        return plain(iterator, content, worker, *args)

    return take


def _watch_resets(plain: Callable[..., None]) -> Callable[..., None]:
    def reset(iterator: Any, *args: Any, **named: Any) -> None:
        plain(iterator, *args, **named)
        # The first one is part of making it.
        if (watched := getattr(iterator, "penstock", None)) is not None:
            watched.begin_again()

    return reset


TRIALS: Mapping[str, str] = {
    "workers": "num_workers",
    "prefetch": "prefetch_factor",
    "persistent": "persistent_workers",
}
"""What can be tried with a DataLoader that is not touched, and the setting that it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A change that a second run tries: as it is called, and the settings that loaders get."""

    change: str
    settings: Mapping[str, Any]


def parse_trial(change: str) -> Trial:
    """The settings of `workers=8`, `prefetch=4` or `persistent=1`; several are separated by commas."""
    settings: dict[str, Any] = {}
    for assignment in change.split(","):
        name, _, text = assignment.strip().partition("=")
        if name not in TRIALS or not text.isdecimal():
            raise UsageError(
                f"{assignment!r} cannot be tried", where="--try", fix=f"Try {'=N, '.join(TRIALS)}=N."
            )
        settings[TRIALS[name]] = bool(int(text)) if name == "persistent" else int(text)
    return Trial(change=change, settings=settings)
