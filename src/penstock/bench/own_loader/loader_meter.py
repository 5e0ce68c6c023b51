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
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from penstock.bench.own_loader.prediction import MOST_BATCHES, BatchWork, LoaderModel
from penstock.bench.own_loader.process_watch import MemoryPeaks, ProcessWatch, WaitingClock
from penstock.bench.own_loader.torch_probe import OWN_PROCESS, Delivery, TorchProbe, WatchedLoader
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
from penstock.bench.own_loader.work_sampler import COLLATE, COPY, WorkSampler
from penstock.bench.own_loader.worker_probe import fetches_path

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

    def __init__(
        self,
        changes: Mapping[str, Any] | None = None,
        *,
        cores: float,
        strangers: AbstractSet[int] = frozenset(),
    ) -> None:
        self.clock = WaitingClock()
        self.found = RankWaits()
        self._changes = changes
        self._cores = cores
        self._watch = ProcessWatch(self.clock, strangers=strangers)
        self._sampler = WorkSampler(self._look, own=threading.get_ident(), reads=self._watch.reads)
        self._torch: TorchProbe | None = None
        self._counted: dict[Path, int] = {}
        self._spots: dict[Path, Counter[str]] = {}
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        # What iterates by torch's DataLoader has imported it by now: the factory has been called.
        if "torch.utils.data" in sys.modules:
            self._torch = TorchProbe(self._changes, reads=self._watch.reads)
            self._resources.callback(self._torch.remove)
            self._resources.enter_context(self._torch)
        self._watch.start()
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sampler.stop()
        self._watch.stop()
        self._resources.close()

    def _look(self) -> str | None:
        """Whether the consumer waits, and for what where its stack can't tell."""
        if not self.clock.since_ns:
            return None
        return self._torch.label() if self._torch else ""

    def read_bytes(self) -> int:
        """What the loader has read so far, by the kernel's figures."""
        self._watch.look_at_io()
        for loader in self._torch.loaders if self._torch else ():
            for path in loader.folder.glob("*.json"):
                self._hear(self._read_json(path))
        return self._watch.totals().get("rchar", 0)

    def _hear(self, left: Mapping[str, Any]) -> None:
        """Take what a process says of its own reads, which leaves out its start."""
        if "pid" in left:
            self._watch.hear(left)

    def end_epoch(self, steps: Sequence[StepWait], *, consumed_ns: int, samples: int) -> None:
        """Divide the waits of an epoch whose iterator is gone, so that its workers have written all."""
        self._watch.look_at_io()
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
        # Loaders that torch doesn't make are counted by their processes.
        known = [epoch.loader.num_workers for epoch in epochs]
        found.num_workers = max([found.num_workers, *known] if any(known) else [self._watch.num_workers])
        found.io, found.memory = self._watch.totals(), self._watch.memory
        if epochs:
            main = max(epochs, key=lambda epoch: len(epoch.deliveries))
            found.model = _make_model(main, steps, cores=self._cores) or found.model
            found.settings = {
                "workers": main.loader.num_workers,
                "prefetch": main.loader.prefetch,
                "persistent": main.loader.is_persistent,
            }
        # What a worker has left is about all epochs that it has seen.
        found.spots = sum(self._spots.values(), Counter()) or self._sampler.spots

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
        deliveries = loader.take_deliveries()
        if not deliveries:
            return None
        workers = {}
        for number in {delivery.worker for delivery in deliveries}:
            path = fetches_path(loader.folder, number)
            computed_ns: Mapping[str, int] = {
                label: spent
                for label, spent in self._sampler.cpu_ns.items()
                if label not in {COLLATE, COPY}  # all of the consumer's waits are sampled, not only its loads
            }
            rows = self._read_fetches(loader, number)
            if number != OWN_PROCESS:
                left = self._read_json(path.with_suffix(".json"))
                if left and len(rows):
                    _add_reads_of_fetches(left, rows)
                self._spots[path] = Counter(left.get("spots", {}))
                self._hear(left)
                computed_ns = left.get("cpu_ns", {})
            workers[number] = WorkerFetches(
                began_ns=loader.began_ns,
                rows=rows,
                split=LoadSplit.of_samples(computed_ns),
            )
        return _Epoch(loader=loader, deliveries=deliveries, workers=workers)

    def _read_fetches(self, loader: WatchedLoader, number: int) -> Rows:
        """All fetches of a worker; those that are new since the last call are added up."""
        rows, path = loader.read_fetches(number), fetches_path(loader.folder, number)
        before, found = self._counted.get(path, 0), self.found
        new = rows[before:]
        if len(new):
            found.queued_ns += int(new["load_queued_ns"].sum() + new["collate_queued_ns"].sum())
            opens = int(new["opens"][-1]) - (int(rows[before - 1]["opens"]) if before else 0)
            found.opens = (found.opens or 0) + opens
        self._counted[path] = len(rows)
        return rows

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            return json.loads(self._watch.reads.read(path))  # type: ignore[no-any-return]
        except ValueError:
            return {}


def _add_reads_of_fetches(left: dict[str, Any], rows: Rows) -> None:
    """Complete what a worker has left about its reads by what its fetches tell, which is newer."""
    asked = 2 * len(rows)  # for each batch it was asked through a pipe, in two reads
    own, last = left["own"], rows[-1]
    own["rchar"] = max(own["rchar"], int(last["own_bytes"]))
    own["syscr"] = max(own["syscr"], int(last["own_reads"])) + asked
    left["io"]["syscr"] -= asked


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
    batches, queued_s = [], 0.0
    for delivery in deliveries[:MOST_BATCHES]:
        rows = epoch.workers[delivery.worker].rows
        place = int(np.searchsorted(rows["seq"], delivery.seq))
        if place >= len(rows) or rows[place]["seq"] != delivery.seq:
            continue
        row = rows[place]
        ended_ns = int(row["ended_ns"])
        collate_ns = int(row["ended_ns"] - row["loaded_ns"])
        collate_busy_ns = int(row["collate_cpu_ns"]) + int(row["collate_queued_ns"])
        queued_s += int(row["load_queued_ns"] + row["collate_queued_ns"]) / 1e9
        batches.append(
            BatchWork(
                sleep_s=sleep_ns(row) / 1e9,
                cpu_s=int(row["load_cpu_ns"] + row["other_cpu_ns"]) / 1e9,
                collate_sleep_s=max(0, collate_ns - collate_busy_ns) / 1e9,
                collate_cpu_s=int(row["collate_cpu_ns"]) / 1e9,
                send_s=max(0, delivery.given_ns - max(delivery.asked_ns, ended_ns)) / 1e9,
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


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))
