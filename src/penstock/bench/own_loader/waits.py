"""Divide the time spent waiting for batches by its causes, and report the parts.

While a consumer waits for a batch, whatever the batch's worker is doing holds it up. The worker's timeline is
therefore laid over the wait. Example: a batch was requested at 120 ms and delivered at 200 ms; its worker
loaded samples from 100 to 180 ms and collated them until 190 ms. Of the 80 ms, 60 were loading, 10 collation,
and 10 the copy between the processes. Invariant: the stages of a wait add up to the wait.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any, Final, NamedTuple

from penstock.units import format_bytes, format_count

CONSUMER: Final = "consumer"


class WaitStage(StrEnum):
    """A cause of a consumer's waits."""

    STORAGE = "storage"
    COMPUTE = "compute"
    COLLATE = "collate"
    COPY = "copy"
    STARTUP = "startup"
    OTHER = "other"


PHRASES: Final[Mapping[str, str]] = {
    WaitStage.STORAGE: "reading from storage",
    WaitStage.COMPUTE: "decoding and transforms",
    WaitStage.COLLATE: "collation",
    WaitStage.COPY: "copies between processes",
    WaitStage.STARTUP: "the start of the loader",
    WaitStage.OTHER: "work between the loader and the step",
    CONSUMER: "the step itself",
}


class Fetch(NamedTuple):
    """One fetch of a batch: samples were loaded from `began_ns` to `loaded_ns`, collated until `ended_ns`.

    `awake_ns` is the part of the loading in which the process computed or waited for a core; it slept for the
    rest.
    """

    began_ns: int
    loaded_ns: int
    ended_ns: int
    awake_ns: int
    is_batch: bool


class Delivery(NamedTuple):
    """A batch that was requested and delivered: fetch `row` among the `rows` of its worker.

    The worker had been starting since `began_ns`, which is 0 if it was already running.
    """

    asked_ns: int
    given_ns: int
    began_ns: int
    rows: Sequence[Fetch]
    row: Fetch


class StepWait(NamedTuple):
    """The wait of one step, and how much of it the consumer's own thread spent computing."""

    start_ns: int
    loaded_ns: int
    own_cpu_ns: int
    is_first: bool = False


def divide_waits(
    steps: Sequence[StepWait], deliveries: Sequence[Delivery], busy_share: float
) -> Counter[WaitStage]:
    """Return the nanoseconds of all waits by stage; they add up to the waits.

    Waits that no DataLoader explains are divided by `busy_share`, the share in which the loader computed.
    """
    found: Counter[WaitStage] = Counter()
    later = [step.loaded_ns - step.start_ns for step in steps if not step.is_first]
    # If the loader is unknown, the excess of the first wait over the usual one is its start.
    usual_ns = median(later) if later and not deliveries else None
    position = 0
    for step in steps:
        rest_ns: float = step.loaded_ns - step.start_ns
        while position < len(deliveries) and deliveries[position].given_ns <= step.loaded_ns:
            batch = deliveries[position]
            position += 1
            asked_ns = max(batch.asked_ns, step.start_ns)
            # The start of workers counts toward the first batch, although it began before the batch was
            # requested.
            if step.is_first and batch.began_ns > 0:
                asked_ns = max(step.start_ns, min(asked_ns, batch.began_ns))
            if batch.given_ns > asked_ns:
                for stage, part_ns in _stages_between(batch, asked_ns):
                    found[stage] += part_ns  # type: ignore[assignment]  # parts of nanoseconds
                rest_ns -= batch.given_ns - asked_ns
        rest_ns = max(rest_ns, 0.0)
        if step.is_first and usual_ns is not None and rest_ns > usual_ns:
            found[WaitStage.STARTUP] += rest_ns - usual_ns  # type: ignore[assignment]
            rest_ns = usual_ns
        own_ns = min(float(step.own_cpu_ns), rest_ns)
        computing_ns = 0.0 if deliveries else (rest_ns - own_ns) * busy_share
        found[WaitStage.OTHER if deliveries else WaitStage.COMPUTE] += own_ns  # type: ignore[assignment]
        found[WaitStage.COMPUTE] += computing_ns  # type: ignore[assignment]
        found[WaitStage.STORAGE] += rest_ns - own_ns - computing_ns  # type: ignore[assignment]
    return found


def _stages_between(batch: Delivery, start_ns: int) -> Iterator[tuple[WaitStage, float]]:
    """Yield each stage between `start_ns` and the delivery of the batch, with its nanoseconds."""
    rows, end_ns, now_ns = batch.rows, batch.given_ns, start_ns
    last = bisect_left(rows, batch.row.began_ns, key=lambda row: row.began_ns)
    if now_ns < rows[0].began_ns:
        until_ns = min(rows[0].began_ns, end_ns)
        yield (WaitStage.STARTUP if batch.began_ns else WaitStage.COPY), until_ns - now_ns
        now_ns = until_ns
    for row in rows[bisect_right(rows, now_ns, key=lambda row: row.ended_ns) : last + 1]:
        began_ns, loaded_ns, ended_ns = (min(moment, end_ns) for moment in row[:3])
        if began_ns > now_ns:  # the worker had sent one batch, and had not begun the next
            yield WaitStage.COPY, began_ns - now_ns
            now_ns = began_ns
        if loaded_ns > now_ns:
            # A part of the loading is divided in the same proportion as the whole.
            awake_share = min(1.0, row.awake_ns / (row.loaded_ns - row.began_ns))
            yield WaitStage.COMPUTE, (loaded_ns - now_ns) * awake_share
            yield WaitStage.STORAGE, (loaded_ns - now_ns) * (1 - awake_share)
            now_ns = loaded_ns
        if ended_ns > now_ns:
            yield WaitStage.COLLATE, ended_ns - now_ns
            now_ns = ended_ns
    yield WaitStage.COPY, end_ns - now_ns


