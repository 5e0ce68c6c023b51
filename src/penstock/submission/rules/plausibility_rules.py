"""Cross-checks of figures: rates against accelerators, files and time, and runs against one another.

Who raises a figure has to raise all that depend on it. Every tolerance is far beyond what 660 published runs
need. Invariant: a fact that older tools do not record makes a rule not applicable, never broken.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from penstock.submission import recomputed_metrics
from penstock.submission.finding import Finding, Verdict, not_applicable, pass_if, violation
from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.recomputed_metrics import Interval, read_time
from penstock.submission.result_files import ResultDir, ResultRun
from penstock.submission.rules import rule

RATE_TOLERANCE: Final = 1.002
"""Published runs reach 99.998 % of their accelerators' rate."""
UTILIZATION_TOLERANCE: Final = 0.5
"""Percent; in published runs the utilization is never below the rate's share."""
MAX_UTILIZATION_GAP: Final = 30.0
"""Percent; in published runs at most 15.2: the time between steps counts in the rate alone."""
FILES_TOLERANCE: Final = 0.05
"""In published runs 0.01: reading starts before an epoch's clock does."""
SECONDS_TOLERANCE: Final = 1.0
_SLACK: Final = timedelta(seconds=SECONDS_TOLERANCE)
EPOCH_SECONDS_TOLERANCE: Final = 0.5
"""Marks of an epoch's begin and end are set beside those that its rate is counted by."""
_BLOCK: Final = ".block"


def _maximum_rate(case: rule.RunCase) -> float:
    """The samples a second that the accelerators of a directory could compute."""
    run, workload = case.run, case.run.config
    batch = workload.integer("workload", "reader", "batch_size")
    if workload.has("workload", "train", "computation_time", "mean"):
        step_s = workload.number("workload", "train", "computation_time", "mean")
    else:
        step_s = workload.number("workload", "train", "computation_time")
    if step_s <= 0:
        raise MissingFact("workload.train.computation_time is not positive", where=workload.file)
    return batch * run.summary.integer("num_accelerators") / step_s


rule.limit_rule(
    rule.RunCase,
    id="rates.maximum",
    title="A run reads no more samples than its accelerators can compute",
    editions=rule.ALL,
    source="ours; batch and computation time are those of the workload",
    formula="mean samples/s <= batch x accelerators / computation time, + 0.2 %",
    passes="unet3d on 2 h100: 42 samples/s of at most 7 x 2 / 0.323 s = 43.3",
    fails="the same with 48 samples/s",
    value=lambda case: recomputed_metrics.samples_per_second(case.run),
    compare="<=",
    limit=lambda case: _maximum_rate(case) * RATE_TOLERANCE,
    evidence=lambda case: case.run.summary.file,
    show="{:.6g} samples/s",
    proof=lambda case, value, _: (
        f"{value:.6g} samples/s are {value / _maximum_rate(case):.2%} of what "
        f"{case.run.summary.integer('num_accelerators')} accelerators can compute"
    ),
    fix="Hand in the summary as the benchmark wrote it.",
)


rule.limit_rule(
    rule.RunCase,
    id="utilization.maximum",
    title="Accelerators are not busy for more than all of the time",
    editions=rule.ALL,
    source="ours: the time of computation is part of the time that it is divided by",
    formula="each entry of train_au_percentage <= 100, + 0.5",
    passes="99.6 % in every epoch",
    fails="150 % in one epoch",
    value=lambda case: max(case.run.summary.numbers("metric", "train_au_percentage")),
    compare="<=",
    limit=100 + UTILIZATION_TOLERANCE,
    evidence=lambda case: case.run.summary.file,
    show="{:.6g} %",
    proof="the highest utilization of an epoch is {value:.6g} %",
    fix="Hand in the summary as the benchmark wrote it.",
)


@rule.run_rule(
    id="rates.utilization",
    title="The rate of a run is the one that its utilization says",
    editions=rule.ALL,
    source="ours: accelerators that are busy for a share of the time compute that share of the samples",
    formula=(
        "share of the accelerators' rate <= mean of train_au_percentage + 0.5; more than 30 below it, both "
        "cannot be true: not checked, since the files do not say which one is, and a warning in a warm-up"
    ),
    passes="97 % utilization, 96.9 % of the rate that the accelerators can compute",
    fails="90 % utilization, 99 % of the rate",
)
def _check_rate_against_utilization(case: rule.RunCase) -> Iterator[Finding]:
    share = 100 * recomputed_metrics.samples_per_second(case.run) / _maximum_rate(case)
    utilization = recomputed_metrics.utilization_percent(case.run)
    is_too_low = share < utilization - MAX_UTILIZATION_GAP
    yield pass_if(
        share <= utilization + UTILIZATION_TOLERANCE and not is_too_low,
        evidence=case.run.summary.file,
        value=f"{share:.6g} %",
        limit=f"{utilization:.6g} %",
        proof=f"the rate is {share:.6g} % of the accelerators', the utilization {utilization:.6g} %",
        fix=(
            "Let the reviewer see from the run's log which of the two is true."
            if is_too_low
            else "Hand in the summary as the benchmark wrote it."
        ),
        otherwise=_verdict_on_low_rate(case) if is_too_low else Verdict.FAIL,
    )


