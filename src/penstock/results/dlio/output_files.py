"""Everything that DLIO leaves in its output folder, written from a finished run on rank 0.

`R_output.json` and `R_per_epoch_stats.json` have rank R's steps, blocks and epochs; `summary.json` and the
log have the figures of the run; `.hydra/` has the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from penstock.results.dlio.metrics_summary import (
    GIB,
    PREFIXES,
    checkpoint_sizes,
    checkpoints,
    dlio_date,
    metric_lines,
    summary,
)
from penstock.results.published_files import write_json, write_text
from penstock.results.run_folder import SUMMARY_FILE
from penstock.results.run_record import workload_values
from penstock.results.step_events import SpanKind, StepPhase, compute_ns, wait_ns
from penstock.results.utilization import choose_window, compat_block_rate

if TYPE_CHECKING:
    from penstock.results.dlio.metrics_summary import CheckpointSizes, DlioOutputs
    from penstock.results.step_events import Nanoseconds, RankClock, RankEvents, SpanEvent, StepBlock
    from penstock.results.utilization import EpochRate
    from penstock.workload.spec import Workload


def rank_output(run: DlioOutputs, rank: RankEvents) -> dict[str, Any]:
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


def _epoch_output(run: DlioOutputs, rank: RankEvents, span: SpanEvent) -> dict[str, Any]:
    load: dict[str, list[float]] = {}
    proc: dict[str, list[float]] = {}
    compute: dict[str, list[float]] = {}
    throughput: dict[str, float] = {}
    au: dict[str, float] = {}
    for key, phase, block in _blocks(rank, span.epoch):
        waited, computed = wait_ns(block.steps), compute_ns(block.steps)
        load[key], proc[key], compute[key] = map(_seconds, (waited, waited + computed, computed))
        rate = compat_block_rate(
            block, choose_window(run.workload, num_ranks=len(run.ranks), phase=phase), phase
        )
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


def _blocks(rank: RankEvents, epoch: int) -> Iterator[tuple[str, StepPhase, StepBlock]]:
    """An epoch's blocks by DLIO's names: block1, block2, ..., eval."""
    for block in rank.blocks(StepPhase.TRAIN, epoch):
        yield f"block{block.number}", StepPhase.TRAIN, block
    for block in rank.blocks(StepPhase.EVAL, epoch):
        yield "eval", StepPhase.EVAL, block


def _dates(clock: RankClock, start_ns: int, end_ns: int) -> dict[str, Any]:
    return {
        "start": dlio_date(clock.date(start_ns)),
        "end": dlio_date(clock.date(end_ns)),
        "duration": f"{(end_ns - start_ns) / 1e9:.2f}",
    }


def _seconds(times_ns: Nanoseconds) -> list[float]:
    seconds: list[float] = (times_ns / 1e9).tolist()
    return seconds


HYDRA_FOLDER: Final = ".hydra"


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraFacts:
    """What the sub-folder of configuration tells: DLIO's words, and where the run wrote.

    `overrides` are redacted words such as `++workload.dataset.num_files_train=42`. Without a `subfolder`
    ("") nothing of it is written.
    """

    subfolder: str = HYDRA_FOLDER
    workload_name: str
    overrides: Sequence[str] = ()
    working_folder: str
    run_folder: str


def write_dlio_files(
    folder: Path, run: DlioOutputs, hydra: HydraFacts, *, log_before: Sequence[str] = ()
) -> list[str]:
    """Write the whole set into `folder`; the `[METRIC]` lines, which are in the log as well.

    `log_before` are the log's lines about what was done before the run.
    """
    found = summary(run)
    lines = metric_lines(found)
    write_configuration(folder, run.workload, hydra)
    sizes = checkpoint_sizes(run.ranks)
    for rank in run.ranks:
        number = rank.clock.rank
        write_json(folder, f"{number}_output.json", rank_output(run, rank))
        write_json(folder, f"{number}_per_epoch_stats.json", rank_per_epoch_stats(rank, sizes))
    write_log(folder, run.workload, [*log_before, *_log(run, lines)])
    write_json(folder, SUMMARY_FILE, found)
    return lines


def write_configuration(folder: Path, workload: Workload, hydra: HydraFacts) -> None:
    """Write the sub-folder of configuration alone."""
    if hydra.subfolder:
        for name, text in _configuration(workload, hydra).items():
            write_text(folder / hydra.subfolder, name, text)


def write_log(folder: Path, workload: Workload, lines: Sequence[str]) -> None:
    """Write the log alone, under the name that the workload gives it."""
    write_text(folder, workload.output.log_file, "".join(f"{line}\n" for line in lines))


def log_line(moment: datetime, text: str) -> str:
    """One line of the log, as DLIO dates it."""
    return f"[OUTPUT] {dlio_date(moment)} {text}"


def _configuration(workload: Workload, hydra: HydraFacts) -> dict[str, str]:
    task = [f"workload={hydra.workload_name}", *hydra.overrides]
    tree = {
        "hydra": {
            "run": {"dir": hydra.run_folder},
            "mode": "RUN",
            "output_subdir": hydra.subfolder,
            "overrides": {
                "hydra": [f"hydra.run.dir={hydra.run_folder}", f"hydra.output_subdir={hydra.subfolder}"],
                "task": task,
            },
            "job": {"name": "main", "config_name": "config", "override_dirname": ",".join(sorted(task))},
            "runtime": {
                "cwd": hydra.working_folder,
                "output_dir": hydra.run_folder,
                "choices": {"workload": hydra.workload_name},
            },
        }
    }
    return {
        "config.yaml": _dump_yaml({"workload": workload_values(workload)}),
        "overrides.yaml": _dump_yaml(task),
        "hydra.yaml": _dump_yaml(tree),
    }


def _log(run: DlioOutputs, lines: Sequence[str]) -> Iterator[str]:
    """What DLIO tells while it runs, told afterwards from rank 0's events."""
    first = run.ranks[0]
    yield log_line(run.started, f"Running with {len(run.ranks)} process(es)")
    for phase, title in ((StepPhase.TRAIN, "Training"), (StepPhase.EVAL, "Evaluation")):
        figures = run.figures(phase)
        for epoch in figures.epochs if figures else ():
            blocks = first.blocks(phase, epoch.epoch)
            date = first.clock.date(blocks[-1].end_ns)
            num_steps = sum(len(block.steps) for block in blocks)
            yield from (log_line(date, text) for text in _epoch_texts(epoch, title, num_steps))
    for kind, verb in ((SpanKind.SAVE, "Saved"), (SpanKind.LOAD, "Loaded")):
        for span in first.spans_of(kind):
            date, elapsed_s = first.clock.date(span.end_ns), (span.end_ns - span.start_ns) / 1e9
            yield log_line(
                date, f"{verb} the checkpoint of epoch {span.epoch}, step {span.step} in {elapsed_s:.4f} s"
            )
    yield from lines


def _epoch_texts(epoch: EpochRate, title: str, num_steps: int) -> tuple[str, ...]:
    return (
        f"Ending epoch {epoch.epoch} [{title}] - {num_steps} steps completed in {epoch.elapsed_s:.2f} s",
        f"Epoch {epoch.epoch} [{title}] Accelerator Utilization [AU] (%): {epoch.au_compat_percent:.4f}",
        f"Epoch {epoch.epoch} [{title}] Throughput (samples/second): {epoch.samples_per_s_compat:.4f}",
    )


def _dump_yaml(document: Any) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False)
    return text
