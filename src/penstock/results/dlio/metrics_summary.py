"""`summary.json` and the `[METRIC]` lines: a finished run in DLIO's figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from penstock.results.phase_figures import mean_of
from penstock.results.step_events import SpanKind, StepPhase
from penstock.workload.dataset_size import record_bytes

if TYPE_CHECKING:
    from penstock.results.host_facts import HostFacts
    from penstock.results.phase_figures import PhaseFigures
    from penstock.results.step_events import RankEvents, SpanEvent
    from penstock.workload.spec import Workload


GIB = 2**30
PREFIXES = {SpanKind.SAVE: "save", SpanKind.LOAD: "load"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DlioOutputs:
    """One run. `hosts` are one a node, rank 0's first; dates are UTC."""

    workload: Workload
    ranks: Sequence[RankEvents]
    hosts: Sequence[HostFacts]
    started: datetime
    ended: datetime
    train: PhaseFigures | None
    evaluation: PhaseFigures | None

    def figures(self, phase: StepPhase) -> PhaseFigures | None:
        """The figures of one phase."""
        return self.train if phase is StepPhase.TRAIN else self.evaluation

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


_RULE = "[METRIC] =========================================================="


def summary(run: DlioOutputs) -> dict[str, Any]:
    """The content of `summary.json`. Per-host lists have one entry a node."""
    dataset = run.workload.dataset
    first = run.hosts[0]
    return {
        "start": dlio_date(run.started),
        "num_accelerators": len(run.ranks),
        "num_hosts": len(run.hosts),
        "hostname": first.host,
        "metric": metrics(run),
        "num_files_train": dataset.num_files_train,
        "num_files_eval": dataset.num_files_eval,
        "num_samples_per_file": dataset.num_samples_per_file,
        "host_cpu_count": [host.num_cores for host in run.hosts],
        "host_processor_name": first.machine,
        "host_memory_GB": [host.memory_bytes / GIB for host in run.hosts],
        "host_cpuinfo": dict(first.cpuinfo),
        "host_meminfo": dict(first.meminfo),
        "data_size_per_host_GB": run.data_gib_per_host,
        "potential_caching": [run.may_cache(host) for host in run.hosts],
        "epochs": len(run.train.epochs) if run.train else 0,
        "end": dlio_date(run.ended),
    }


def metrics(run: DlioOutputs) -> dict[str, Any]:
    """The section `metric`: what was not done has no keys."""
    found: dict[str, Any] = {}
    for phase, prefix in ((StepPhase.TRAIN, "train"), (StepPhase.EVAL, "eval")):
        figures = run.figures(phase)
        if figures is not None:
            found |= _phase_metrics(figures, prefix)
    for kind in PREFIXES:
        found |= _checkpoint_metrics(run, kind)
    return found


def metric_lines(summary_of_run: Mapping[str, Any]) -> list[str]:
    """The lines that DLIO prints at the end of a run, and that others parse."""
    found = summary_of_run["metric"]
    lines = [_RULE, f"[METRIC] Number of Simulated Accelerators: {summary_of_run['num_accelerators']} "]
    if "train_au_percentage" in found:
        lines += _phase_lines(found, "train", "Training", "Training I/O Throughput (MiB/second)", digits=4)
    for prefix in PREFIXES.values():
        if f"{prefix}_checkpoint_duration_mean_seconds" in found:
            lines += _checkpoint_lines(found, prefix)
    if "eval_au_percentage" in found:
        lines += _phase_lines(found, "eval", "Eval", "Eval Throughput (MiB/second)", digits=6)
    return [*lines, _RULE]


def _phase_metrics(figures: PhaseFigures, prefix: str) -> dict[str, Any]:
    au, rate, io = figures.au_compat_percent, figures.samples_per_s_compat, figures.io_compat_mib_per_s
    return {
        f"{prefix}_au_percentage": [epoch.au_compat_percent for epoch in figures.epochs],
        f"{prefix}_au_mean_percentage": au.mean,
        f"{prefix}_au_meet_expectation": "success" if figures.meets_threshold else "fail",
        f"{prefix}_au_stdev_percentage": au.stdev,
        f"{prefix}_throughput_samples_per_second": [epoch.samples_per_s_compat for epoch in figures.epochs],
        f"{prefix}_throughput_mean_samples_per_second": rate.mean,
        f"{prefix}_throughput_stdev_samples_per_second": rate.stdev,
        f"{prefix}_io_mean_MB_per_second": io.mean,
        f"{prefix}_io_stdev_MB_per_second": io.stdev,
    }


def _checkpoint_metrics(run: DlioOutputs, kind: SpanKind) -> dict[str, Any]:
    found = slowest_checkpoints(run.ranks, kind)
    if not found:
        return {}
    rate = mean_of([checkpoint.gib_per_s for checkpoint in found])
    duration = mean_of([checkpoint.duration_s for checkpoint in found])
    prefix = f"{PREFIXES[kind]}_checkpoint"
    return {
        f"{prefix}_io_mean_GB_per_second": rate.mean,
        f"{prefix}_io_stdev_GB_per_second": rate.stdev,
        f"{prefix}_duration_mean_seconds": duration.mean,
        f"{prefix}_duration_stdev_seconds": duration.stdev,
        "checkpoint_size_GB": found[0].size_bytes / GIB,
    }


def _phase_lines(
    found: Mapping[str, Any], prefix: str, title: str, io_title: str, *, digits: int
) -> list[str]:
    def line(name: str, key: str, unit: str, places: int) -> str:
        mean, stdev = found[f"{prefix}_{key}_mean_{unit}"], found[f"{prefix}_{key}_stdev_{unit}"]
        return f"[METRIC] {name}: {mean:.{places}f} ({stdev:.{places}f})"

    return [
        line(f"{title} Accelerator Utilization [AU] (%)", "au", "percentage", 4),
        line(f"{title} Throughput (samples/second)", "throughput", "samples_per_second", digits),
        line(io_title, "io", "MB_per_second", digits),
        f"[METRIC] {prefix}_au_meet_expectation: {found[f'{prefix}_au_meet_expectation']}",
    ]


def _checkpoint_lines(found: Mapping[str, Any], prefix: str) -> list[str]:
    key = f"{prefix}_checkpoint"
    duration = (found[f"{key}_duration_mean_seconds"], found[f"{key}_duration_stdev_seconds"])
    rate = (found[f"{key}_io_mean_GB_per_second"], found[f"{key}_io_stdev_GB_per_second"])
    return [
        "[METRIC] Checkpoint {} duration (seconds): {:.4f} ({:.4f})".format(prefix, *duration),
        "[METRIC] Checkpoint {} I/O Throughput (GiB/second): {:.4f} ({:.4f})".format(prefix, *rate),
    ]