def _verdict_on_low_rate(case: rule.RunCase) -> Verdict:
    """Nobody can sign a utilization that the rate contradicts, and the files do not say why it does.

    A program that is slow to start writes such figures, too, so it is no failure. A warm-up is in no mean.
    """
    return Verdict.WARNING if case.is_warm_up else Verdict.NOT_CHECKED


def _epochs(case: rule.RunCase) -> list[ParsedFile] | None:
    """The statistics of each training epoch, in order; None if the run has no such file."""
    stats = case.run.epochs
    if stats.is_missing:
        return None
    content = stats.value()
    epochs = content if isinstance(content, dict) else {}
    return [
        ParsedFile(file=stats.file, content=epoch)
        for _, epoch in sorted(epochs.items(), key=lambda item: (len(str(item[0])), str(item[0])))
    ]


def _seconds_of_blocks(epoch: ParsedFile) -> float:
    """The time of the parts of an epoch between which checkpoints may lie."""
    return sum(
        (_moment(epoch, record["end"]) - _moment(epoch, record["start"])).total_seconds()
        for name, record in _timed_records({"": epoch.value()})
        if name.startswith(_BLOCK)
    )


def _interval(record: ParsedFile) -> Interval:
    return Interval(begin=read_time(record, "start"), end=read_time(record, "end"))


_NO_STATISTICS: Final = "the run has no per_epoch_stats.json"


@rule.run_rule(
    id="epochs.recorded",
    title="The statistics have every epoch that the summary has a rate of",
    editions=rule.ALL,
    source="ours: both are written by the same program, from the same epochs",
    formula="epochs of per_epoch_stats.json == entries of train_throughput_samples_per_second",
    passes="5 rates, and epochs 1 to 5",
    fails="5 rates, and a file without epochs",
)
def _check_epochs(case: rule.RunCase) -> Iterator[Finding]:
    epochs = _epochs(case)
    if epochs is None:
        yield not_applicable(case.name, _NO_STATISTICS)
        return
    rates = case.run.summary.numbers("metric", "train_throughput_samples_per_second")
    yield pass_if(
        len(epochs) == len(rates),
        evidence=case.run.epochs.file,
        value=f"{len(epochs)} epochs",
        limit=f"{len(rates)} epochs",
        proof=f"the statistics have {len(epochs)} epochs, the summary has rates of {len(rates)}",
        fix="Hand in the statistics as the benchmark wrote them.",
    )


@rule.run_rule(
    id="rates.files",
    title="Rate and time of each epoch come to the samples of the data set",
    editions=rule.ALL,
    source="ours; runs of several clients, which share the samples, are left out",
    formula=(
        "samples/s x seconds of the epoch's blocks == files x samples a file, +- 5 % and 0.5 s; an epoch "
        "that reads less is a warning"
    ),
    passes="28,000 files in 85 s at 329.4 samples/s",
    fails="the same at 494 samples/s",
)
def _check_rates_against_files(case: rule.RunCase) -> Iterator[Finding]:
    epochs, run = _epochs(case), case.run
    is_alone = any(each.dirs == (run,) for each in case.result.runs)
    if epochs is None or not is_alone:
        yield not_applicable(case.name, _NO_STATISTICS if epochs is None else "several clients ran")
        return
    total = run.summary.integer("num_files_train") * run.summary.integer("num_samples_per_file")
    rates = run.summary.numbers("metric", "train_throughput_samples_per_second")
    if total < 1:
        raise MissingFact("there are no samples", where=run.summary.file)
    shares = [
        (rate * _seconds_of_blocks(epoch) / total, rate) for rate, epoch in zip(rates, epochs, strict=False)
    ]
    if not shares:
        yield not_applicable(case.name, "there is no epoch with a rate")
        return
    worst, rate = max(shares, key=lambda share: abs(share[0] - 1))
    yield pass_if(
        abs(worst - 1) <= FILES_TOLERANCE + EPOCH_SECONDS_TOLERANCE * rate / total,
        evidence=run.epochs.file,
        value=f"{worst * total:,.0f} samples",
        limit=f"{total:,} samples",
        proof=(
            f"epoch {shares.index((worst, rate)) + 1}: samples/s x its seconds are {worst:.2%} of the "
            f"{total:,} samples of the data set"
        ),
        fix="Hand in summary and statistics of one run, as the benchmark wrote them.",
        otherwise=Verdict.FAIL if worst > 1 else Verdict.WARNING,
    )


