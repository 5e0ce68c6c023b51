"""Rules about figures: utilization, stated means, and agreement of rates, files and times.

Anyone who inflates a figure has to change all figures that depend on it, too. Every tolerance is far wider
than 660 published runs need. If older tools do not record a fact, a rule that needs it is not applicable
rather than broken.
"""

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Final

from penstock.submission.parsed_file import KeyPath, MissingFact, ParsedFile
from penstock.submission.result_figures import (
    METRICS,
    Interval,
    checkpoint_means,
    mib_per_second,
    read_time,
    samples_per_second,
    utilization_percent,
)
from penstock.submission.rules.rule import (
    BOTH,
    CHECKPOINTING,
    FIRST,
    LATER,
    Case,
    Finding,
    Rule,
    Verdict,
    check,
    compare_stated,
    limit,
    not_applicable,
    not_checked,
    nothing,
    num_accelerators,
    pass_if,
    require_runs,
)
from penstock.submission.tree_layout import Benchmark

_RATE_TOLERANCE: Final = 1.002
"""The tolerated ratio of a rate to the accelerators' maximum, of which published runs reach 99.998 %."""
_UTILIZATION_TOLERANCE: Final = 0.5
"""In percentage points; in published runs, a rate's share of the maximum never exceeds the utilization."""
_MAX_UTILIZATION_GAP: Final = 30.0
"""In percentage points; at most 15.2 in published runs. Time between steps lowers only the rate."""
_FILES_TOLERANCE: Final = 0.05
"""Relative; published runs need 0.01, because reading starts before an epoch's clock does."""
_SECONDS_TOLERANCE: Final = 1.0
_EPOCH_SECONDS_TOLERANCE: Final = 0.5
"""An epoch's own timestamps are close, but not equal, to those from which its rate is computed."""
_MAX_PROBLEMS: Final = 3
"""The most problems that a proof lists, because one wrong time shows in many records."""
_FIRST_RANK: Final = frozenset({"per_epoch_stats.json", "0_per_epoch_stats.json"})
_RATES: Final = ("metric", "train_throughput_samples_per_second")

_OF_STATISTICS: Final[Any] = {
    "unless": lambda case: "the run has no per_epoch_stats.json" if case.run.epochs.is_missing else "",
}
_OWN_SUMMARY: Final = "Submit the run's own summary, or repeat the run."


def _min_utilization(case: Case) -> float:
    family, _ = case.run.workload()
    limits = case.edition.min_utilization_percent
    if family not in limits:
        what = f"{family} is not a workload of {case.edition.edition}"
        raise MissingFact(what, where=case.run.overrides.file)
    return limits[family]


def _compare_stated(
    case: Case, file: ParsedFile, path: KeyPath, recompute: Callable[[], float | tuple[float, ...]]
) -> Finding:
    """Compare a stated figure with the recomputed one, or with the nearest of several.

    If a figure cannot be recomputed, the others are still compared.
    """
    try:
        recomputed = recompute()
        stated = file.number(*path)
    except MissingFact as reason:
        return not_checked(reason)
    if isinstance(recomputed, tuple):
        recomputed = min(recomputed, key=lambda candidate: abs(candidate - stated))
    return compare_stated(
        ".".join(path),
        stated,
        recomputed,
        evidence=file.file,
        fix="State the recomputed figure, or restore the files that it was made from.",
        tolerance=case.edition.mean_tolerance,
    )


def _judge_run_means(case: Case) -> Iterator[Finding]:
    for name, metric in (
        ("train_au_mean_percentage", utilization_percent),
        ("train_throughput_mean_samples_per_second", samples_per_second),
        ("train_io_mean_MB_per_second", mib_per_second),
    ):
        yield _compare_stated(case, case.run.summary, ("metric", name), partial(metric, case.run))


def _judge_checkpoint_means(case: Case) -> Iterator[Finding]:
    summary = case.run.summary
    for prefix in ("save", "load"):
        for name, candidates in checkpoint_means(case.run, prefix).items():
            summary.number("metric", name)  # without it, nothing of the run is compared
            yield _compare_stated(case, summary, ("metric", name), partial(tuple, candidates))


