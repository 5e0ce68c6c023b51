"""Measures the waits of one rank: all probes together, and what they found, stage by stage.

The timed loop only sets two moments of `clock`; everything else happens in other threads and processes, or
once an epoch is over. Invariant: the stages of an epoch add up to what its steps waited.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from penstock.bench.own_loader.prediction import MOST_BATCHES, BatchWork, LoaderModel
from penstock.bench.own_loader.process_watch import MemoryPeaks, ProcessWatch, WaitingClock
from penstock.bench.own_loader.torch_probe import Delivery, TorchProbe, WatchedLoader
from penstock.bench.own_loader.wait_stages import (
    ExplainedWait,
    LoadSplit,
    OtherWork,
    Rows,
    StepWait,
    WaitStage,
    WorkerFetches,
    divide_waits,
    sleep_ns,
)
from penstock.bench.own_loader.worker_probe import FETCH_TYPE, WorkSampler, fetches_path

_LATE_SHARE: Final = 0.5
"""Where the sampler gets the interpreter late this often, threads that compute hold it all the time."""


@dataclass(slots=True)
class RankWaits:
    """What one rank's epochs found, or those of all ranks together. Times are nanoseconds.

    `queued_ns` is how long workers could run and had no core; `model` is made of the last epoch, None where
    no DataLoader was seen.
    """

    wait_ns: int = 0
    compute_ns: int = 0
    elapsed_ns: int = 0
    batches: int = 0
    samples: int = 0
    num_workers: int = 0
    stages: Counter[WaitStage] = field(default_factory=Counter)
    queued_ns: int = 0
    opens: int | None = None
    io: dict[str, int] = field(default_factory=dict)
    memory: MemoryPeaks = field(default_factory=MemoryPeaks)
    spots: Counter[str] = field(default_factory=Counter)
    model: LoaderModel | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Epoch:
    """The records of one loader in one epoch, worker by worker."""

    loader: WatchedLoader
    deliveries: Sequence[Delivery]
    workers: Mapping[int, WorkerFetches]


class LoaderMeter:
    """Measures while its block runs; one thread iterates the loader and calls the methods."""

    def __init__(self, changes: Mapping[str, Any] | None = None, *, cores: float) -> None:
        self.clock = WaitingClock()
        self.found = RankWaits()
        self._changes = changes
        self._cores = cores
        self._watch = ProcessWatch(self.clock)
        self._sampler = WorkSampler(lambda: self.clock.since_ns != 0, own=threading.get_ident())
        self._torch: TorchProbe | None = None
        self._counted: dict[Path, int] = {}
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        # What iterates by torch's DataLoader has imported it by now: the factory has been called.
        if "torch.utils.data" in sys.modules:
            self._torch = TorchProbe(self._changes)
            self._resources.callback(self._torch.remove)
            self._resources.enter_context(self._torch)
        self._watch.start()
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.stop()
        self._watch.stop()
        self._resources.close()

    def read_bytes(self) -> int:
        """What the loader has read so far, by the kernel's figures."""
        self._watch.look_at_io()
        for loader in self._torch.loaders if self._torch else ():
            for path in loader.folder.glob("*.json"):
                self._hear(_read_json(path))
        return self._watch.totals().get("rchar", 0)

    def _hear(self, left: Mapping[str, Any]) -> None:
        """Take what a process says of its own reads, which leaves out its start."""
        if "pid" in left:
            self._watch.keep_io(left["pid"], left["io"])

    def end_epoch(self, steps: Sequence[StepWait], *, consumed_ns: int, samples: int) -> None:
        """Divide the waits of an epoch whose iterator is gone, so that its workers have written all."""
        epochs = [
            epoch for epoch in map(self._read_epoch, self._torch.loaders if self._torch else []) if epoch
        ]
        explained = sorted(
            (wait for epoch in epochs for wait in _explain(epoch)), key=lambda wait: wait.given_ns
        )
        found = self.found
        stages = divide_waits(steps, explained, self._other_work(any(wait.fetches for wait in explained)))
        found.stages.update(stages)
        found.wait_ns += sum(step.loaded_ns - step.start_ns for step in steps)
        found.compute_ns += consumed_ns
        found.batches += len(steps)
        found.samples += samples
        found.elapsed_ns += steps[-1].loaded_ns - steps[0].start_ns if steps else 0
        found.num_workers = max(
            [found.num_workers, self._watch.num_workers, *(one.loader.num_workers for one in epochs)]
        )
        self._watch.look_at_io()
        found.io, found.memory = self._watch.totals(), self._watch.memory
        if epochs:
            main = max(epochs, key=lambda epoch: len(epoch.deliveries))
            found.model = _make_model(main, steps, cores=self._cores) or found.model
            found.settings = {
                "workers": main.loader.num_workers,
                "prefetch": main.loader.prefetch,
                "persistent": main.loader.is_persistent,
            }
        found.spots = found.spots or self._sampler.spots

    def _other_work(self, has_loader: bool) -> OtherWork:  # noqa: FBT001 - the sentence reads well
        sampler, busy = self._sampler, self._watch.busy_share
        contended = sampler.num_samples and sampler.late_samples / sampler.num_samples > _LATE_SHARE
        others_ns: int = sum(sampler.others_cpu_ns.values())
        if busy is not None and contended:
            # Python threads that compute take turns: none is busy all the time, but together they are.
            busy = max(busy, others_ns / max(1, self.clock.total_ns()))
        return OtherWork(
            own_cpu_ns=sampler.cpu_ns,
            busy_share=None if has_loader or busy is None else min(busy, 1.0),
            split=LoadSplit.of_samples(sampler.others_cpu_ns),
        )

    def _read_epoch(self, loader: WatchedLoader) -> _Epoch | None:
        """What a loader did since it was last read; None if that is nothing."""
        deliveries, loader.deliveries = loader.deliveries, []
        if not deliveries:
            return None
        if self._torch is not None:
            self._torch.flush()
        workers = {}
        for number in {delivery.worker for delivery in deliveries}:
            path = fetches_path(loader.folder, number)
            left = _read_json(path.with_suffix(".json"))
            self.found.spots.update(left.get("spots", {}))
            self._hear(left)
            workers[number] = WorkerFetches(
                began_ns=loader.began_ns,
                rows=self._read_fetches(path),
                split=LoadSplit.of_samples(left.get("cpu_ns", {})),
            )
        return _Epoch(loader=loader, deliveries=deliveries, workers=workers)

    def _read_fetches(self, path: Path) -> Rows:
        """All fetches of a worker; those that are new since the last call are added up."""
        rows = np.fromfile(path, FETCH_TYPE) if path.exists() else np.zeros(0, FETCH_TYPE)
        before, found = self._counted.get(path, 0), self.found
        new = rows[before:]
        if len(new):
            found.queued_ns += int(new["load_queued_ns"].sum() + new["collate_queued_ns"].sum())
            opens = int(new["opens"][-1]) - (int(rows[before - 1]["opens"]) if before else 0)
            found.opens = (found.opens or 0) + opens
        self._counted[path] = len(rows)
        return rows


