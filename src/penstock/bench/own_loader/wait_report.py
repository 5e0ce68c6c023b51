"""What a run of a user's loader found about its waits, over all ranks: the answer, and what it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.bench.own_loader.loader_meter import RankWaits
from penstock.bench.own_loader.prediction import PredictedGain, predict
from penstock.bench.own_loader.process_watch import MemoryPeaks
from penstock.bench.own_loader.wait_stages import WaitStage
from penstock.units import format_bytes

CONSUMER: Final = "consumer"
_WORTHWHILE: Final = 1.05
_NEARLY: Final = 0.9
_MOST_SPOTS: Final = 5

PHRASES: Final[Mapping[str, str]] = {
    WaitStage.STORAGE: "reading from storage",
    WaitStage.DECODE: "decoding",
    WaitStage.TRANSFORM: "transforms",
    WaitStage.COLLATE: "collation",
    WaitStage.COPY: "copies between processes",
    WaitStage.STARTUP: "the start of the loader",
    WaitStage.OTHER: "work between the loader and the step",
    CONSUMER: "the step itself",
}
_START_OF_WORKERS: Final = "the start-up of workers"
_REMEDIES: Final[Mapping[WaitStage, tuple[str, ...]]] = {
    WaitStage.COPY: ("copies 2x cheaper",),
    WaitStage.STARTUP: ("no start-up",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWaits:
    """The waits of all ranks by stage, in seconds, and what would shorten them.

    `bottleneck` is a stage, or the consumer where hardly anything was waited for. `ended_s` passed between
    the last step of an epoch and the end of the loader, which no step counts.
    """

    loader: str
    ranks: int
    wait_s: float
    compute_s: float
    stages_s: Mapping[WaitStage, float]
    batches: int
    samples: int
    workers: int
    queued_s: float
    opens: int | None
    io: Mapping[str, int]
    memory: MemoryPeaks
    spots: Sequence[tuple[str, float]]
    predictions: tuple[PredictedGain, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tolerated: float = 0.1
    """The share of the time that may be waited: what `metric.au` leaves."""
    startup_s: float = 0.0
    ended_s: float = 0.0

    @property
    def wait_share(self) -> float:
        """The share of all time that was waited."""
        whole_s = self.wait_s + self.compute_s
        return self.wait_s / whole_s if whole_s else 0.0

    @property
    def largest(self) -> WaitStage:
        """The stage that was waited for longest."""
        return max(self.stages_s, key=lambda stage: self.stages_s[stage], default=WaitStage.OTHER)

    @property
    def bottleneck(self) -> str:
        """What limits the run."""
        return CONSUMER if self.wait_share < self.tolerated else self.largest.value

    @property
    def advice(self) -> PredictedGain | None:
        """The change to begin with; None where none is worth it."""
        remedies = _REMEDIES.get(self.largest)
        fitting = [one for one in self.predictions if _fits(one, remedies)]
        best = max((one.gain for one in fitting), default=0.0)
        if self.bottleneck == CONSUMER or best < _WORTHWHILE:
            return None
        # The least change that brings nearly as much.
        return min((one for one in fitting if one.gain >= _NEARLY * best), key=lambda one: one.gain)

    @property
    def sentence(self) -> str:
        """The answer."""
        begin = f"Waiting {self.wait_share:.1%} of the time"
        if self.bottleneck == CONSUMER:
            return f"{begin}: {PHRASES[CONSUMER]} is the limit, the loader is ahead of it"
        share = self.stages_s[self.largest] / self.wait_s if self.wait_s else 0.0
        is_shared_out = self.workers and self.largest is not WaitStage.STARTUP
        where = f" on {self.workers} worker{'s' * (self.workers != 1)}" if is_shared_out else ""
        text = f"{begin}; {share:.0%} of that is {self._describe(self.largest)}{where}"
        if (advice := self.advice) is None:
            return text
        tried = f" (tried: {advice.tried:.2f}x)" if advice.tried is not None else ""
        return f"{text}; {advice.change} would bring {advice.gain:.2f}x{tried}"

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Further answers, a title and a text each."""
        stages = sorted(self.stages_s.items(), key=lambda item: -item[1])
        per_sample = self.per_sample
        parts = (f"{self._describe(one)} {spent:.2f} s" for one, spent in stages if spent > 0)
        found = [("waits", ", ".join(parts))]
        if self.queued_s > _QUEUED * self.wait_s:
            found.append(("cores", f"workers could run and had no core for {self.queued_s:.1f} s"))
        found.extend(("spot", f"{where}, {spent:.2f} s of processor time") for where, spent in self.spots[:3])
        opens = "" if per_sample["opens"] is None else f", {per_sample['opens']:.2f} opens"
        read, device = (
            format_bytes(round(per_sample["read_bytes"])),
            format_bytes(round(per_sample["device_bytes"])),
        )
        found.append(("a sample", f"{read} in {per_sample['reads']:.1f} reads{opens}, {device} from devices"))
        memory = self.memory
        workers, shared, used, room = map(
            format_bytes,
            (
                memory.workers_rss_bytes,
                memory.workers_shared_bytes,
                memory.shm_used_bytes,
                memory.shm_total_bytes,
            ),
        )
        held = [f"/dev/shm {used} of {room}"]  # noqa: S108 - not a file that is written
        if self.workers:
            held.insert(0, f"workers {workers}, of it shared {shared}")
        found.append(("memory", "; ".join(held)))
        found.extend(
            ("predicted", _say(one)) for one in self.predictions if one.gain >= _WORTHWHILE or one.tried
        )
        return found

    def _describe(self, stage: WaitStage) -> str:
        return _START_OF_WORKERS if stage is WaitStage.STARTUP and self.workers else PHRASES[stage]

    @property
    def per_sample(self) -> dict[str, Any]:
        """The kernel's figures, for each sample; opens are those that Python made, None if unknown."""
        samples = max(1, self.samples)
        return {
            "read_bytes": self.io.get("rchar", 0) / samples,
            "device_bytes": self.io.get("read_bytes", 0) / samples,
            "reads": self.io.get("syscr", 0) / samples,
            "opens": None if self.opens is None else self.opens / samples,
        }

    def with_trial(self, change: str, gain: float) -> LoaderWaits:
        """The same with what a change brought when it was tried."""
        known = {one.change: one for one in self.predictions}
        known[change] = replace(known.get(change, PredictedGain(change=change, gain=0.0)), tried=gain)
        return replace(self, predictions=tuple(known.values()))

    def document(self) -> dict[str, Any]:
        """As plain data; stages are seconds that add up to `wait_s`, over all ranks."""
        return {
            "answer": self.sentence,
            "bottleneck": self.bottleneck,
            "loader": self.loader,
            "wait_s": self.wait_s,
            "consumer_s": self.compute_s,
            "wait_share": self.wait_share,
            "stages": {f"{stage}_s": self.stages_s.get(stage, 0.0) for stage in WaitStage},
            "end_of_epochs_s": self.ended_s,
            "factory_s": self.startup_s,
            "queued_for_cores_s": self.queued_s,
            "batches": self.batches,
            "samples": self.samples,
            "workers": self.workers,
            "settings": dict(self.settings),
            "per_sample": self.per_sample,
            "read": dict(self.io),
            "opens": self.opens,
            "memory": self.memory.document(),
            "hot_spots": [{"where": where, "cpu_s": spent} for where, spent in self.spots],
            "predictions": [one.document() for one in self.predictions],
        }