@rule.run_rule(
    id="times.recorded",
    title="Durations are those between start and end, and all that is recorded lies within the run",
    editions=rule.ALL,
    benchmarks=rule.BOTH,
    source="ours: start, end and duration are written by one clock",
    formula=(
        "end >= start; |duration - (end - start)| <= 0.02 s + 0.1 % of each block and checkpoint; the blocks "
        "of an epoch <= its duration <= end - start, with the same tolerance; epochs lie within the "
        "summary's start and end (+ 1 s); a summary that spans more than the tool's runtime is a warning"
    ),
    passes='start 10:00:00, end 10:01:25, duration "85.00"',
    fails="a checkpoint of 10 s whose duration is 5",
)
def _check_times(case: rule.RunCase) -> Iterator[Finding]:
    problems = list(_find_time_problems(case))
    for file, problem in problems[:MAX_PROBLEMS]:
        yield violation(
            evidence=file, proof=problem, fix="Hand in the files of one run, as the benchmark wrote them."
        )
    runtime = case.run.metadata
    if not problems and runtime.has("runtime"):
        spanned_s, runtime_s = _interval(case.run.summary).duration_s, runtime.number("runtime")
        yield pass_if(
            spanned_s <= runtime_s + SECONDS_TOLERANCE,
            evidence=runtime.file,
            value=f"{spanned_s:g} s",
            limit=f"{runtime_s:g} s",
            proof=f"the tool ran for {runtime_s:g} s, the summary spans {spanned_s:g} s",
            fix="Let the reviewer compare the clocks.",
            otherwise=Verdict.WARNING,
        )
    elif not problems:
        yield Finding(verdict=Verdict.PASS, evidence=case.run.summary.file, proof="all times agree")


MAX_PROBLEMS: Final = 3
"""One lie about time shows in many records."""


def _find_time_problems(case: rule.RunCase) -> Iterator[tuple[str, str]]:
    run = case.run
    whole = _interval(run.summary)
    if whole.duration_s < 0:
        yield run.summary.file, f"end {run.summary.text('end')} is before start {run.summary.text('start')}"
        return
    for stats in run.stats or (run.epochs,):
        if not stats.is_missing:
            yield from _find_record_problems(stats, whole)


def _find_record_problems(stats: ParsedFile, whole: Interval) -> Iterator[tuple[str, str]]:
    """Of one rank's statistics, whose clock is the summary's if it is the first rank."""
    has_its_clock = stats.file.rpartition("/")[2] in _FIRST_RANK
    for name, record in _timed_records(stats.value()):
        begin, end = _moment(stats, record["start"]), _moment(stats, record["end"])
        spanned_s = (end - begin).total_seconds()
        if "duration" in record and (problem := _find_wrong_duration(name, record, stats.file, spanned_s)):
            yield stats.file, f"{name}: {problem}"
        if has_its_clock and (begin < whole.begin - _SLACK or end > whole.end + _SLACK):
            outside = max(whole.begin - begin, end - whole.end)
            yield stats.file, f"{name} lies {outside.total_seconds():.6g} s outside of the run"


def _moment(stats: ParsedFile, text: Any) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return read_time(ParsedFile(file=stats.file, content={"start or end": text}), "start or end")
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


_FIRST_RANK: Final = frozenset({"per_epoch_stats.json", "0_per_epoch_stats.json"})


def _find_wrong_duration(name: str, record: dict[str, Any], file: str, spanned_s: float) -> str:
    """What is wrong with a duration. An epoch's leaves out what comes after its last step, and no block."""
    entry = ParsedFile(file=file, content=record)
    duration_s, tolerance_s = entry.number("duration"), 0.02 + 0.001 * spanned_s
    is_part = "." in name
    least_s = spanned_s if is_part else _seconds_of_blocks(entry)
    if least_s - tolerance_s <= duration_s <= spanned_s + tolerance_s:
        return ""
    if is_part or duration_s > spanned_s:
        return f"duration is {duration_s:g} s, end - start {spanned_s:.6g} s"
    return f"duration is {duration_s:g} s, its blocks take {least_s:.6g} s"