def _judge_results_means(case: Case) -> Iterator[Finding]:
    report, metrics = case.result.report, METRICS[case.result.location.benchmark]
    stated = [
        path
        for name in metrics
        for path in ((name,), ("metrics", name), ("overall", name))
        if report.has(*path)
    ]
    for path in stated:
        yield _compare_stated(case, report, path, partial(metrics[path[-1]], case.result))
    if not stated:
        report.value()
        yield not_applicable(report.file, "it states no known figure")


def _judge_report_means(case: Case) -> Iterator[Finding]:
    case.result.report.value("overall")
    for name, metric in METRICS[Benchmark.TRAINING].items():
        if name.startswith("train_throughput"):
            yield _compare_stated(case, case.result.report, ("overall", name), partial(metric, case.result))


def _maximum_rate(case: Case) -> float:
    """Return the samples per second that the accelerators of a directory could compute at most."""
    workload, path = case.run.config, ("workload", "train", "computation_time")
    batch = workload.integer("workload", "reader", "batch_size")
    step_s = workload.number(*path, *(("mean",) if workload.has(*path, "mean") else ()))
    if step_s <= 0:
        raise MissingFact("workload.train.computation_time is not positive", where=workload.file)
    return batch * num_accelerators(case) / step_s


def _epochs(case: Case) -> list[ParsedFile]:
    """Return the statistics of each training epoch, in order."""
    epochs = case.run.epochs.parts()
    return [epochs[name] for name in sorted(epochs, key=lambda name: (len(name), name))]


def _judge_rates_against_files(case: Case) -> Iterator[Finding]:
    run, is_warm_up = case.run, case.whole_run.is_warm_up
    if len(case.whole_run.dirs) > 1:
        yield not_applicable(case.name, "several clients ran")
        return
    epochs, summary = _epochs(case), run.summary
    total = summary.integer("num_files_train") * summary.integer("num_samples_per_file")
    rates = summary.numbers(*_RATES)
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
        abs(worst - 1) <= _FILES_TOLERANCE + _EPOCH_SECONDS_TOLERANCE * rate / total,
        evidence=run.epochs.file,
        value=f"{worst * total:,.0f} samples",
        limit=f"{total:,} samples",
        proof=(
            f"epoch {shares.index((worst, rate)) + 1}: samples/s x its seconds are {worst:.2%} of the "
            f"{total:,} samples of the data set"
        ),
        fix="" if is_warm_up else "Samples/s may leave out slow first steps: let the reviewer see the log.",
        # The files do not show why: published runs whose first step took long reach 111 %.
        otherwise=Verdict.NOT_APPLICABLE if is_warm_up else Verdict.WARNING,
    )


def _seconds_of_blocks(epoch: ParsedFile) -> float:
    """Return the time of the parts of an epoch between which checkpoints may be written."""
    return sum(
        _seconds(block)
        for name, block in epoch.parts().items()
        if name.startswith("block") and block.has("start") and block.has("end")
    )


def _interval(record: ParsedFile) -> Interval:
    return read_time(record, "start"), read_time(record, "end")


def _seconds(record: ParsedFile) -> float:
    begin, end = _interval(record)
    return (end - begin).total_seconds()


def _judge_times(case: Case) -> Iterator[Finding]:
    problems = list(_find_time_problems(case))
    fix = "Submit the run's own files, or repeat the run."
    for file, problem in problems[:_MAX_PROBLEMS]:
        yield Finding(verdict=Verdict.FAIL, evidence=file, proof=problem, fix=fix)
    metadata = case.run.metadata
    if not problems and metadata.has("runtime"):
        spanned_s, runtime_s = _seconds(case.run.summary), metadata.number("runtime")
        yield pass_if(
            spanned_s <= runtime_s + _SECONDS_TOLERANCE,
            evidence=metadata.file,
            value=f"{spanned_s:g} s",
            limit=f"{runtime_s:g} s",
            proof=f"the tool ran for {runtime_s:g} s, the summary spans {spanned_s:g} s",
            fix="Let the reviewer compare the clocks.",
            otherwise=Verdict.WARNING,
        )
    elif not problems:
        yield Finding(verdict=Verdict.PASS, evidence=case.run.summary.file, proof="all times agree")


