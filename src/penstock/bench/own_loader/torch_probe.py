"""Watches every torch DataLoader of this process from outside, whoever made it: batches, workers, waits.

The iterators of all DataLoaders, of subclasses too, report while the block runs: when a batch was asked for,
when it arrived and from which worker. Workers begin with a probe. Invariant: the loader yields what it would.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from penstock.bench.own_loader.worker_probe import (
    FETCH_TYPE,
    FetchProbe,
    ProbedWorker,
    fetches_path,
    probe_fetcher,
)
from penstock.errors import UsageError

OWN_PROCESS = -1
"""The number of the worker that is this process: of a loader without workers."""


class Arrival(NamedTuple):
    """A batch that came from a worker: when this process began to receive, and when it had it."""

    worker: int
    seq: int
    asked_ns: int
    arrived_ns: int


class Delivery(NamedTuple):
    """A batch that was asked for and handed out, and whose it was."""

    asked_ns: int
    given_ns: int
    worker: int
    seq: int


@dataclass(slots=True)
class WatchedLoader:
    """One iterator of a DataLoader: its settings, and what it did."""

    folder: Path
    num_workers: int
    prefetch: int
    is_persistent: bool
    began_ns: int
    made_ns: int = 0
    """When all its workers had been begun."""
    arrivals: list[Arrival] = field(default_factory=list)
    deliveries: list[Delivery] = field(default_factory=list)
    num_fetched: dict[int, int] = field(default_factory=dict)
    pending: dict[int, deque[int]] = field(default_factory=dict)
    given: tuple[int, int] = (OWN_PROCESS, 0)

    def arrive(self, worker: int, asked_ns: int, *, is_batch: bool) -> None:
        """A worker's answer has come; it may be that it has no batch left."""
        seq = self.num_fetched.get(worker, 0)
        self.num_fetched[worker] = seq + 1
        if is_batch:
            self.arrivals.append(Arrival(worker, seq, asked_ns, time.monotonic_ns()))
            self.pending.setdefault(worker, deque()).append(seq)

    def begin_again(self) -> None:
        """Workers that stay are ready for another epoch, and idle: what they had not delivered is dropped."""
        self.pending.clear()
        for worker in range(self.num_workers):
            path = fetches_path(self.folder, worker)
            self.num_fetched[worker] = path.stat().st_size // FETCH_TYPE.itemsize if path.exists() else 0

    def give(self, worker: int) -> None:
        """The next batch of this worker is handed out."""
        pending = self.pending.get(worker)
        self.given = (worker, pending.popleft() if pending else -1)


class TorchProbe:
    """Watches while its block runs; `changes` are settings that loaders get before they are iterated."""

    def __init__(self, changes: Mapping[str, Any] | None = None) -> None:
        self._changes = dict(changes or {})
        self._own: FetchProbe | None = None
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
        patch(several, "_try_get_data", _watch_arrivals)
        patch(several, "_process_data", _watch_order)
        patch(several, "_next_data", _watch_deliveries)
        patch(single, "__init__", self._begin_alone)
        patch(single, "_next_data", self._watch_own)
        if self._changes:
            patch(dataloader.DataLoader, "__iter__", self._change)
        return self

    def __exit__(self, *_: object) -> None:
        """Let loaders be what they were. What was recorded stays until `remove`."""
        self._undo.close()
        if self._own is not None:
            self._own.finish()

    def flush(self) -> None:
        """Write what the probe of this process has found so far."""
        if self._own is not None:
            self._own.sampler.write()

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

    def _begin(self, loader: Any) -> WatchedLoader:
        folder = self.folder / str(len(self.loaders))
        folder.mkdir()
        watched = WatchedLoader(
            folder=folder,
            num_workers=loader.num_workers,
            prefetch=loader.prefetch_factor or 0,
            is_persistent=bool(loader.persistent_workers),
            began_ns=time.monotonic_ns(),
        )
        self.loaders.append(watched)
        return watched

    def _begin_workers(self, plain: Callable[..., None]) -> Callable[..., None]:
        def begin(iterator: Any, loader: Any) -> None:
            watched, users = self._begin(loader), loader.worker_init_fn
            loader.worker_init_fn = ProbedWorker(watched.folder, users)
            iterator.penstock = watched
            try:
                plain(iterator, loader)
            finally:
                loader.worker_init_fn = users
            watched.made_ns = time.monotonic_ns()

        return begin

    def _begin_alone(self, plain: Callable[..., None]) -> Callable[..., None]:
        def begin(iterator: Any, loader: Any) -> None:
            watched = self._begin(loader)
            watched.folder = self.folder
            iterator.penstock = watched
            plain(iterator, loader)
            if self._own is None:
                self._own = FetchProbe(self.folder, OWN_PROCESS)
            probe_fetcher(iterator._dataset_fetcher, self._own)  # noqa: SLF001

        return begin

    def _watch_own(self, plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def give(iterator: Any) -> Any:
            asked_ns = time.monotonic_ns()
            batch = plain(iterator)
            seq = self._own.num_fetches - 1 if self._own else 0
            iterator.penstock.deliveries.append(Delivery(asked_ns, time.monotonic_ns(), OWN_PROCESS, seq))
            return batch

        return give


def _watch_arrivals(plain: Callable[..., tuple[bool, Any]]) -> Callable[..., tuple[bool, Any]]:
    def receive(iterator: Any, *args: Any, **named: Any) -> tuple[bool, Any]:
        asked_ns = time.monotonic_ns()
        has_come, answer = plain(iterator, *args, **named)
        if has_come and not isinstance(answer[0], int):
            iterator.penstock.begin_again()
        elif has_come and answer[0] in iterator._task_info:  # noqa: SLF001
            idx, content = answer
            is_batch = type(content).__name__ != "_IterableDatasetStopIteration"
            worker = iterator._task_info[idx][0]  # noqa: SLF001
            iterator.penstock.arrive(worker, asked_ns, is_batch=is_batch)
        return has_come, answer

    return receive


def _watch_order(plain: Callable[..., Any]) -> Callable[..., Any]:
    def take(iterator: Any, content: Any, worker: int, *args: Any) -> Any:
        iterator.penstock.give(worker)
        return plain(iterator, content, worker, *args)

    return take


def _watch_deliveries(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def give(iterator: Any) -> Any:
        asked_ns = time.monotonic_ns()
        batch = plain(iterator)
        watched = iterator.penstock
        watched.deliveries.append(Delivery(asked_ns, time.monotonic_ns(), *watched.given))
        return batch

    return give


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
