"""Write all files of DLIO's output folder from a finished run, on rank 0.

`R_output.json` and `R_per_epoch_stats.json` have rank R's steps, blocks and epochs; `summary.json` and the
log have the figures of the run; `.hydra/` has the configuration.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.results.counter_files import COUNTERS_FILE, read_counters, read_series
from penstock.results.phase_figures import PhaseFigures, choose_window, compat_block_rate, mean_and_stdev
from penstock.results.provenance import HostFacts
from penstock.results.published_files import write_json, write_text
from penstock.results.run_folder import SUMMARY_FILE
from penstock.results.step_events import (
    RankEvents,
    SpanEvent,
    SpanKind,
    SpanPlace,
    StepBlock,
    StepPhase,
    compute_ns,
    wait_ns,
)
from penstock.workload.sizing import record_bytes
from penstock.workload.spec import Workload, write_workload

logger = logging.getLogger(__name__)

GIB = 2**30
PREFIXES = {SpanKind.SAVE: "save", SpanKind.LOAD: "load"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DlioOutputs:
    """A finished run. `hosts` has one entry per node, that of rank 0 first. Dates are in UTC."""

    workload: Workload
    ranks: Sequence[RankEvents]
    hosts: Sequence[HostFacts]
    started: datetime
    ended: datetime
    train: PhaseFigures | None
    evaluation: PhaseFigures | None
    preparation: Sequence[str] = ()
    """Log lines about the work before the first epoch and between epochs, and its duration."""

    @property
    def data_gib_per_host(self) -> float:
        """The training data's nominal size divided by the number of hosts."""
        dataset = self.workload.dataset
        num_samples = dataset.num_files_train * dataset.num_samples_per_file
        return float(num_samples * record_bytes(dataset)) / GIB / len(self.hosts)

    def may_cache(self, host: HostFacts) -> int:
        """Return DLIO's `potential_caching`: 1 if a host's share of the data fits into its memory, else 0."""
        return int(self.data_gib_per_host < host.memory_bytes / GIB)


CheckpointSizes = Mapping[SpanPlace, int]
"""The bytes of each checkpoint over all ranks."""


def checkpoint_sizes(ranks: Sequence[RankEvents]) -> CheckpointSizes:
    sizes: Counter[SpanPlace] = Counter()
    for rank in ranks:
        for span in rank.spans_of(*PREFIXES):
            sizes[span.place] += span.size_bytes
    return sizes


def _checkpoint_rate(span: SpanEvent, sizes: CheckpointSizes) -> float:
    """Return all ranks' GiB of a checkpoint divided by one rank's seconds."""
    return sizes[span.place] / GIB / span.elapsed_s if span.elapsed_s > 0 else 0.0


