"""`R_output.json` and `R_per_epoch_stats.json`: one rank's steps, blocks and epochs in DLIO's form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.results.dlio.run import GIB, PREFIXES, checkpoints, dlio_date
from penstock.results.events import Phase, SpanKind, compute_ns, wait_ns
from penstock.results.utilization import compat_block_rate, rule_for

if TYPE_CHECKING:
    from penstock.results.dlio.run import CheckpointSizes, DlioRun
    from penstock.results.events import Block, Nanoseconds, RankClock, RankEvents, SpanEvent


def rank_output(run: DlioRun, rank: RankEvents) -> dict[str, Any]:
    """The content of `R_output.json`: every step's times, and each block's figures."""
    host = run.host_of(rank)
    epochs = {str(span.epoch): _epoch_output(run, rank, span) for span in rank.spans_of(SpanKind.EPOCH)}
    return {
        "host_memory_GB": host.memory_bytes / GIB,
        "host_cpu_count": host.num_cores,
        "host_processor_name": host.machine,
        "potential_caching": run.may_cache(host),
        "host_cpuinfo": dict(host.cpuinfo),
        "host_meminfo": dict(host.meminfo),
        "hostname": host.host,
        **epochs,
    }


def rank_per_epoch_stats(rank: RankEvents, sizes: CheckpointSizes) -> dict[str, Any]:
    """The content of `R_per_epoch_stats.json`: when epochs, blocks and checkpoints began and ended.

    As in DLIO durations are text, but those of checkpoints are numbers.
    """
    clock = rank.clock
    stats: dict[str, Any] = {}
    for span in rank.spans_of(SpanKind.EPOCH):
        stats[str(span.epoch)] = {
            **_dates(clock, span.start_ns, span.end_ns),
            **{
                key: _dates(clock, block.start_ns, block.end_ns)
                for key, _, block in _blocks(rank, span.epoch)
            },
        }
    for kind, prefix in PREFIXES.items():
        for checkpoint in checkpoints(rank, kind, sizes):
            span = checkpoint.span
            entry = _dates(clock, span.start_ns, span.end_ns)
            entry |= {"duration": checkpoint.duration_s, "throughput": checkpoint.gib_per_s}
            stats.setdefault(str(span.epoch), {})[f"{prefix}_ckpt{span.block}"] = entry
    return stats


def _epoch_output(run: DlioRun, rank: RankEvents, span: SpanEvent) -> dict[str, Any]:
    load: dict[str, list[float]] = {}
    proc: dict[str, list[float]] = {}
    compute: dict[str, list[float]] = {}
    throughput: dict[str, float] = {}
    au: dict[str, float] = {}
    for key, phase, block in _blocks(rank, span.epoch):
        waited, computed = wait_ns(block.steps), compute_ns(block.steps)
        load[key], proc[key], compute[key] = map(_seconds, (waited, waited + computed, computed))
        rate = compat_block_rate(block, rule_for(run.workload, num_ranks=len(run.ranks), phase=phase), phase)
        throughput[key], au[key] = rate.samples_per_s, rate.au_percent
    return {
        "start": dlio_date(rank.clock.date(span.start_ns)),
        "end": dlio_date(rank.clock.date(span.end_ns)),
        "load": load,
        "proc": proc,
        "compute": compute,
        "throughput": throughput,
        "au": au,
        "host_meminfo": dict(run.host_of(rank).meminfo),
    }


def _blocks(rank: RankEvents, epoch: int) -> Iterator[tuple[str, Phase, Block]]:
    """An epoch's blocks by DLIO's names: block1, block2, ..., eval."""
    for block in rank.blocks(Phase.TRAIN, epoch):
        yield f"block{block.number}", Phase.TRAIN, block
    for block in rank.blocks(Phase.EVAL, epoch):
        yield "eval", Phase.EVAL, block


def _dates(clock: RankClock, start_ns: int, end_ns: int) -> dict[str, Any]:
    return {
        "start": dlio_date(clock.date(start_ns)),
        "end": dlio_date(clock.date(end_ns)),
        "duration": f"{(end_ns - start_ns) / 1e9:.2f}",
    }


def _seconds(times_ns: Nanoseconds) -> list[float]:
    seconds: list[float] = (times_ns / 1e9).tolist()
    return seconds
