"""Rules about checkpointing: what was written and read, by how many processes, and the gap between them."""

from collections.abc import Iterator
from typing import Any, Final

from penstock.submission.edition import ModelLimits
from penstock.submission.parsed_file import MissingFact
from penstock.submission.result_figures import Interval, read_durations, read_interval
from penstock.submission.result_files import ResultDir
from penstock.submission.rules.rule import (
    CHECKPOINTING,
    CONFIG,
    LATER,
    NEWEST,
    Case,
    Finding,
    Rule,
    Verdict,
    check,
    free_in_open,
    limit,
    num_accelerators,
    num_hosts,
    pass_if,
    require_all_hosts,
    require_runs,
)
from penstock.submission.rules.tree_rules import SOLUTION, require_description

_RUNS: Final[Any] = {"editions": LATER, "benchmarks": CHECKPOINTING}
_RESULTS: Final[Any] = {"editions": LATER, "benchmarks": CHECKPOINTING, "each": "result"}
_SIZE: Final = ("metric", "checkpoint_size_GB")
"""The size of one checkpoint over all ranks, in GiB."""


def _requested(run: ResultDir) -> tuple[int, int]:
    """Return the requested numbers of writes and reads; older tools write -1 for none."""
    writes, reads = (run.metadata.integer("args", f"num_checkpoints_{way}") for way in ("write", "read"))
    return max(writes, 0), max(reads, 0)


def _is_subset(run: ResultDir) -> bool:
    """Check whether a subset of the ranks represents all of them."""
    mode, option = ("workload", "checkpoint", "mode"), ("args", "checkpoint_subset")
    by_mode = run.config.has(*mode) and run.config.text(*mode).lower() == "subset"
    return by_mode or (run.metadata.has(*option) and run.metadata.boolean(*option))


def _model(case: Case) -> ModelLimits:
    name, _ = case.run.workload()
    models = case.edition.checkpoints.models
    if name not in models:
        raise MissingFact(f"{name} is not a model of {case.edition.edition}", where=case.run.metadata.file)
    return models[name]


def _intervals(case: Case) -> list[Interval]:
    """Return the beginning and the end of each invocation, in the order of their names."""
    require_runs(case.result)
    return [read_interval(run) for run in case.result.run_dirs()]


def _gap_seconds(case: Case) -> float | None:
    """Return the time between writing and reading, or None unless they are two invocations."""
    if len(require_runs(case.result)) != 2:
        return None
    (_, end), (begin, _) = _intervals(case)
    return (begin - end).total_seconds()


def _judge_invocations(case: Case) -> Iterator[Finding]:
    require_runs(case.result)
    full = case.edition.checkpoints.num_checkpoints
    counts = [_requested(run) for run in case.result.run_dirs()]
    allowed = [[(full, full)], [(full, 0), (0, full)]]
    holds = len(counts) <= case.edition.checkpoints.max_invocations and (
        not case.is_closed or counts in allowed
    )
    begins = [begin for begin, _ in _intervals(case)] if holds and len(counts) == 2 else []
    overlap = "; the second began before the first" if begins != sorted(begins) else ""
    listed = ", ".join(map(str, counts))
    yield pass_if(
        holds and not overlap,
        value=listed,
        limit=" or ".join(map(str, allowed)),
        proof=f"{len(counts)} invocations with (writes, reads) of {listed}{overlap}",
        fix="Repeat it in one invocation, or in one that writes and one that reads.",
    )


def _judge_counts(case: Case) -> Iterator[Finding]:
    """Yield a finding for the requested numbers, and one for the numbers of writes and reads done."""
    run, full = case.run, case.edition.checkpoints.num_checkpoints
    writes, reads = requested = _requested(run)
    yield pass_if(
        not case.is_closed or (set(requested) <= {0, full} and any(requested)),
        evidence=run.metadata.file,
        value=f"{writes} writes, {reads} reads",
        limit=f"{full} or 0",
        proof=f"{writes} writes and {reads} reads were asked for",
        fix=f"Repeat the run with {full} of each.",
    )
    if not run.stats:
        raise MissingFact("there is no per_epoch_stats.json of a rank", where=run.name)
    written, read = done = tuple(len(read_durations(run.stats[0], prefix)) for prefix in ("save", "load"))
    yield pass_if(
        done == requested,
        evidence=run.stats[0].file,
        value=f"{written} writes, {read} reads",
        limit=f"{writes} writes, {reads} reads",
        proof=f"{written} writes and {read} reads are in the statistics",
        fix="Submit the files of one whole run.",
    )