def _find_time_problems(case: Case) -> Iterator[tuple[str, str]]:
    run, slack = case.run, timedelta(seconds=_SECONDS_TOLERANCE)
    run_begin, run_end = _interval(run.summary)
    if run_end < run_begin:
        yield run.summary.file, f"end {run.summary.text('end')} is before start {run.summary.text('start')}"
        return
    for stats in run.stats or (run.epochs,):
        records: dict[str, ParsedFile] = {}
        for number, epoch in ({} if stats.is_missing else stats.parts()).items():
            records |= {number: epoch} | {f"{number}.{name}": part for name, part in epoch.parts().items()}
        for name, record in records.items():
            if not (record.has("start") and record.has("end")):
                continue
            begin, end = _interval(record)
            if record.has("duration") and (problem := _find_wrong_duration(record, is_part="." in name)):
                yield stats.file, f"{name}: {problem}"
            outside = max(run_begin - begin, end - run_end)
            if stats.file.rpartition("/")[2] in _FIRST_RANK and outside > slack:  # by the summary's own clock
                yield stats.file, f"{name} lies {outside.total_seconds():.6g} s outside of the run"


def _find_wrong_duration(record: ParsedFile, *, is_part: bool) -> str:
    """Describe the flaw of a duration; return "" if there is none.

    The duration of an epoch leaves out the time after its last step, whereas that of a block leaves out
    nothing.
    """
    spanned_s, duration_s = _seconds(record), record.number("duration")
    tolerance_s = 0.02 + 0.001 * spanned_s
    least_s = spanned_s if is_part else _seconds_of_blocks(record)
    if least_s - tolerance_s <= duration_s <= spanned_s + tolerance_s:
        return ""
    if is_part or duration_s > spanned_s:
        return f"duration is {duration_s:g} s, end - start {spanned_s:.6g} s"
    return f"duration is {duration_s:g} s, its blocks take {least_s:.6g} s"


def _find_copies(case: Case) -> Iterator[str]:
    first_with: dict[tuple[str, tuple[Any, ...]], str] = {}
    for run in require_runs(case.result):
        try:
            rates = tuple(directory.summary.numbers(*_RATES) for directory in run.dirs)
            starts = tuple(directory.summary.text("start") for directory in run.dirs)
        except MissingFact:  # the rules on means name what is missing
            continue
        for mark in (("rates", rates), ("start", starts)):
            if first_with.setdefault(mark, run.name) != run.name:
                yield f"{run.name} has the {mark[0]} of {first_with[mark]}"


def _find_overlaps(case: Case) -> Iterator[str]:
    spans: list[tuple[datetime, datetime, str]] = []
    for run in require_runs(case.result):
        begins, ends = zip(*(_interval(directory.summary) for directory in run.dirs), strict=True)
        spans.append((min(begins), max(ends), run.name))
    for before, after in pairwise(sorted(spans)):
        if after[0] < before[1]:
            yield f"{after[2]} starts {(before[1] - after[0]).total_seconds():g} s before {before[2]} ends"