def dlio_date(moment: datetime) -> str:
    """Format a date as DLIO does: ISO 8601 to the microsecond, without a time zone."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f")


_RULE = "[METRIC] =========================================================="


def summary(run: DlioOutputs) -> dict[str, Any]:
    """Return the content of `summary.json`. Per-host lists have one entry per node."""
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
    """Return the section `metric`. Phases that did not run have no keys."""
    values: dict[str, Any] = {}
    for figures, prefix in ((run.train, "train"), (run.evaluation, "eval")):
        if figures is None:
            continue
        au, rate, io = figures.au_compat_percent, figures.samples_per_s_compat, figures.io_compat_mib_per_s
        rates = [epoch.samples_per_s_compat for epoch in figures.epochs]
        values |= {
            f"{prefix}_au_percentage": [epoch.au_compat_percent for epoch in figures.epochs],
            f"{prefix}_au_mean_percentage": au.mean,
            f"{prefix}_au_meet_expectation": "success" if figures.meets_threshold else "fail",
            f"{prefix}_au_stdev_percentage": au.stdev,
            f"{prefix}_throughput_samples_per_second": rates,
            f"{prefix}_throughput_mean_samples_per_second": rate.mean,
            f"{prefix}_throughput_stdev_samples_per_second": rate.stdev,
            f"{prefix}_io_mean_MB_per_second": io.mean,
            f"{prefix}_io_stdev_MB_per_second": io.stdev,
        }
    sizes = checkpoint_sizes(run.ranks)
    for kind, prefix in PREFIXES.items():
        # A checkpoint takes as long as its slowest rank, because it is done only when all ranks are.
        # DLIO takes rank 0's time, which hides every slower rank unless `rank_sync` makes rank 0 wait for
        # them.
        slowest: dict[SpanPlace, SpanEvent] = {}
        for span in (span for rank in run.ranks for span in rank.spans_of(kind)):
            slowest[span.place] = max(slowest.get(span.place, span), span, key=attrgetter("elapsed_s"))
        if slowest:
            duration = mean_and_stdev([span.elapsed_s for span in slowest.values()])
            speed = mean_and_stdev([_checkpoint_rate(span, sizes) for span in slowest.values()])
            values |= {
                f"{prefix}_checkpoint_io_mean_GB_per_second": speed.mean,
                f"{prefix}_checkpoint_io_stdev_GB_per_second": speed.stdev,
                f"{prefix}_checkpoint_duration_mean_seconds": duration.mean,
                f"{prefix}_checkpoint_duration_stdev_seconds": duration.stdev,
                "checkpoint_size_GB": sizes[next(iter(slowest))] / GIB,
            }
    return values


_METRICS: Final = (
    ("Training Accelerator Utilization [AU] (%)", "train_au_{}_percentage", ".4f"),
    ("Training Throughput (samples/second)", "train_throughput_{}_samples_per_second", ".4f"),
    ("Training I/O Throughput (MiB/second)", "train_io_{}_MB_per_second", ".4f"),
    ("train_au_meet_expectation", "train_au_meet_expectation", ""),
    ("Checkpoint save duration (seconds)", "save_checkpoint_duration_{}_seconds", ".4f"),
    ("Checkpoint save I/O Throughput (GiB/second)", "save_checkpoint_io_{}_GB_per_second", ".4f"),
    ("Checkpoint load duration (seconds)", "load_checkpoint_duration_{}_seconds", ".4f"),
    ("Checkpoint load I/O Throughput (GiB/second)", "load_checkpoint_io_{}_GB_per_second", ".4f"),
    ("Eval Accelerator Utilization [AU] (%)", "eval_au_{}_percentage", ".4f"),
    ("Eval Throughput (samples/second)", "eval_throughput_{}_samples_per_second", ".6f"),
    ("Eval Throughput (MiB/second)", "eval_io_{}_MB_per_second", ".6f"),
    ("eval_au_meet_expectation", "eval_au_meet_expectation", ""),
)
"""DLIO's titles of its metrics, their keys with a place for `mean` and `stdev`, and the format of numbers."""


