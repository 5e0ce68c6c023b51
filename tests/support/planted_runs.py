"""A training job on a virtual clock, with a cause of slowness planted into it, as the events of its trace.

Two ranks with a checkpoint every eighth step; each has processes that read its samples ahead. Nothing sleeps:
the times are what storage and processors of the job are said to take, whatever this machine does.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

KIB = 1 << 10
POLL_US = 100
START_US = 1_700_000_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a job does, and how long its calls take, in microseconds; a factor of 1 is as usual."""

    seed: int = 1
    workers: int = 4
    epochs: int = 2
    steps: int = 16
    read_bytes: int = 128 * KIB
    read_us: int = 600
    open_us: int = 200
    write_us: int = 1000
    fsync_us: int = 5000
    decode_us: int = 2000
    compute_us: int = 20_000
    stats: int = 1
    is_random: bool = False
    has_open_lock: bool = False
    fsyncs_each_write: bool = False
    slow_file: int = -1
    slow_rank: int = -1
    slow_after_us: int = -1
    factor: float = 8.0
    jitter: float = 0.05


FILE_BYTES = 1 << 20
BATCH = 4
RANKS = 2


class _Simulation:
    def __init__(self, job: Job, run: str) -> None:
        self.job, self.run, self.rows = job, run, list[dict[str, Any]]()
        self.draw = Random(job.seed)
        self.order = count()
        self.heap: list[tuple[int, int, Iterator[int]]] = []
        self.now = 0
        self.lock_free_us = 0
        self.ready: set[tuple[int, int]] = set()
        self.used = [0] * RANKS
        self.arrived = [0] * RANKS
        num_files = RANKS * job.steps * BATCH
        self.files = [self.draw.sample(range(num_files), num_files) for _ in range(job.epochs)]

    def play(self) -> list[dict[str, Any]]:
        for rank in range(RANKS):
            self._start(self._train(rank))
            for worker in range(self.job.workers):
                self._start(self._read_ahead(rank, worker))
        while self.heap:
            self.now, _, process = heappop(self.heap)
            self._start(process)
        return self.rows

    def _start(self, process: Iterator[int]) -> None:
        wake_us = next(process, None)
        if wake_us is not None:
            heappush(self.heap, (wake_us, next(self.order), process))

    def _record(self, name: str, began_us: int, ended_us: int, rank: int, worker: int, **more: Any) -> None:
        pid = 100 * (rank + 1) + worker
        self.rows.append({
            "run": self.run, "name": name, "ts_us": START_US + began_us, "dur_us": ended_us - began_us,
            "rank": rank, "pid": pid, "tid": pid, "host": "node0", **more,
        })  # fmt: skip

    def _call(
        self, name: str, usual_us: int, rank: int, worker: int, path: str, **more: Any
    ) -> Iterator[int]:
        """One call: it begins now, and what follows happens at its end."""
        job, began_us = self.job, self.now
        is_slow = name == "pread64" and (
            path.endswith(f"-{job.slow_file}.npz")
            or rank == job.slow_rank
            or (0 <= job.slow_after_us < began_us)
        )
        took = usual_us * (1 + job.jitter * self.draw.random()) * (job.factor if is_slow else 1)
        ended_us = began_us + round(took)
        if name == "open64" and job.has_open_lock:
            ended_us = self.lock_free_us = max(began_us, self.lock_free_us) + round(took)
        yield ended_us
        self._record(name, began_us, ended_us, rank, worker, path=path, **more)

    def _read_ahead(self, rank: int, worker: int) -> Iterator[int]:
        job = self.job
        for step in range(worker, job.epochs * job.steps, job.workers):
            while step - self.used[rank] >= 2 * job.workers:
                yield self.now + POLL_US
            epoch, place = divmod(step, job.steps)
            first = (place * RANKS + rank) * BATCH
            for number in self.files[epoch][first : first + BATCH]:
                path = f"/slow/data/sample-{number}.npz"
                yield from self._call("open64", job.open_us, rank, worker + 1, path)
                for _ in range(job.stats):
                    yield from self._call("fstat", 250, rank, worker + 1, path)
                offsets = list(range(0, FILE_BYTES, job.read_bytes))
                if job.is_random:
                    self.draw.shuffle(offsets)
                for offset in offsets:
                    moved = {"size_bytes": job.read_bytes, "offset": offset}
                    yield from self._call("pread64", job.read_us, rank, worker + 1, path, **moved)
                yield from self._call("close", 10, rank, worker + 1, path)
                yield self.now + round(job.decode_us * (1 + job.jitter * self.draw.random()))
            self.ready.add((rank, step))

    def _train(self, rank: int) -> Iterator[int]:
        job = self.job
        for step in range(job.epochs * job.steps):
            where = {"epoch": 1 + step // job.steps, "step": 1 + step}
            moments = [self.now]
            while (rank, step) not in self.ready:
                yield self.now + POLL_US
            self.used[rank] += 1
            moments.append(self.now)
            yield self.now + round(job.compute_us * (1 + job.jitter * self.draw.random()))
            moments.append(self.now)
            self.arrived[rank] += 1
            while min(self.arrived) < self.arrived[rank]:
                yield self.now + POLL_US
            moments.append(self.now)
            for part, began_us, ended_us in zip(
                ("wait", "compute", "barrier"), moments, moments[1:], strict=False
            ):
                self._record(f"train.{part}", began_us, ended_us, rank, 0, cat=part, **where)
            self._record("train.step", moments[1], moments[3], rank, 0, cat="step", **where)
            if step % 8 == 7:
                yield from self._save(rank, step, where)

    def _save(self, rank: int, step: int, where: dict[str, Any]) -> Iterator[int]:
        job, began_us = self.job, self.now
        path = f"/slow/ckpt/step-{step}-rank-{rank}.pt"
        yield from self._call("open64", job.open_us, rank, 0, path)
        for number in range(16):
            moved = {"size_bytes": 1 << 20, "offset": number << 20}
            yield from self._call("pwrite64", job.write_us, rank, 0, path, **moved)
            if job.fsyncs_each_write or number == 15:
                yield from self._call("fsync", job.fsync_us, rank, 0, path)
        yield from self._call("close", 10, rank, 0, path)
        self._record("save", began_us, self.now, rank, 0, cat="checkpoint", **where)


def trace_job(job: Job, run: str) -> list[dict[str, Any]]:
    """The events of the job, as a tracer inside it records them: ranks are known, and its loop has spans."""
    return _Simulation(job, run).play()


def seen_by_strace(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same job from outside: no rank, no spans, but all that its processes do beside their work."""
    run, began_us = rows[0]["run"], min(row["ts_us"] for row in rows)
    seen = []
    for row in rows:
        if "path" in row:
            trainer = row["pid"] // 100 * 100
            args = json.dumps({} if row["pid"] == trainer else {"parent": trainer})
            seen.append({**row, "rank": None, "args": args})
            # Each sample goes to the trainer through a socket.
            if row["name"] == "close" and row["pid"] != trainer:
                of_socket = {"path": f"socket:[{row['pid']}]", "dur_us": 30, "ts_us": row["ts_us"] + 20}
                seen += [{**seen[-1], "name": "write", "size_bytes": 64, **of_socket} for _ in range(2)]
    # Each trainer imports its modules before its work.
    modules = [f"/opt/env/lib/python3.11/site-packages/torch/m{number}.py" for number in range(400)]
    for pid in (100, 200):
        for number, path in enumerate(modules):
            for place, name in enumerate(("stat", "open64", "read", "close")):
                at = began_us - 1_000_000 + 2000 * number + 400 * place
                seen.append({
                    "run": run, "name": name, "ts_us": at, "dur_us": 350, "pid": pid, "tid": pid,
                    "host": "node0", "path": path, "size_bytes": 900 if name == "read" else None,
                })  # fmt: skip
    return seen