@dataclass(slots=True, kw_only=True)
class LoaderWaits:
    """The waits of one rank, or of all ranks together, by stage, and the figures behind them.

    `bottleneck` is a stage, or the consumer if it hardly waited. `ended_s` is the time between the last step
    of an epoch and the end of the loader, which is not part of any step. `trials` has the samples per second
    with each change, relative to the run without it.
    """

    loader: str
    tolerated: float = 0.1
    """The share of the time that may be spent waiting: one minus the `metric.au` of the workload."""
    wait_s: float = 0.0
    compute_s: float = 0.0
    ended_s: float = 0.0
    factory_s: float = 0.0
    batches: int = 0
    samples: int = 0
    workers: int = 0
    stages_s: Counter[WaitStage] = field(default_factory=Counter)
    io: Counter[str] = field(default_factory=Counter)
    memory: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    trials: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_ranks(cls, ranks: Sequence[LoaderWaits]) -> LoaderWaits:
        """Add up the waits of all ranks."""
        slowest = max(ranks, key=lambda rank: rank.wait_s)
        return cls(
            loader=slowest.loader,
            tolerated=slowest.tolerated,
            wait_s=sum(rank.wait_s for rank in ranks),
            compute_s=sum(rank.compute_s for rank in ranks),
            ended_s=max(rank.ended_s for rank in ranks),
            factory_s=max(rank.factory_s for rank in ranks),
            batches=sum(rank.batches for rank in ranks),
            samples=sum(rank.samples for rank in ranks),
            workers=max(rank.workers for rank in ranks),
            stages_s=sum((rank.stages_s for rank in ranks), Counter()),
            io=sum((rank.io for rank in ranks), Counter()),
            memory=slowest.memory,
            settings=slowest.settings,
        )

    @property
    def wait_share(self) -> float:
        """The share of all time that was spent waiting."""
        whole_s = self.wait_s + self.compute_s
        return self.wait_s / whole_s if whole_s else 0.0

    @property
    def bottleneck(self) -> str:
        """The stage that limits the run."""
        if self.wait_share < self.tolerated or not self.stages_s:
            return CONSUMER
        return max(self.stages_s, key=lambda stage: self.stages_s[stage]).value

    @property
    def sentence(self) -> str:
        """The result in one sentence: what the consumer waited for."""
        begin = f"Waiting {self.wait_share:.1%} of the time, first steps included"
        if self.bottleneck == CONSUMER:
            return f"{begin}: {PHRASES[CONSUMER]} is the limit, the loader is ahead of it"
        largest = WaitStage(self.bottleneck)
        share = self.stages_s[largest] / self.wait_s if self.wait_s else 0.0
        is_shared_out = self.workers and largest is not WaitStage.STARTUP
        where = f" on {format_count(self.workers, 'worker')}" if is_shared_out else ""
        answer = f"{begin}; {share:.0%} of that is {self._describe(largest)}{where}"
        return "; ".join((answer, *(f"{change} brings {gain:.2f}x" for change, gain in self.trials.items())))

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Further findings, each with a title and a text."""
        stages = sorted(self.stages_s.items(), key=lambda item: -item[1])
        sample, memory = self.per_sample, {name: format_bytes(size) for name, size in self.memory.items()}
        read, device = (format_bytes(round(sample[name])) for name in ("read_bytes", "device_bytes"))
        held = [f"/dev/shm {memory['shm_used_bytes']} of {memory['shm_total_bytes']}"]  # noqa: S108
        if self.workers:
            shared = memory["workers_shared_bytes"]
            held.insert(0, f"workers {memory['workers_rss_bytes']}, of it shared {shared}")
        return [
            (
                "waits",
                ", ".join(f"{self._describe(one)} {spent:.2f} s" for one, spent in stages if spent > 0),
            ),
            ("a sample", f"{read} in {sample['reads']:.1f} reads, {device} from devices"),
            ("memory", "; ".join(held)),
            *(("tried", f"{change}: {gain:.2f}x") for change, gain in self.trials.items()),
        ]

    def _describe(self, stage: WaitStage) -> str:
        return "the start of workers" if stage is WaitStage.STARTUP and self.workers else PHRASES[stage]

    @property
    def per_sample(self) -> dict[str, float]:
        """The kernel's figures divided by the number of samples."""
        names = {"read_bytes": "rchar", "device_bytes": "read_bytes", "reads": "syscr"}
        return {name: self.io[figure] / max(1, self.samples) for name, figure in names.items()}

    def document(self) -> dict[str, Any]:
        """Return the waits as plain data; stages are seconds, summed over ranks, that add up to `wait_s`."""
        return {
            "answer": self.sentence,
            "bottleneck": self.bottleneck,
            "loader": self.loader,
            "wait_s": self.wait_s,
            "consumer_s": self.compute_s,
            "wait_share": self.wait_share,
            "stages": {f"{stage}_s": self.stages_s[stage] for stage in WaitStage},
            "end_of_epochs_s": self.ended_s,
            "factory_s": self.factory_s,
            "batches": self.batches,
            "samples": self.samples,
            "workers": self.workers,
            "settings": dict(self.settings),
            "per_sample": self.per_sample,
            "read": dict(self.io),
            "memory": dict(self.memory),
            "trials": [{"change": change, "gain": gain} for change, gain in self.trials.items()],
        }