def _judge_remap(case: Case) -> Iterator[Finding]:
    description, capabilities = require_description(case), (*SOLUTION, "capabilities")
    declared_s = description.number(*capabilities, "remap_time_in_seconds")
    required_s = case.edition.checkpoints.min_remap_share * declared_s
    gap_s = _gap_seconds(case) or 0.0
    yield pass_if(
        gap_s >= required_s,
        value=f"{gap_s:g} s",
        limit=f"{required_s:g} s",
        proof=f"{declared_s:g} s to remap are declared, {gap_s:g} s lie between writing and reading",
        fix="Declare the time that remapping takes, and let it pass between two invocations.",
    )
    is_shared = all(description.boolean(*capabilities, f"simultaneous_{way}") for way in ("write", "read"))
    if declared_s > 0 and is_shared:
        yield Finding(
            verdict=Verdict.WARNING,
            proof="time to remap is declared together with simultaneous writes and reads, which need none",
            fix="Declare the one or the other.",
        )


def _judge_processes(case: Case) -> Iterator[Finding]:
    """Yield a finding for the number of processes, and one for the number in the summary."""
    model, processes = _model(case), case.run.metadata.integer("num_processes")
    unit, required = model.open_unit, 0  # any positive multiple of the unit
    if _is_subset(case.run):
        required = case.edition.checkpoints.subset_accelerators
    elif case.is_closed:
        required = model.closed_processes
    wanted = required or f"a multiple of {unit}"
    yield pass_if(
        processes == required if required else processes > 0 and processes % unit == 0,
        evidence=case.run.metadata.file,
        value=processes,
        limit=wanted,
        proof=f"{processes} processes, required: {wanted}",
        fix="Repeat the run with this number of processes.",
    )
    accelerators = num_accelerators(case)
    yield pass_if(
        accelerators == processes,
        value=accelerators,
        limit=processes,
        proof=f"the summary has {accelerators} accelerators, the metadata {processes} processes",
        fix="Submit the files of one run.",
    )


def _judge_subset(case: Case) -> Iterator[Finding]:
    run, limits = case.run, case.edition.checkpoints
    model, _ = run.workload()
    if not _is_subset(run) or not case.is_closed:
        yield Finding(verdict=Verdict.PASS, proof="no subset, or not in CLOSED")
        return
    accelerators = num_accelerators(case)
    yield pass_if(
        model in limits.subset_models and accelerators == limits.subset_accelerators,
        value=f"{model} on {accelerators}",
        limit=f"{', '.join(sorted(limits.subset_models))} on {limits.subset_accelerators}",
        proof=f"a subset of {model} on {accelerators} accelerators",
        fix="Repeat the run with all ranks.",
    )


def _judge_accelerator_memory(case: Case) -> Iterator[Finding]:
    run, memory_gb = case.run, case.edition.checkpoints.accelerator_memory_gb
    named = run.accelerator() or case.edition.checkpoints.unnamed_accelerator
    # Published metadata may name no accelerator: the edition's smallest one then gives a lower bound.
    accelerator = named or min(memory_gb, key=lambda name: memory_gb[name])
    each_gb, accelerators = memory_gb.get(accelerator, 0.0), num_accelerators(case)
    size, total = run.summary.number(*_SIZE), each_gb * accelerators
    sum_text, sign = f"{accelerators} x {each_gb:g} GB of {accelerator}", ">=" if total >= size else "<"
    if not named:
        yield Finding(
            verdict=Verdict.WARNING if total >= size else Verdict.NOT_CHECKED,
            evidence=run.metadata.file,
            value=f"{size:g} GB",
            limit=f"{total:g} GB",
            proof=f"the metadata name no accelerator; {sum_text}, the smallest, {sign} {size:g} GB",
            fix="Let the submitter name the accelerator that was simulated.",
        )
        return
    yield pass_if(
        total >= size,
        value=f"{size:g} GB",
        limit=f"{total:g} GB",
        proof=(
            f"{sum_text} {sign} {size:g} GB"
            if accelerator in memory_gb
            else f"{accelerator} is not an accelerator of {case.edition.edition}: {', '.join(memory_gb)}"
        ),
        fix="Name the accelerator that is simulated, with enough of them.",
    )