def _explain(epoch: _Epoch) -> list[ExplainedWait]:
    return [
        ExplainedWait(
            asked_ns=delivery.asked_ns,
            given_ns=delivery.given_ns,
            fetches=epoch.workers.get(delivery.worker),
            seq=delivery.seq,
        )
        for delivery in epoch.deliveries
    ]


def _make_model(epoch: _Epoch, steps: Sequence[StepWait], *, cores: float) -> LoaderModel | None:
    """The queues of this loader with the times of this epoch's own batches."""
    deliveries = epoch.deliveries
    sent_s = {
        (arrival.worker, arrival.seq): (arrival.asked_ns, arrival.arrived_ns)
        for arrival in epoch.loader.arrivals[-len(deliveries) :]
    }
    epoch.loader.arrivals.clear()
    batches, queued_s = [], 0.0
    for delivery in deliveries[:MOST_BATCHES]:
        rows = epoch.workers[delivery.worker].rows
        place = int(np.searchsorted(rows["seq"], delivery.seq))
        if place >= len(rows) or rows[place]["seq"] != delivery.seq:
            continue
        row = rows[place]
        ended_ns = int(row["ended_ns"])
        asked_ns, arrived_ns = sent_s.get((delivery.worker, delivery.seq), (ended_ns, ended_ns))
        collate_ns = int(row["ended_ns"] - row["loaded_ns"])
        collate_busy_ns = int(row["collate_cpu_ns"]) + int(row["collate_queued_ns"])
        queued_s += int(row["load_queued_ns"] + row["collate_queued_ns"]) / 1e9
        batches.append(
            BatchWork(
                sleep_s=sleep_ns(row) / 1e9,
                cpu_s=int(row["load_cpu_ns"] + row["other_cpu_ns"]) / 1e9,
                collate_sleep_s=max(0, collate_ns - collate_busy_ns) / 1e9,
                collate_cpu_s=int(row["collate_cpu_ns"]) / 1e9,
                send_s=max(0, arrived_ns - max(asked_ns, ended_ns)) / 1e9,
            )
        )
    between = [(later.asked_ns - one.given_ns) / 1e9 for one, later in pairwise(deliveries)]
    if not batches or not between:
        return None
    spawn_s, latency_s = _measure_start(epoch) if epoch.loader.began_ns >= steps[0].start_ns else (0.0, 0.0)
    model = LoaderModel(
        batches=batches,
        steps_s=between,
        num_workers=epoch.loader.num_workers,
        prefetch=epoch.loader.prefetch,
        num_cores=cores,
        steps_per_epoch=len(deliveries),
        spawn_s=spawn_s,
        latency_s=latency_s,
    )
    return model.with_queueing(queued_s)


def _measure_start(epoch: _Epoch) -> tuple[float, float]:
    """How long it takes to begin a worker, and until it fetches for the first time, in seconds."""
    loader = epoch.loader
    spawn_ns = (loader.made_ns - loader.began_ns) / loader.num_workers if loader.num_workers else 0.0
    starts = [int(worker.rows[0]["began_ns"]) for worker in epoch.workers.values() if len(worker.rows)]
    if not starts or not loader.num_workers:
        return spawn_ns / 1e9, 0.0
    return spawn_ns / 1e9, max(0.0, min(starts) - loader.began_ns - spawn_ns) / 1e9


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))
