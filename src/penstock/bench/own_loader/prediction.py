"""What more workers, a faster storage or cheaper work on samples would bring: a small model of queues.

Pure. The times of the run's own batches go through the loader's rules once more: batches are dealt to workers
in turn, so many ahead as the loader fetches, and given out in order to one consumer. Work that needs more
cores than there are takes longer by as much; everything else takes what it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

MOST_BATCHES = 2000
_ROUNDS = 12
_CLOSE = 0.005
_CONTENDED = 1.1
"""Below it, waits for cores are those of any scheduler."""


@dataclass(frozen=True, slots=True)
class BatchWork:
    """One batch: what its worker slept and computed for samples and collation, and what sending it takes."""

    sleep_s: float
    cpu_s: float
    collate_sleep_s: float
    collate_cpu_s: float
    send_s: float
    """Until it has arrived, while nothing else holds it up; the consumer's thread is in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderModel:
    """A loader and its consumer. No workers: the consumer fetches for itself.

    `step_cpu_s` is what the consumer computes a step on this host. In each epoch workers are begun one after
    the other, each in `spawn_s`, and fetch for the first time `latency_s` later.
    """

    batches: Sequence[BatchWork]
    steps_s: Sequence[float]
    num_workers: int
    prefetch: int
    num_cores: float
    steps_per_epoch: int
    spawn_s: float = 0.0
    latency_s: float = 0.0
    step_cpu_s: float = 0.0
    others: float = 0.0
    """How many threads of other programs compete for the cores, on average."""

    def epoch_s(self) -> float:
        """How long an epoch takes."""
        return self._run(self.slowdown())

    def slowdown(self) -> float:
        """How many times longer computing takes where cores are shared: all that run get equal parts."""
        slowdown = 1.0
        for _ in range(_ROUNDS):
            running = self._cpu_s() * slowdown / max(self._run(slowdown), 1e-9)
            wanted = max(1.0, (running + self.others) / self.num_cores)
            if abs(wanted - slowdown) < _CLOSE * slowdown:
                break
            slowdown = (slowdown + wanted) / 2
        return slowdown

    def with_queueing(self, queued_s: float) -> LoaderModel:
        """The same beside other programs, so many that the batches waited `queued_s` for cores."""
        computed_s = sum(one.cpu_s + one.collate_cpu_s for one in self.batches)
        longer = 1 + queued_s / computed_s if computed_s else 1.0
        if longer < _CONTENDED:
            return self
        running = self._cpu_s() * longer / max(self._run(longer), 1e-9)
        return replace(self, others=max(0.0, longer * self.num_cores - running))

    def _cpu_s(self) -> float:
        """The processor time of an epoch."""
        mean_s = sum(one.cpu_s + one.collate_cpu_s for one in self.batches) / len(self.batches)
        return self.steps_per_epoch * (mean_s + self.step_cpu_s)

    def _run(self, slowdown: float) -> float:
        """How long an epoch takes if computing takes `slowdown` times as long."""
        count = min(self.steps_per_epoch, MOST_BATCHES)
        works = islice(cycle(self.batches), count)
        steps = islice(cycle(self.steps_s), count)
        workers = max(1, self.num_workers)
        ahead = workers * max(1, self.prefetch)
        made_s = self.num_workers * self.spawn_s
        free_s = [(worker + 1) * self.spawn_s + self.latency_s for worker in range(workers)]
        taken_s: list[float] = []
        now_s = made_s
        for number, (work, step_s) in enumerate(zip(works, steps, strict=True)):
            fetch_s = work.sleep_s + work.collate_sleep_s + (work.cpu_s + work.collate_cpu_s) * slowdown
            if self.num_workers == 0:
                now_s += fetch_s + step_s
                continue
            worker = number % workers
            dealt_s = taken_s[number - ahead] if number >= ahead else 0.0
            ready_s = free_s[worker] = max(free_s[worker], dealt_s) + fetch_s
            now_s = max(now_s, ready_s) + work.send_s
            taken_s.append(now_s)
            now_s += step_s
        # More steps than are played through go on at the pace of the last half.
        half = len(taken_s) // 2
        if self.steps_per_epoch > count and half:
            now_s += (
                (self.steps_per_epoch - count) * (taken_s[-1] - taken_s[half]) / (len(taken_s) - 1 - half)
            )
        return now_s

    def with_workers(self, num_workers: int) -> LoaderModel:
        """The same with another number of workers."""
        return replace(self, num_workers=num_workers, prefetch=self.prefetch or 2)

    def with_storage(self, times_faster: float) -> LoaderModel:
        """The same on a storage whose waits are so many times shorter."""
        return self._with(lambda one: replace(one, sleep_s=one.sleep_s / times_faster))

    def with_cheaper_work(self, times_cheaper: float) -> LoaderModel:
        """The same with so many times less work on samples."""
        return self._with(lambda one: replace(one, cpu_s=one.cpu_s / times_cheaper))

    def with_cheaper_collation(self, times_cheaper: float) -> LoaderModel:
        """The same with so many times less work on batches."""
        return self._with(
            lambda one: replace(
                one,
                collate_sleep_s=one.collate_sleep_s / times_cheaper,
                collate_cpu_s=one.collate_cpu_s / times_cheaper,
            )
        )

    def with_cheaper_copies(self, times_cheaper: float) -> LoaderModel:
        """The same where a batch is sent in so many times less time."""
        return self._with(lambda one: replace(one, send_s=one.send_s / times_cheaper))

    def without_startup(self) -> LoaderModel:
        """The same with workers that stay."""
        return replace(self, spawn_s=0.0, latency_s=0.0)

    def _with(self, change: Callable[[BatchWork], BatchWork]) -> LoaderModel:
        return replace(self, batches=[change(one) for one in self.batches])


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedGain:
    """A change, and how many times the samples a second it would bring, as predicted and as tried."""

    change: str
    gain: float
    tried: float | None = None

    def document(self) -> dict[str, str | float | None]:
        """As plain data."""
        return {"change": self.change, "gain": self.gain, "tried": self.tried}


def predict(model: LoaderModel) -> list[PredictedGain]:
    """What the usual changes would bring, the best first."""
    now_s = model.epoch_s()
    workers = max(1, model.num_workers)
    changed = {
        f"workers={2 * workers}": model.with_workers(2 * workers),
        f"workers={4 * workers}": model.with_workers(4 * workers),
        "storage 2x faster": model.with_storage(2),
        "decoding and transforms 2x cheaper": model.with_cheaper_work(2),
        "collation 2x cheaper": model.with_cheaper_collation(2),
        "copies 2x cheaper": model.with_cheaper_copies(2),
        "no start-up": model.without_startup(),
    }
    found = [PredictedGain(change=name, gain=now_s / one.epoch_s()) for name, one in changed.items()]
    return sorted(found, key=lambda one: -one.gain)