def _ratio_facts(case: Case) -> dict[str, Any]:
    """Return the bytes written in total, and the memory of the hosts that wrote them."""
    written = [(run, writes) for run in case.result.run_dirs() if (writes := _requested(run)[0])]
    if not written:
        raise MissingFact("nothing was written", where=case.name)
    total = sum(run.summary.number(*_SIZE) * writes for run, writes in written)
    first, multiple = written[0][0], case.edition.checkpoints.memory_multiple
    require_all_hosts(first)
    memory = sum(first.summary.numbers("host_memory_GB"))
    return {"file": first.summary.file, "total": total, "multiple": multiple, "memory": memory}


def _size_facts(case: Case) -> dict[str, float]:
    model = _model(case)
    share = num_accelerators(case) / model.closed_processes if _is_subset(case.run) else 1.0
    return {
        "size": case.run.summary.number(*_SIZE),
        "stated": share * model.size_gib,
        "by_design": share * model.architecture_gib,
        "tolerance": case.edition.checkpoints.size_tolerance,
    }


def _judge_ranks(case: Case) -> Iterator[Finding]:
    run = case.run
    ranks = {int(stats.file.rpartition("/")[2].partition("_")[0]) for stats in run.stats}
    expected = num_accelerators(case)
    missing = sorted(set(range(min(expected, 1 << 20))) - ranks)
    extra = sorted(rank for rank in ranks if rank >= expected)
    problem = f"no statistics of {len(missing)} ranks, first rank {missing[0]}" if missing else ""
    yield pass_if(
        not missing and not extra,
        evidence=run.name,
        value=f"{len(ranks)} ranks",
        limit=f"{expected} ranks",
        proof=problem or (f"statistics of rank {extra[0]}" if extra else "each rank has its statistics"),
        fix="Submit the statistics of all ranks.",
        otherwise=Verdict.FAIL if run.summary.integer("num_hosts") == 1 else Verdict.WARNING,
    )