RULES: Final = (
    limit(
        id="utilization.minimum",
        title="Accelerators are kept as busy as the workload requires",
        source="v1.0 rules, workloads; 3.3.2 of later editions",
        formula="mean of train_au_percentage over the epochs >= the workload's minimum",
        passes="cosmoflow at 70.1 %",
        fails="unet3d at 89.9 %",
        fact=lambda case: utilization_percent(case.run),
        compare=">=",
        limit=_min_utilization,
        show=("{fact:.6g} %", "{limit:g} %"),
        proof=lambda it: (
            f"mean over epochs {it.fact!r} % {it.sign} {it.limit:g} % of {it.case.run.workload()[0]}"
        ),
        fix="Submit a result with fewer accelerators, which this storage can feed.",
        is_lenient_in_warm_up=True,
    ),
    limit(
        id="utilization.stated",
        title="Each run states that it reached its utilization",
        source="v1.0 rules, success of a run; 3.3.2 of later editions",
        formula='metric.train_au_meet_expectation == "success"',
        passes='"success"',
        fails='"fail"',
        fact=lambda case: case.run.summary.text("metric", "train_au_meet_expectation"),
        limit="success",
        proof="train_au_meet_expectation is {fact!r}",
        fix="Repeat the run with fewer accelerators, which this storage can feed.",
        is_lenient_in_warm_up=True,
    ),
    limit(
        id="means.epochs",
        title="Each run that counts reports every epoch",
        editions=LATER,
        source="3.3.8",
        formula="entries of train_au_percentage == epochs of config.yaml; a nonzero mismatch is a warning",
        passes="5 epochs, 5 entries",
        fails="5 epochs, no entry",
        fact=lambda case: (
            len(entries)
            if isinstance(entries := case.run.summary.value("metric", "train_au_percentage"), list)
            else 0
        ),
        limit=lambda case: case.run.config.integer("workload", "train", "epochs"),
        show=("{fact} entries", "{limit} epochs"),
        proof="train_au_percentage has {fact} entries for {limit} epochs",
        fix="Repeat the run, to its end.",
        otherwise=lambda it: Verdict.WARNING if it.fact else Verdict.FAIL,
        is_lenient_in_warm_up=True,
    ),
    Rule(
        id="means.run",
        title="The means that a run states are the means of its epochs",
        source="ours: a stated mean is never trusted",
        formula="stated == mean over epochs, within the edition's tolerance; MB/s by the record's length",
        passes="train_au_percentage [90, 92], train_au_mean_percentage 91",
        fails="train_au_percentage [90, 92], train_au_mean_percentage 95",
        judge=_judge_run_means,
    ),
    Rule(
        id="means.checkpoint",
        title="The means that a checkpointing run states are the means of its checkpoints",
        editions=LATER,
        benchmarks=CHECKPOINTING,
        source="4.3.6: the mean of size / duration over the checkpoints, not all bytes over all time",
        formula="stated == mean over checkpoints, within the edition's tolerance, by rank 0 or the slowest",
        passes="10 checkpoints of 104.7 GiB in 4 ... 6.25 s, save_checkpoint_io_mean_GB_per_second 21.1",
        fails="the same, stated 26.2",
        judge=_judge_checkpoint_means,
    ),
    Rule(
        id="means.results",
        title="The figures of results.json follow from its runs",
        editions=LATER,
        benchmarks=BOTH,
        each="result",
        source="3.3.8, 4.3.6",
        formula=(
            "every known figure, at the top or in metrics or overall, == the recomputed one, within the "
            "edition's tolerance; without warm-ups; checkpoints by rank 0 or by the slowest"
        ),
        passes="five runs of 20.1 ... 20.5 samples/s, train_throughput_mean_samples_per_second 20.3",
        fails="the same, stated 20.25, which is the mean with the warm-up",
        judge=_judge_results_means,
    ),
    Rule(
        id="means.report",
        title="The figures of the report follow from its runs",
        editions=FIRST,
        each="result",
        source="v1.0 rules, a result is the mean of five runs",
        formula="overall.* == mean and population deviation over the runs, within the edition's tolerance",
        passes="runs of 10, 10, 10, 11 and 9 samples/s, reported 10",
        fails="the same, reported 11",
        judge=_judge_report_means,
    ),
    limit(
        id="rates.maximum",
        title="A run reads no more samples than its accelerators can compute",
        source="ours; batch and computation time are the workload's",
        formula="mean samples/s <= batch x accelerators / computation time, + 0.2 %",
        passes="unet3d on 2 h100: 42 samples/s of at most 7 x 2 / 0.323 s = 43.3",
        fails="the same with 48 samples/s",
        fact=lambda case: samples_per_second(case.run),
        compare="<=",
        limit=lambda case: _maximum_rate(case) * _RATE_TOLERANCE,
        show=("{fact:.6g} samples/s", "{limit:.6g} samples/s"),
        proof=lambda it: (
            f"{it.fact:.6g} samples/s are {it.fact / _maximum_rate(it.case):.2%} of what "
            f"{num_accelerators(it.case)} accelerators can compute"
        ),
        fix=_OWN_SUMMARY,
        is_lenient_in_warm_up=True,
    ),
    limit(
        id="utilization.maximum",
        title="Accelerators are busy for at most 100 % of the time",
        source="ours: the time of computation is part of the time that it is divided by",
        formula="each entry of train_au_percentage <= 100, + 0.5",
        passes="99.6 % in every epoch",
        fails="150 % in one epoch",
        fact=lambda case: max(case.run.summary.numbers("metric", "train_au_percentage")),
        compare="<=",
        limit=100 + _UTILIZATION_TOLERANCE,
        show=("{fact:.6g} %", "{limit:.6g} %"),
        proof="the highest utilization of an epoch is {fact:.6g} %",
        fix=_OWN_SUMMARY,
        is_lenient_in_warm_up=True,
    ),
    check(
        id="rates.utilization",
        title="The rate of a run agrees with its utilization",
        source="ours: accelerators that are busy for a share of the time compute that share of the samples",
        formula=(
            "share of the accelerators' rate <= mean of train_au_percentage + 0.5; more than 30 below it is "
            "a warning"
        ),
        passes="97 % utilization, 96.9 % of the rate that the accelerators can compute",
        fails="90 % utilization, 99 % of the rate",
        facts=lambda case: {
            "share": 100 * samples_per_second(case.run) / _maximum_rate(case),
            "utilization": utilization_percent(case.run),
        },
        holds=lambda it: (
            it.utilization - _MAX_UTILIZATION_GAP <= it.share <= it.utilization + _UTILIZATION_TOLERANCE
        ),
        show=("{share:.6g} %", "{utilization:.6g} %"),
        proof="the rate is {share:.6g} % of the accelerators', the utilization {utilization:.6g} %",
        fix=lambda it: (
            _OWN_SUMMARY
            if it.share > it.utilization
            else "Let the reviewer see from the run's log which of the two is true."
        ),
        # Both are divided by the same time, and no step computes for less than the workload's time. The files
        # do not show why a rate is lower: a program that is slow to start also produces such figures.
        otherwise=lambda it: Verdict.FAIL if it.share > it.utilization else Verdict.WARNING,
        is_lenient_in_warm_up=True,
    ),
    check(
        id="epochs.recorded",
        title="The statistics have every epoch for which the summary has a rate",
        source="ours: both are written by the same program, from the same epochs",
        formula="epochs of per_epoch_stats.json == entries of train_throughput_samples_per_second",
        passes="5 rates, and epochs 1 to 5",
        fails="5 rates, and a file without epochs",
        **_OF_STATISTICS,
        facts=lambda case: {"epochs": len(_epochs(case)), "rates": len(case.run.summary.numbers(*_RATES))},
        holds=lambda it: it.epochs == it.rates,
        at=lambda case: case.run.epochs.file,
        show=("{epochs} epochs", "{rates} epochs"),
        proof="the statistics have {epochs} epochs, the summary has rates of {rates}",
        fix="Submit the run's own statistics, or repeat the run.",
    ),
    Rule(
        id="rates.files",
        title="Rate times duration of each epoch equals the samples of the data set",
        source="ours; runs of several clients, which share the samples, are left out",
        formula=(
            "samples/s x seconds of the epoch's blocks == files x samples per file, +- 5 % and 0.5 s (else a "
            "warning); not in a warm-up"
        ),
        passes="28,000 files in 85 s at 329.4 samples/s",
        fails="the same at 494 samples/s (a warning)",
        **_OF_STATISTICS,
        judge=_judge_rates_against_files,
    ),
    Rule(
        id="times.recorded",
        title="Durations agree with starts and ends, and all recorded times lie within the run",
        benchmarks=BOTH,
        source="ours: start, end and duration are written by one clock",
        formula=(
            "end >= start; |duration - (end - start)| <= 0.02 s + 0.1 % of each block and checkpoint; "
            "blocks of an epoch <= its duration <= end - start; epochs lie within the summary's start and "
            "end (+ 1 s); a summary that spans more than the tool's runtime is a warning"
        ),
        passes='start 10:00:00, end 10:01:25, duration "85.00"',
        fails="a checkpoint of 10 s whose duration is 5",
        judge=_judge_times,
    ),
    nothing(
        id="runs.distinct",
        title="No run is a copy of another",
        each="result",
        source="ours: no two runs take the same time to the last digit",
        formula="the rates of all epochs of a run, and its start, differ from every other run's",
        passes="five runs with rates of their own",
        fails="run4 with the rates of run3",
        problems=_find_copies,
        show=("{number} copies", "0 copies"),
        proof="each run has rates and a start of its own",
        fix="Submit each run's own files, or repeat the run.",
    ),
    nothing(
        id="runs.overlap",
        title="One run ends before another begins",
        editions=FIRST,
        each="result",
        source="v1.0 rules, runs are consecutive; their order by number does not matter",
        formula="in order of their starts, each run starts after the end of the one before",
        passes="10:00 to 10:03, 10:04 to 10:07",
        fails="10:00 to 10:03, 10:02 to 10:05",
        problems=_find_overlaps,
        show=("{number} overlap", "0 overlap"),
        proof=lambda it: f"{len(it.case.result.runs)} runs come one after the other",
        fix="Repeat the runs one after the other.",
    ),
)