_QUEUED: Final = 0.1


def _fits(prediction: PredictedGain, remedies: tuple[str, ...] | None) -> bool:
    if remedies is not None:
        return prediction.change in remedies
    return prediction.change.startswith("workers=")


def _say(prediction: PredictedGain) -> str:
    tried = f", tried {prediction.tried:.2f}x" if prediction.tried is not None else ""
    return f"{prediction.change}: {prediction.gain:.2f}x{tried}"


def merge_ranks(
    ranks: Sequence[RankWaits], *, loader: str, tolerated: float, startup_s: float, ended_s: float
) -> LoaderWaits:
    """The waits of all ranks; predictions are those of the rank that waited longest."""
    stages: Counter[WaitStage] = Counter()
    spots: Counter[str] = Counter()
    io: Counter[str] = Counter()
    for rank in ranks:
        stages.update(rank.stages)
        spots.update(rank.spots)
        io.update(rank.io)
    slowest = max(ranks, key=lambda rank: rank.wait_ns)
    opens = [rank.opens for rank in ranks if rank.opens is not None]
    waits = LoaderWaits(
        loader=loader,
        ranks=len(ranks),
        wait_s=sum(rank.wait_ns for rank in ranks) / 1e9,
        compute_s=sum(rank.compute_ns for rank in ranks) / 1e9,
        stages_s={stage: spent / 1e9 for stage, spent in stages.items()},
        batches=sum(rank.batches for rank in ranks),
        samples=sum(rank.samples for rank in ranks),
        workers=max(rank.num_workers for rank in ranks),
        queued_s=sum(rank.queued_ns for rank in ranks) / 1e9,
        opens=sum(opens) if opens else None,
        io=dict(io),
        memory=slowest.memory,
        spots=[(where, spent / 1e9) for where, spent in spots.most_common(_MOST_SPOTS)],
        predictions=(),
        settings=slowest.settings,
        tolerated=tolerated,
        startup_s=startup_s,
        ended_s=ended_s,
    )
    model = slowest.model
    return replace(waits, predictions=tuple(predict(model) if model else _predict_without_queues(waits)))


def _predict_without_queues(waits: LoaderWaits) -> list[PredictedGain]:
    """What shorter stages would bring a loader of unknown build: as much as was waited for them."""
    whole_s = waits.wait_s + waits.compute_s
    halved = {
        "storage 2x faster": (WaitStage.STORAGE,),
        "decoding and transforms 2x cheaper": (WaitStage.DECODE, WaitStage.TRANSFORM),
        "collation 2x cheaper": (WaitStage.COLLATE,),
        "copies 2x cheaper": (WaitStage.COPY,),
    }
    saved_s = {
        change: sum(waits.stages_s.get(stage, 0.0) for stage in stages) / 2
        for change, stages in halved.items()
    }
    saved_s["no start-up"] = waits.stages_s.get(WaitStage.STARTUP, 0.0)
    found = [
        PredictedGain(change=change, gain=whole_s / (whole_s - saved))
        for change, saved in saved_s.items()
        if saved
    ]
    return sorted(found, key=lambda one: -one.gain)