RULES: Final = (
    Rule(
        id="checkpoint.invocations",
        title="Checkpoints are written and read in one invocation, or written in one and read in a later one",
        **_RESULTS,
        source="2.1.23, 4.7.1; the tool's spelling of the division does not matter",
        formula="at most max_invocations; in CLOSED (10, 10), or (10, 0) and then (0, 10) without overlap",
        passes="(10, 0), then (0, 10)",
        fails="(10, 0), (0, 5), (0, 5)",
        judge=_judge_invocations,
    ),
    Rule(
        id="checkpoint.counts",
        title="In CLOSED ten checkpoints are written and ten read, or none; and as many as requested",
        **_RUNS,
        source="tables 3 and 4, 4.7.1; -1 means none",
        formula="CLOSED: each number is the edition's or 0; per_epoch_stats has as many writes and reads",
        passes="--num-checkpoints-write 10 --num-checkpoints-read 0",
        fails="--num-checkpoints-write 5",
        judge=_judge_counts,
    ),
    check(
        id="checkpoint.gap",
        title="Reading begins soon after writing ended",
        **_RESULTS,
        source="4.7.1, by the marks that the tool itself makes",
        formula=(
            "0 <= start of reading - end of writing <= max_gap_s; below 0, and in v3.0's round above, a "
            "warning"
        ),
        passes="20 seconds",
        fails="31 seconds",
        unless=lambda case: "there are not two invocations" if _gap_seconds(case) is None else "",
        facts=lambda case: {"gap_s": _gap_seconds(case), "most_s": case.edition.checkpoints.max_gap_s},
        holds=lambda it: 0 <= it.gap_s <= it.most_s,
        at=lambda case: case.result.runs[1].dirs[0].metadata.file,
        show=("{gap_s:g} s", "{most_s:g} s"),
        proof="{gap_s:g} s lie between the two, at most {most_s:g} s may",
        fix=lambda it: (
            "Compare the hosts' clocks." if it.gap_s < 0 else "Repeat it with less time between the two."
        ),
        otherwise=lambda it: Verdict.WARNING if it.gap_s < 0 else it.case.verdict_of_round,
    ),
    limit(
        id="checkpoint.duration",
        title="The time from the first write to the last read is known",
        **_RESULTS,
        source="4.7.2",
        formula="end of the last invocation - start of the first > 0 (else warning)",
        passes="36 minutes",
        fails="an invocation that ended before the first began (a warning)",
        fact=lambda case: (_intervals(case)[-1][1] - _intervals(case)[0][0]).total_seconds(),
        compare=">",
        limit=0,
        show=("{fact:g} s", "more than {limit:g} s"),
        proof="{fact:g} s from the first begin to the last end",
        fix="Compare the hosts' clocks.",
        otherwise=Verdict.WARNING,
    ),
    Rule(
        id="checkpoint.remap",
        title="The declared time to remap was spent",
        editions=NEWEST,
        benchmarks=CHECKPOINTING,
        each="result",
        source="4.7.3",
        formula="gap >= min_remap_share x remap_time_in_seconds; a warning with simultaneous access",
        passes="remap_time_in_seconds 0, or 30 with a gap of 20 s",
        fails="remap_time_in_seconds 60 with a gap of 20 s",
        at=lambda case: require_description(case).file,
        judge=_judge_remap,
    ),
    check(
        id="checkpoint.shared",
        title="Simultaneous access by several hosts is declared",
        editions=NEWEST,
        benchmarks=CHECKPOINTING,
        source="4.7.4, by the keys of the description's schema",
        formula="num_hosts 1, or simultaneous_write and simultaneous_read are declared (else warning)",
        passes="one host",
        fails="two hosts, simultaneous_read: false (a warning)",
        facts=lambda case: {
            "hosts": num_hosts(case.run),
            "missing": ", ".join(
                name
                for name in ("simultaneous_write", "simultaneous_read")
                if not require_description(case).boolean(*SOLUTION, "capabilities", name)
            ),
        },
        holds=lambda it: it.hosts == 1 or not it.missing,
        at=lambda case: require_description(case).file,
        show=("{missing}", "simultaneous_write, simultaneous_read"),
        proof=lambda it: f"{it.hosts} hosts; {it.missing or 'nothing'} is declared false",
        fix="Declare what the system can do, and let the reviewer see that it did.",
        otherwise=Verdict.WARNING,
    ),
    limit(
        id="checkpoint.fsync",
        title="Every checkpoint is synced",
        **_RUNS,
        source="4.3.2",
        formula="checkpoint.fsync is true in the run's configuration",
        passes="fsync: true",
        fails="fsync: false",
        fact=lambda case: str(case.run.config.boolean("workload", "checkpoint", "fsync")).lower(),
        limit="true",
        at=CONFIG,
        proof="checkpoint.fsync is {fact}",
        fix="Repeat the run with fsync.",
    ),
    Rule(
        id="checkpoint.processes",
        title="The number of processes is the one that the model requires",
        **_RUNS,
        source="4.6.1, 4.6.4; the tool's spelling of the division does not matter",
        formula=(
            "CLOSED: processes == the model's (of a subset, the subset's); OPEN: a multiple of the model's "
            "unit; the summary has as many accelerators"
        ),
        passes="llama3-70b on 64 processes",
        fails="llama3-70b on 60 processes, in CLOSED",
        judge=_judge_processes,
    ),
    limit(
        id="checkpoint.hosts",
        title="In CLOSED every host has several accelerators",
        **_RUNS,
        source='4.6.2 says "more than 4", its table "minimal 4": exactly 4 is a warning',
        formula="num_accelerators / num_hosts > min_per_host; equal is a warning",
        passes="8 accelerators on one host",
        fails="8 accelerators on 4 hosts",
        unless=free_in_open,
        fact=lambda case: num_accelerators(case) / num_hosts(case.run),
        compare=">",
        limit=lambda case: case.edition.checkpoints.min_per_host,
        show=("{fact:g}", "more than {limit}"),
        proof=lambda it: (
            f"{num_accelerators(it.case)} accelerators / {num_hosts(it.case.run)} hosts = {it.fact:g}"
        ),
        fix="Use fewer hosts.",
        otherwise=lambda it: Verdict.WARNING if it.fact == it.limit else Verdict.FAIL,
    ),
    Rule(
        id="checkpoint.subset",
        title="In CLOSED a subset of the ranks represents all only where the edition allows it",
        **_RUNS,
        source="4.3.5",
        formula="no subset, or the edition's model and number of accelerators",
        passes="llama3-8b, checkpoint.mode subset, 8 accelerators",
        fails="llama3-70b, checkpoint.mode subset, in v3.0",
        at=CONFIG,
        judge=_judge_subset,
    ),
    Rule(
        id="checkpoint.memory",
        title="The checkpoint fits into the memory of its accelerators",
        **_RUNS,
        source="4.3.4, by each accelerator's own memory",
        formula=(
            "memory of an accelerator x accelerators >= checkpoint_size_GB; if none is named, a warning "
            "where the edition's smallest is enough (else not checked)"
        ),
        passes="8 x 180 GB of b200, 105 GB written",
        fails="8 x 80 GB of h100, 912 GB written",
        judge=_judge_accelerator_memory,
    ),
    check(
        id="checkpoint.ratio",
        title="More is written than the hosts can keep in memory",
        **_RESULTS,
        source="4.3.1, by all that was written and not by one checkpoint",
        formula="checkpoint_size_GB x writes > memory_multiple x sum of the hosts' memory (else warning)",
        passes="10 x 105 GiB on one host of 256 GiB",
        fails="10 x 105 GiB on one host of 512 GiB (a warning)",
        facts=_ratio_facts,
        holds=lambda it: it.total > it.multiple * it.memory,
        show=("{total:g} GiB", lambda it: f"{it.multiple * it.memory:g} GiB"),
        proof=lambda it: (
            f"{it.total:g} GiB written {'>' if it.total > it.multiple * it.memory else '<='} "
            f"{it.multiple:g} x {it.memory:g} GiB of memory"
        ),
        fix="Let the reviewer confirm that caches were cleared before reading.",
        otherwise=Verdict.WARNING,
    ),
    check(
        id="checkpoint.size",
        title="A checkpoint has the size that its model requires",
        **_RUNS,
        source="ours, by the edition's table 2 and by the model's architecture, which differ for llama3-1t",
        formula=(
            "checkpoint_size_GB is within size_tolerance of either, or of a subset's share (else warning)"
        ),
        passes="llama3-8b with 104.7 GiB",
        fails="llama3-8b with 10 GiB (a warning)",
        facts=_size_facts,
        holds=lambda it: any(
            abs(it.size - expected) <= it.tolerance * expected for expected in (it.stated, it.by_design)
        ),
        show=("{size:g} GiB", "{stated:g} or {by_design:g} GiB +- {tolerance:.0%}"),
        proof="{size:g} GiB, stated are {stated:g} GiB, by its architecture {by_design:g} GiB",
        fix="Let the reviewer see what was written.",
        otherwise=Verdict.WARNING,
    ),
    Rule(
        id="checkpoint.ranks",
        title="The statistics of every rank exist",
        **_RUNS,
        source="ours: each rank writes them, and without the slowest one no duration can be recomputed",
        formula=(
            "ranks of *_per_epoch_stats.json are 0 ... num_accelerators - 1; with several hosts a warning"
        ),
        passes="8 accelerators, 0_per_epoch_stats.json to 7_per_epoch_stats.json",
        fails="8 accelerators on one host, no 7_per_epoch_stats.json",
        judge=_judge_ranks,
    ),
)
