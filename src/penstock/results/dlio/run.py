"""What DLIO's files are written from: a finished run's request, events and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from penstock.results.events import Phase, SpanKind
from penstock.workload.dataset_size import record_bytes

if TYPE_CHECKING:
    from penstock.results.events import RankEvents, SpanEvent
    from penstock.results.figures import PhaseFigures
    from penstock.results.host import HostFacts
    from penstock.workload.spec import Workload

GIB = 2**30
PREFIXES = {SpanKind.SAVE: "save", SpanKind.LOAD: "load"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DlioRun:
    """One run. `hosts` are one a node, rank 0's first; dates are UTC."""

    workload: Workload
    ranks: Sequence[RankEvents]
    hosts: Sequence[HostFacts]
    started: datetime
    ended: datetime
    train: PhaseFigures | None
    evaluation: PhaseFigures | None

    def figures(self, phase: Phase) -> PhaseFigures | None:
        """The figures of one phase."""
        return self.train if phase is Phase.TRAIN else self.evaluation

    @property
    def data_gib_per_host(self) -> float:
        """The training data's nominal size, divided by the hosts."""
        dataset = self.workload.dataset
        num_samples = dataset.num_files_train * dataset.num_samples_per_file
        return float(num_samples * record_bytes(dataset)) / GIB / len(self.hosts)

    def may_cache(self, host: HostFacts) -> int:
        """DLIO's `potential_caching`: 1 where a host's share of the data fits into its memory, else 0."""
        return int(self.data_gib_per_host < host.memory_bytes / GIB)

    def host_of(self, rank: RankEvents) -> HostFacts:
        """The machine that a rank ran on."""
        return next((host for host in self.hosts if host.host == rank.clock.host), self.hosts[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTime:
    """One checkpoint: how long one rank took, and its size over all ranks."""

    span: SpanEvent
    duration_s: float
    size_bytes: int

    @property
    def gib_per_s(self) -> float:
        """All ranks' bytes over this rank's time."""
        return self.size_bytes / GIB / self.duration_s if self.duration_s > 0 else 0.0


CheckpointSizes = Mapping[tuple[SpanKind, int, int, int], int]
"""Bytes of a checkpoint over all ranks, by kind, epoch, block and step."""


def checkpoint_sizes(ranks: Sequence[RankEvents]) -> CheckpointSizes:
    """The sizes of all checkpoints, each summed over ranks once."""
    sizes: Counter[tuple[SpanKind, int, int, int]] = Counter()
    for rank in ranks:
        for span in rank.spans_of(*PREFIXES):
            sizes[_checkpoint_key(span)] += span.size_bytes
    return sizes


def checkpoints(rank: RankEvents, kind: SpanKind, sizes: CheckpointSizes) -> Iterator[CheckpointTime]:
    """The checkpoints that one rank took part in saving or loading, in order."""
    for span in rank.spans_of(kind):
        duration_s = (span.end_ns - span.start_ns) / 1e9
        yield CheckpointTime(span=span, duration_s=duration_s, size_bytes=sizes[_checkpoint_key(span)])


def slowest_checkpoints(ranks: Sequence[RankEvents], kind: SpanKind) -> list[CheckpointTime]:
    """Each checkpoint with the time of the rank that took longest; a checkpoint is done when all ranks are.

    DLIO takes rank 0's time, which hides every slower rank unless `rank_sync` makes it wait for them.
    """
    sizes = checkpoint_sizes(ranks)
    slowest: dict[tuple[SpanKind, int, int, int], CheckpointTime] = {}
    for rank in ranks:
        for each in checkpoints(rank, kind, sizes):
            known = slowest.setdefault(_checkpoint_key(each.span), each)
            if each.duration_s > known.duration_s:
                slowest[_checkpoint_key(each.span)] = each
    return list(slowest.values())


def _checkpoint_key(span: SpanEvent) -> tuple[SpanKind, int, int, int]:
    return SpanKind(span.kind), span.epoch, span.block, span.step


def dlio_date(moment: datetime) -> str:
    """A date as DLIO writes it: ISO 8601 to the microsecond, without a time zone."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f")