def metric_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the lines that DLIO prints at the end of a run, and that other programs parse."""
    values = document["metric"]
    lines = [_RULE, f"[METRIC] Number of Simulated Accelerators: {document['num_accelerators']} "]
    for title, key, digits in _METRICS:
        mean, stdev = (values.get(key.format(kind)) for kind in ("mean", "stdev"))
        if mean is not None:
            text = f"{mean:{digits}} ({stdev:{digits}})" if digits else mean
            lines.append(f"[METRIC] {title}: {text}")
    return [*lines, _RULE]


def rank_output(run: DlioOutputs, rank: RankEvents) -> dict[str, Any]:
    """Return the content of `R_output.json`: the times of every step, and the figures of each block."""
    host = next((host for host in run.hosts if host.host == rank.clock.host), run.hosts[0])
    epochs = {}
    for span in rank.spans_of(SpanKind.EPOCH):
        columns: dict[str, dict[str, Any]] = {
            name: {} for name in ("load", "proc", "compute", "throughput", "au")
        }
        for key, phase, block in _blocks(rank, span.epoch):
            waited, computed = wait_ns(block.steps), compute_ns(block.steps)
            for name, times in (("load", waited), ("proc", waited + computed), ("compute", computed)):
                columns[name][key] = (times / 1e9).tolist()
            window = choose_window(run.workload, num_ranks=len(run.ranks), phase=phase)
            columns["au"][key], columns["throughput"][key] = compat_block_rate(block, window, phase)
        epochs[str(span.epoch)] = {
            "start": dlio_date(rank.clock.date(span.start_ns)),
            "end": dlio_date(rank.clock.date(span.end_ns)),
            **columns,
            "host_meminfo": dict(host.meminfo),
        }
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
    """Return the content of `R_per_epoch_stats.json`: when epochs, blocks and checkpoints began and ended.

    As in DLIO, durations are strings, except for checkpoints, where they are numbers.
    """
    clock = rank.clock

    def dates(start_ns: int, end_ns: int) -> dict[str, Any]:
        return {
            "start": dlio_date(clock.date(start_ns)),
            "end": dlio_date(clock.date(end_ns)),
            "duration": f"{(end_ns - start_ns) / 1e9:.2f}",
        }

    stats: dict[str, Any] = {}
    for span in rank.spans_of(SpanKind.EPOCH):
        stats[str(span.epoch)] = {
            **dates(span.start_ns, span.end_ns),
            **{key: dates(block.start_ns, block.end_ns) for key, _, block in _blocks(rank, span.epoch)},
        }
    for kind, prefix in PREFIXES.items():
        for span in rank.spans_of(kind):
            entry = dates(span.start_ns, span.end_ns)
            entry |= {"duration": span.elapsed_s, "throughput": _checkpoint_rate(span, sizes)}
            stats.setdefault(str(span.epoch), {})[f"{prefix}_ckpt{span.block}"] = entry
    return stats


def _blocks(rank: RankEvents, epoch: int) -> Iterator[tuple[str, StepPhase, StepBlock]]:
    """Yield an epoch's blocks, named as in DLIO: block1, block2, ..., eval."""
    for block in rank.blocks(StepPhase.TRAIN, epoch):
        yield f"block{block.number}", StepPhase.TRAIN, block
    for block in rank.blocks(StepPhase.EVAL, epoch):
        yield "eval", StepPhase.EVAL, block


HYDRA_FOLDER: Final = ".hydra"


def write_dlio_files(
    folder: Path,
    run: DlioOutputs,
    *,
    overrides: Sequence[str] = (),
    subfolder: str = HYDRA_FOLDER,
    log_before: Sequence[str] = (),
) -> list[str]:
    """Write all files into `folder`; return the `[METRIC]` lines, which are also in the log.

    `log_before` has the log's lines from before the run.
    """
    document = summary(run)
    lines = metric_lines(document)
    write_configuration(folder, run.workload, overrides, subfolder=subfolder, run_folder=folder)
    sizes = checkpoint_sizes(run.ranks)
    for rank in run.ranks:
        number = rank.clock.rank
        write_json(folder, f"{number}_output.json", rank_output(run, rank))
        write_json(folder, f"{number}_per_epoch_stats.json", rank_per_epoch_stats(rank, sizes))
    write_log(folder, run.workload, [*log_before, *_log(run, lines)])
    write_json(folder, SUMMARY_FILE, document)
    return lines


def write_configuration(
    folder: Path, workload: Workload, overrides: Sequence[str], *, subfolder: str, run_folder: Path
) -> None:
    """Write the configuration of a run into the folder `subfolder`; if that is "", write nothing.

    If `folder` is a draft, it will become `run_folder`. `overrides` have no secrets, and use DLIO's names,
    such as `++workload.dataset.num_files_train=42`.
    """
    if not subfolder:
        return
    task = [f"workload={workload.full_name}", *overrides]
    tree = {
        "hydra": {
            "run": {"dir": str(run_folder)},
            "mode": "RUN",
            "output_subdir": subfolder,
            "overrides": {
                "hydra": [f"hydra.run.dir={run_folder}", f"hydra.output_subdir={subfolder}"],
                "task": task,
            },
            "job": {"name": "main", "config_name": "config", "override_dirname": ",".join(sorted(task))},
            "runtime": {
                "cwd": str(Path.cwd()),
                "output_dir": str(run_folder),
                "choices": {"workload": workload.full_name},
            },
        }
    }
    documents = {
        "config.yaml": {"workload": write_workload(workload, only_set=True)},
        "overrides.yaml": task,
        "hydra.yaml": tree,
    }
    for name, document in documents.items():
        # As part of the key, because links in the root are refused if they lead out of it.
        write_text(folder, f"{Path(subfolder)}/{name}", yaml.safe_dump(document, sort_keys=False))