def _timed_records(content: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Epochs and their parts that say when they started and ended."""
    for number, epoch in content.items() if isinstance(content, dict) else ():
        if not isinstance(epoch, dict):
            continue
        if "start" in epoch and "end" in epoch:
            yield str(number), epoch
        for name, part in epoch.items():
            if isinstance(part, dict) and "start" in part and "end" in part:
                yield f"{number}.{name}", part


def _figures(run: ResultRun) -> tuple[Any, ...]:
    return tuple(
        directory.summary.numbers("metric", "train_throughput_samples_per_second") for directory in run.dirs
    )


@rule.result_rule(
    id="runs.distinct",
    title="No run is a copy of another",
    editions=rule.ALL,
    source="ours: no two runs take the same time to the last digit",
    formula="the rates of all epochs of a run, and its start, differ from those of each other run",
    passes="five runs with rates of their own",
    fails="run4 with the rates of run3",
)
def _check_copies(case: rule.ResultCase) -> Iterator[Finding]:
    rule.require_runs(case.result)
    seen: dict[tuple[Any, ...], str] = {}
    copies = []
    for run in case.result.runs:
        try:
            marks = [("rates", _figures(run)), ("start", _starts(run.dirs))]
        except MissingFact:  # the rules on means name what is missing
            continue
        for mark in marks:
            if mark in seen:
                copies.append(f"{run.name} has the {mark[0]} of {seen[mark]}")
            seen.setdefault(mark, run.name)
    yield pass_if(
        not copies,
        evidence=case.result.name,
        value=f"{len(copies)} copies",
        limit="0 copies",
        proof="; ".join(copies) or "each run has rates and a start of its own",
        fix="Repeat the runs that are copies.",
    )


def _starts(dirs: tuple[ResultDir, ...]) -> tuple[str, ...]:
    return tuple(directory.summary.text("start") for directory in dirs)


@rule.result_rule(
    id="runs.overlap",
    title="One run ends before another begins",
    editions=rule.FIRST,
    source="v1.0 rules, runs are consecutive; their order by number does not matter",
    formula="in order of their starts, each run starts after the end of the one before",
    passes="10:00 to 10:03, 10:04 to 10:07",
    fails="10:00 to 10:03, 10:02 to 10:05",
)
def _check_overlap(case: rule.ResultCase) -> Iterator[Finding]:
    rule.require_runs(case.result)
    spans: list[tuple[datetime, datetime, str]] = []
    for run in case.result.runs:
        whole = [_interval(directory.summary) for directory in run.dirs]
        spans.append((min(each.begin for each in whole), max(each.end for each in whole), run.name))
    spans.sort()
    overlaps = [
        f"{after[2]} starts {(before[1] - after[0]).total_seconds():g} s before {before[2]} ends"
        for before, after in pairwise(spans)
        if after[0] < before[1]
    ]
    yield pass_if(
        not overlaps,
        evidence=case.result.name,
        value=f"{len(overlaps)} overlap",
        limit="0 overlap",
        proof="; ".join(overlaps) or f"{len(spans)} runs come one after the other",
        fix="Repeat the runs one after the other.",
    )


@rule.run_rule(
    id="checkpoint.ranks",
    title="Every rank's statistics are there",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="ours: each rank writes them, and without the slowest one no duration can be recomputed",
    formula=(
        "ranks of *_per_epoch_stats.json are 0 ... num_accelerators - 1; with several hosts, whose files may "
        "lie on each, missing ones are a warning"
    ),
    passes="8 accelerators, 0_per_epoch_stats.json to 7_per_epoch_stats.json",
    fails="8 accelerators on one host, no 7_per_epoch_stats.json",
)
def _check_ranks(case: rule.RunCase) -> Iterator[Finding]:
    run = case.run
    ranks = {int(stats.file.rpartition("/")[2].partition("_")[0]) for stats in run.stats}
    expected = run.summary.integer("num_accelerators")
    missing = sorted(set(range(min(expected, 1 << 20))) - ranks)
    extra = sorted(rank for rank in ranks if rank >= expected)
    is_whole = not missing and not extra
    problem = f"no statistics of {len(missing)} ranks, first rank {missing[0]}" if missing else ""
    yield pass_if(
        is_whole,
        evidence=run.name,
        value=f"{len(ranks)} ranks",
        limit=f"{expected} ranks",
        proof=problem or (f"statistics of rank {extra[0]}" if extra else "each rank has its statistics"),
        fix="Hand in the statistics of all ranks.",
        otherwise=Verdict.FAIL if run.summary.integer("num_hosts") == 1 else Verdict.WARNING,
    )