def write_log(folder: Path, workload: Workload, lines: Sequence[str]) -> None:
    """Write only the log, under the name that the workload sets."""
    write_text(folder, workload.output.log_file, "".join(f"{line}\n" for line in lines))


def log_line(moment: datetime, text: str) -> str:
    """Format one line of the log, with the date as DLIO writes it."""
    return f"[OUTPUT] {dlio_date(moment)} {text}"


def _log(run: DlioOutputs, lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines that DLIO logs while it runs, from rank 0's events. Other programs parse them."""
    first = run.ranks[0]
    yield log_line(run.started, f"Running with {len(run.ranks)} process(es)")
    yield from (log_line(run.started, text) for text in run.preparation)
    dated: list[tuple[int, str]] = []

    def end(what: str, num_steps: int, start_ns: int, end_ns: int) -> None:
        seconds = (end_ns - start_ns) / 1e9
        dated.append((end_ns, f"Ending {what} - {num_steps} steps completed in {seconds:.2f} s"))

    for span in first.spans_of(SpanKind.EPOCH):
        epoch, train = span.epoch, first.blocks(StepPhase.TRAIN, span.epoch)
        num_steps = sum(len(block.steps) for block in train)
        dated.append((span.start_ns, f"Starting epoch {epoch}: {num_steps} steps expected"))
        for block in train:
            dated.append((block.start_ns, f"Starting block {block.number}"))
            end(f"block {block.number}", len(block.steps), block.start_ns, block.end_ns)
            title = f"Epoch {epoch} - Block {block.number} [Training]"
            dated += [(block.end_ns, text) for text in _rate_lines(run, block, StepPhase.TRAIN, title)]
        if train:
            end(f"epoch {epoch}", num_steps, train[0].start_ns, train[-1].end_ns)
        for block in first.blocks(StepPhase.EVAL, epoch):
            dated.append((block.start_ns, f"Starting eval - {len(block.steps)} steps expected"))
            end("eval", len(block.steps), block.start_ns, block.end_ns)
            title = f"Epoch {epoch} [Eval]"
            dated += [(block.end_ns, text) for text in _rate_lines(run, block, StepPhase.EVAL, title)]
    sizes = checkpoint_sizes(run.ranks)
    for kind, doing in ((SpanKind.SAVE, "saving"), (SpanKind.LOAD, "loading")):
        for span in first.spans_of(kind):
            which = f"checkpoint {span.block}"
            begun = f"Starting {doing} {which} after total step {span.step} for epoch {span.epoch}"
            done = f"Finished {doing} {which} for epoch {span.epoch} in {span.elapsed_s:.4f} s; "
            done += f"Throughput: {_checkpoint_rate(span, sizes):.4f} GiB/s"
            dated += [(span.start_ns, begun), (span.end_ns, done)]
    # Sorting is stable, so lines with the same time keep their order.
    for moment_ns, text in sorted(dated, key=lambda line: line[0]):
        yield log_line(first.clock.date(moment_ns), text)
    yield from lines


def _rate_lines(run: DlioOutputs, block: StepBlock, phase: StepPhase, title: str) -> Iterator[str]:
    """Yield DLIO's lines about rates: rank 0's utilization, and its throughput times the number of ranks."""
    window = choose_window(run.workload, num_ranks=len(run.ranks), phase=phase)
    au_percent, samples_per_s = compat_block_rate(block, window, phase)
    yield f"{title} Accelerator Utilization [AU] (%): {au_percent:.4f}"
    yield f"{title} Throughput (samples/second): {samples_per_s * len(run.ranks):.4f}"
    if phase is StepPhase.TRAIN:
        end = window.num_steps - window.exclude_end_steps
        counted_s = compute_ns(block.steps)[window.exclude_start_steps : end] / 1e9
        computed = f"{counted_s.mean():.4f}+/-{counted_s.std():.4f}" if len(counted_s) else "n/a+/-n/a"
        asked = run.workload.train.computation_time.expected_s
        yield f"{title} Computation time per step (second): {computed} (set value: {asked:g})"


# iostat.json: the counters of rank 0's host, second by second, under sysstat's names. DLIO starts `iostat
# -mdxtcy -o JSON 1`; here the samples that every run keeps are converted.

IOSTAT_FILE: Final = "iostat.json"
_SHORTEST: Final = 0.9
"""A sample that follows sooner than this share of the interval is merged into the next report."""
_DAY: Final = "%m/%d/%y"
_CPU: Final = ("user", "nice", "system", "iowait", "steal", "idle")
_KINDS: Final = (
    ("r", "reads", "read_bytes", "merged_reads", "read_ms"),
    ("w", "writes", "written_bytes", "merged_writes", "write_ms"),
    ("d", "discards", "discarded_bytes", "merged_discards", "discard_ms"),
)
"""Each kind of request: its letter, and its counters of requests, bytes, merged requests and their time."""


def write_iostat(folder: Path, host: HostFacts, devices: Sequence[str]) -> None:
    """Write `iostat.json` for a run whose counters have been gathered.

    Without `devices`, the file has all devices except partitions.
    """
    if not (folder / COUNTERS_FILE).exists():
        logger.warning("No %s is written: the counters of no host could be read", IOSTAT_FILE)
        return
    hosts, table = read_counters(folder)
    sampled = min(hosts, key=lambda one: one.rank)
    moments, counters = read_series(table, sampled.host, from_zero=True)
    # Choose samples about an interval apart, and always the last, or the bytes of a short run would be lost.
    chosen: list[int] = []
    for place, moment in enumerate(moments):
        is_due = not chosen or moment - moments[chosen[-1]] >= _SHORTEST * sampled.interval_s * 1e9
        if is_due or place == len(moments) - 1:
            chosen.append(place)

    def date(place: int) -> datetime:
        return datetime.fromtimestamp(
            (sampled.wall_ns + int(moments[place]) - sampled.monotonic_ns) / 1e9, UTC
        )

    used = {name.split(".")[1] for name in counters if name.startswith("disk.")}
    whole = sorted(name for name in used if name in sampled.drives or name.startswith(("dm-", "md")))
    reports = []
    for before, after in pairwise(chosen):
        elapsed_s = int(moments[after] - moments[before]) / 1e9
        moved = {name: int(values[after] - values[before]) for name, values in counters.items()}
        # Shares are in percent; interrupts count as the system's time, as in iostat.
        spent = {name: moved.get(f"cpu.{name}_ms", 0) for name in (*_CPU, "irq", "softirq")}
        whole_ms = sum(spent.values())
        spent["system"] += spent["irq"] + spent["softirq"]
        reports.append(
            {
                "timestamp": date(after).strftime(f"{_DAY} %H:%M:%S"),
                "avg-cpu": {name: round(100 * spent[name] / (whole_ms or 1), 2) for name in _CPU},
                "disk": [_device(name, moved, elapsed_s) for name in devices or whole],
            }
        )
    document = {
        "nodename": host.host,
        "sysname": "Linux",
        "release": host.kernel.partition(" ")[2],
        "machine": host.machine,
        "number-of-cpus": host.num_cores,
        "date": (date(chosen[0]) if chosen else datetime.now(UTC)).strftime(_DAY),
        "statistics": reports,
    }
    write_json(folder, IOSTAT_FILE, {"sysstat": {"hosts": [document]}})


def _device(name: str, moved: Mapping[str, int], elapsed_s: float) -> dict[str, Any]:
    def count(counter: str) -> int:
        return moved.get(f"disk.{name}.{counter}", 0)

    flushes = count("flushes")
    values = {
        "f/s": flushes / elapsed_s,
        "f_await": count("flush_ms") / (flushes or 1),
        "aqu-sz": count("queued_ms") / 1000 / elapsed_s,
        "util": min(100.0, count("busy_ms") / 10 / elapsed_s),
    }
    for letter, requests, size_bytes, joined, spent_ms in _KINDS:
        done, together = count(requests), count(joined)
        values |= {
            f"{letter}/s": done / elapsed_s,
            f"{letter}MB/s": count(size_bytes) / 2**20 / elapsed_s,
            f"{letter}rqm/s": together / elapsed_s,
            f"{letter}rqm": 100 * together / (done + together or 1),
            f"{letter}_await": count(spent_ms) / (done or 1),
            f"{letter}areq-sz": count(size_bytes) / 2**10 / (done or 1),
        }
    return {"disk_device": name, **{key: round(value, 2) for key, value in values.items()}}
