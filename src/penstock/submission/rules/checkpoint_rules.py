"""Rules about checkpointing: what was written and read, by how many processes, and how far apart."""

from collections.abc import Iterator

from penstock.submission.edition import ModelLimits
from penstock.submission.finding import Finding, Verdict, not_applicable, pass_if, violation
from penstock.submission.parsed_file import MissingFact
from penstock.submission.recomputed_metrics import Interval, read_durations, read_interval
from penstock.submission.result_files import ResultDir, SubmittedResult
from penstock.submission.rules import rule, system_rules


def requested_counts(run: ResultDir) -> tuple[int, int]:
    """The requested writes and reads; older tools write -1 for none."""
    writes, reads = (run.metadata.integer("args", f"num_checkpoints_{way}") for way in ("write", "read"))
    return max(writes, 0), max(reads, 0)


def is_subset(run: ResultDir) -> bool:
    """Whether a part of the ranks stands for all."""
    mode, option = ("workload", "checkpoint", "mode"), ("args", "checkpoint_subset")
    by_mode = run.config.has(*mode) and run.config.text(*mode).lower() == "subset"
    return by_mode or (run.metadata.has(*option) and run.metadata.boolean(*option))


def checkpoint_gib(run: ResultDir) -> float:
    """The size of one checkpoint, over all ranks."""
    return run.summary.number("metric", "checkpoint_size_GB")


def _num_accelerators(case: rule.RunCase) -> int:
    return case.run.summary.integer("num_accelerators")


def _model(case: rule.RunCase) -> ModelLimits:
    name, _ = case.run.workload()
    models = case.checkpoints.models
    if name not in models:
        raise MissingFact(f"{name} is not a model of {case.edition.edition}", where=case.run.metadata.file)
    return models[name]


def _write_and_read(result: SubmittedResult) -> tuple[Interval, Interval, ResultDir] | None:
    """The intervals of two invocations and the second one, in the order of their names; None of one alone."""
    rule.require_runs(result)
    if len(result.runs) != 2:
        return None
    first, second = (run.dirs[0] for run in result.runs)
    return read_interval(first), read_interval(second), second


@rule.result_rule(
    id="checkpoint.invocations",
    title="All is written and read in one invocation, or written in one and then read in another",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="2.1.23, 4.7.1; the tool's spelling of the division does not matter",
    formula=(
        "at most max_invocations result directories; CLOSED: (10, 10), or (10, 0) and then (0, 10) without "
        "overlap"
    ),
    passes="(10, 0), then (0, 10)",
    fails="(10, 0), (0, 5), (0, 5)",
)
def _check_invocations(case: rule.ResultCase) -> Iterator[Finding]:
    rule.require_runs(case.result)
    full = case.checkpoints.num_checkpoints
    counts = [requested_counts(run) for run in case.result.run_dirs()]
    allowed = [[(full, full)], [(full, 0), (0, full)]]
    holds = len(counts) <= case.checkpoints.max_invocations and (not case.is_closed or counts in allowed)
    listed, overlap = ", ".join(map(str, counts)), ""
    if holds and (times := _write_and_read(case.result)):
        first, second, _ = times
        overlap = "; the second began before the first" if second.begin < first.begin else ""
    yield pass_if(
        holds and not overlap,
        evidence=case.result.name,
        value=listed,
        limit=" or ".join(map(str, allowed)),
        proof=f"{len(counts)} invocations with (writes, reads) of {listed}{overlap}",
        fix="Repeat it in one invocation, or in one that writes and one that reads.",
    )


@rule.run_rule(
    id="checkpoint.counts",
    title="In CLOSED ten checkpoints are written and ten read, or none; and as many as were asked for",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="tables 3 and 4, 4.7.1; -1 means none",
    formula="CLOSED: each number is the edition's or 0; per_epoch_stats has as many writes and reads",
    passes="--num-checkpoints-write 10 --num-checkpoints-read 0",
    fails="--num-checkpoints-write 5",
)
def _check_counts(case: rule.RunCase) -> Iterator[Finding]:
    """A finding for the request, and one for what was done."""
    run, full = case.run, case.checkpoints.num_checkpoints
    requested = requested_counts(run)
    writes, reads = requested
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
    done_writes, done_reads = (len(read_durations(run.stats[0], prefix)) for prefix in ("save", "load"))
    yield pass_if(
        (done_writes, done_reads) == requested,
        evidence=run.stats[0].file,
        value=f"{done_writes} writes, {done_reads} reads",
        limit=f"{writes} writes, {reads} reads",
        proof=f"{done_writes} writes and {done_reads} reads are in the statistics",
        fix="Hand in the files of one whole run.",
    )


@rule.result_rule(
    id="checkpoint.gap",
    title="Reading begins soon after writing ended",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="4.7.1, by the marks that the tool itself makes",
    formula=(
        "begin of reading - end of writing <= max_gap_s; below 0 the clocks differ (warning); more was let "
        "pass in v3.0 (a warning)"
    ),
    passes="20 seconds",
    fails="31 seconds",
)
def _check_gap(case: rule.ResultCase) -> Iterator[Finding]:
    times = _write_and_read(case.result)
    if times is None:
        yield not_applicable(case.result.name, "there are not two invocations")
        return
    first, second, run = times
    gap_s, max_gap_s = (second.begin - first.end).total_seconds(), case.checkpoints.max_gap_s
    yield pass_if(
        0 <= gap_s <= max_gap_s,
        evidence=run.metadata.file,
        value=f"{gap_s:g} s",
        limit=f"{max_gap_s:g} s",
        proof=f"{gap_s:g} s lie between the two, at most {max_gap_s:g} s may",
        fix="Compare the hosts' clocks." if gap_s < 0 else "Repeat it with less time between the two.",
        otherwise=Verdict.WARNING if gap_s < 0 else case.verdict_of_round,
    )


def _total_seconds(case: rule.ResultCase) -> float:
    rule.require_runs(case.result)
    intervals = [read_interval(run) for run in case.result.run_dirs()]
    return (intervals[-1].end - intervals[0].begin).total_seconds()


rule.limit_rule(
    rule.ResultCase,
    id="checkpoint.duration",
    title="The time from the first write to the last read is known",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="4.7.2",
    formula="end of the last invocation - begin of the first > 0 (else warning)",
    passes="36 minutes",
    fails="an invocation that ended before the first began (a warning)",
    value=_total_seconds,
    compare=">",
    limit=0,
    evidence=lambda case: case.name,
    show=("{:g} s", "more than {:g} s"),
    proof="{value:g} s from the first begin to the last end",
    fix="Compare the hosts' clocks.",
    otherwise=Verdict.WARNING,
)


@rule.result_rule(
    id="checkpoint.remap",
    title="A declared time to remap was spent",
    editions=rule.NEWEST,
    benchmarks=rule.CHECKPOINTING,
    source="4.7.3",
    formula=(
        "gap >= min_remap_share x remap_time_in_seconds; remapping beside simultaneous access is a warning"
    ),
    passes="remap_time_in_seconds 0, or 30 with a gap of 20 s",
    fails="remap_time_in_seconds 60 with a gap of 20 s",
)
def _check_remap(case: rule.ResultCase) -> Iterator[Finding]:
    description = system_rules.require_description(case)
    capabilities = (*system_rules.SOLUTION, "capabilities")
    declared_s = description.number(*capabilities, "remap_time_in_seconds")
    required_s = case.checkpoints.min_remap_share * declared_s
    times = _write_and_read(case.result)
    gap_s = (times[1].begin - times[0].end).total_seconds() if times else 0.0
    yield pass_if(
        gap_s >= required_s,
        evidence=description.file,
        value=f"{gap_s:g} s",
        limit=f"{required_s:g} s",
        proof=f"{declared_s:g} s to remap are declared, {gap_s:g} s lie between writing and reading",
        fix="Declare the time that remapping takes, and let it pass between two invocations.",
    )
    is_shared = all(description.boolean(*capabilities, f"simultaneous_{way}") for way in ("write", "read"))
    if declared_s > 0 and is_shared:
        yield violation(
            evidence=description.file,
            proof="time to remap is declared beside simultaneous writes and reads, which need none",
            fix="Declare the one or the other.",
            verdict=Verdict.WARNING,
        )


@rule.run_rule(
    id="checkpoint.shared",
    title="Hosts that access storage at the same time are declared to",
    editions=rule.NEWEST,
    benchmarks=rule.CHECKPOINTING,
    source="4.7.4, by the keys of the description's schema",
    formula="num_hosts 1, or simultaneous_write and simultaneous_read are declared (else warning)",
    passes="one host",
    fails="two hosts, simultaneous_read: false (a warning)",
)
def _check_shared_access(case: rule.RunCase) -> Iterator[Finding]:
    hosts, description = rule.num_hosts(case.run), system_rules.require_description(case)
    missing = [
        name
        for name in ("simultaneous_write", "simultaneous_read")
        if not description.boolean(*system_rules.SOLUTION, "capabilities", name)
    ]
    yield pass_if(
        hosts == 1 or not missing,
        evidence=description.file,
        value=", ".join(missing),
        limit="simultaneous_write, simultaneous_read",
        proof=f"{hosts} hosts; {', '.join(missing) or 'nothing'} is declared false",
        fix="Declare what the system can do, and let the reviewer see that it did.",
        otherwise=Verdict.WARNING,
    )


rule.limit_rule(
    rule.RunCase,
    id="checkpoint.fsync",
    title="Every checkpoint is synced",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="4.3.2",
    formula="checkpoint.fsync is true in the run's configuration",
    passes="fsync: true",
    fails="fsync: false",
    value=lambda case: str(case.run.config.boolean("workload", "checkpoint", "fsync")).lower(),
    compare="==",
    limit="true",
    evidence=lambda case: case.run.config.file,
    proof="checkpoint.fsync is {value}",
    fix="Repeat the run with fsync.",
)


@rule.run_rule(
    id="checkpoint.processes",
    title="The number of processes is the one that the model requires",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="4.6.1, 4.6.4; the tool's spelling of the division does not matter",
    formula=(
        "CLOSED: processes == the model's, of a subset == the subset's; OPEN: a positive multiple of the "
        "model's unit; and the summary has as many accelerators"
    ),
    passes="llama3-70b on 64 processes",
    fails="llama3-70b on 60 processes, in CLOSED",
)
def _check_processes(case: rule.RunCase) -> Iterator[Finding]:
    """A finding for the number, and one for the summary's."""
    model, processes = _model(case), case.run.metadata.integer("num_processes")
    if is_subset(case.run):
        required = case.checkpoints.subset.num_accelerators
    elif case.is_closed:
        required = model.closed_processes
    else:
        required = 0  # any positive multiple of the unit
    unit = model.open_unit
    yield pass_if(
        processes == required if required else processes > 0 and processes % unit == 0,
        evidence=case.run.metadata.file,
        value=processes,
        limit=required or f"a multiple of {unit}",
        proof=f"{processes} processes, required: {required or f'a multiple of {unit}'}",
        fix="Repeat the run with this number of processes.",
    )
    accelerators = _num_accelerators(case)
    yield pass_if(
        accelerators == processes,
        evidence=case.run.summary.file,
        value=accelerators,
        limit=processes,
        proof=f"the summary has {accelerators} accelerators, the metadata {processes} processes",
        fix="Hand in the files of one run.",
    )


rule.limit_rule(
    rule.RunCase,
    id="checkpoint.hosts",
    title="In CLOSED every host has several accelerators",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source='4.6.2 says "more than 4", its table "minimal 4": exactly 4 is a warning',
    formula="num_accelerators / num_hosts > min_per_host; equal is a warning",
    passes="8 accelerators on one host",
    fails="8 accelerators on 4 hosts",
    not_applicable_if=rule.free_in_open,
    value=lambda case: _num_accelerators(case) / rule.num_hosts(case.run),
    compare=">",
    limit=lambda case: case.checkpoints.min_per_host,
    evidence=lambda case: case.run.summary.file,
    show=("{:g}", "more than {}"),
    proof=lambda case, value, _: (
        f"{_num_accelerators(case)} accelerators / {rule.num_hosts(case.run)} hosts = {value:g}"
    ),
    fix="Use fewer hosts.",
    otherwise=lambda value, limit: Verdict.WARNING if value == limit else Verdict.FAIL,
)


@rule.run_rule(
    id="checkpoint.subset",
    title="In CLOSED a part of the ranks stands for all only where the edition allows it",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="4.3.5",
    formula="no subset, or model and number of accelerators are those of the edition",
    passes="llama3-8b, checkpoint.mode subset, 8 accelerators",
    fails="llama3-70b, checkpoint.mode subset, in v3.0",
)
def _check_subset(case: rule.RunCase) -> Iterator[Finding]:
    run, subset = case.run, case.checkpoints.subset
    model, _ = run.workload()
    if not is_subset(run) or not case.is_closed:
        yield Finding(verdict=Verdict.PASS, evidence=run.config.file, proof="no subset, or not in CLOSED")
        return
    accelerators = _num_accelerators(case)
    yield pass_if(
        model in subset.models and accelerators == subset.num_accelerators,
        evidence=run.config.file,
        value=f"{model} on {accelerators}",
        limit=f"{', '.join(sorted(subset.models))} on {subset.num_accelerators}",
        proof=f"a subset of {model} on {accelerators} accelerators",
        fix="Repeat the run with all ranks.",
    )


@rule.run_rule(
    id="checkpoint.memory",
    title="The checkpoint fits into the memory of its accelerators",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="4.3.4, by each accelerator's own memory",
    formula=(
        "memory of an accelerator of this type x accelerators >= checkpoint_size_GB; without a type a "
        "warning, if the smallest of the edition is enough (else not checked)"
    ),
    passes="8 x 180 GB of b200, 105 GB written",
    fails="8 x 80 GB of h100, 912 GB written",
)
def _check_accelerator_memory(case: rule.RunCase) -> Iterator[Finding]:
    run, memory_gb = case.run, case.checkpoints.accelerator_memory_gb
    accelerator = run.accelerator() or case.checkpoints.unnamed_accelerator
    if not accelerator:
        yield _judge_unnamed_accelerator(case)
        return
    each_gb, accelerators = memory_gb.get(accelerator, 0.0), _num_accelerators(case)
    size, total = checkpoint_gib(run), each_gb * accelerators
    yield pass_if(
        total >= size,
        evidence=run.summary.file,
        value=f"{size:g} GB",
        limit=f"{total:g} GB",
        proof=(
            f"{accelerators} x {each_gb:g} GB of {accelerator} {'>=' if total >= size else '<'} {size:g} GB"
            if accelerator in memory_gb
            else f"{accelerator} is not an accelerator of {case.edition.edition}: {', '.join(memory_gb)}"
        ),
        fix="Name the accelerator that is simulated, with enough of them.",
    )


def _judge_unnamed_accelerator(case: rule.RunCase) -> Finding:
    """By the smallest accelerator of the edition: published metadata may name none."""
    run, size = case.run, checkpoint_gib(case.run)
    name, each_gb = min(case.checkpoints.accelerator_memory_gb.items(), key=lambda entry: entry[1])
    accelerators = _num_accelerators(case)
    total = each_gb * accelerators
    return violation(
        evidence=run.metadata.file,
        value=f"{size:g} GB",
        limit=f"{total:g} GB",
        proof=(
            f"the metadata name no accelerator; {accelerators} x {each_gb:g} GB of {name}, the smallest, "
            f"{'>=' if total >= size else '<'} {size:g} GB"
        ),
        fix="Let the submitter name the accelerator that was simulated.",
        verdict=Verdict.WARNING if total >= size else Verdict.NOT_CHECKED,
    )


@rule.result_rule(
    id="checkpoint.ratio",
    title="More is written than the hosts can keep in memory",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="4.3.1, by all that was written and not by one checkpoint",
    formula="checkpoint_size_GB x writes > memory_multiple x sum of the hosts' memory (else warning)",
    passes="10 x 105 GiB on one host of 256 GiB",
    fails="10 x 105 GiB on one host of 512 GiB (a warning)",
)
def _check_data_ratio(case: rule.ResultCase) -> Iterator[Finding]:
    counts = [(run, requested_counts(run)[0]) for run in case.result.run_dirs()]
    written = [(run, writes) for run, writes in counts if writes]
    if not written:
        raise MissingFact("nothing was written", where=case.result.name)
    total = sum(checkpoint_gib(run) * writes for run, writes in written)
    first, _ = written[0]
    rule.require_all_hosts(first)
    memory, multiple = sum(first.summary.numbers("host_memory_GB")), case.checkpoints.memory_multiple
    holds = total > multiple * memory
    yield pass_if(
        holds,
        evidence=first.summary.file,
        value=f"{total:g} GiB",
        limit=f"{multiple * memory:g} GiB",
        proof=f"{total:g} GiB written {'>' if holds else '<='} {multiple:g} x {memory:g} GiB of memory",
        fix="Let the reviewer confirm that caches were cleared before reading.",
        otherwise=Verdict.WARNING,
    )


@rule.run_rule(
    id="checkpoint.size",
    title="A checkpoint has the size that its model requires",
    editions=rule.LATER,
    benchmarks=rule.CHECKPOINTING,
    source="ours, by the edition's table 2 and by the model's own architecture, which differ for llama3-1t",
    formula=(
        "checkpoint_size_GB is within size_tolerance of one of both (of a subset: of its share), else warning"
    ),
    passes="llama3-8b with 104.7 GiB",
    fails="llama3-8b with 10 GiB (a warning)",
)
def _check_size(case: rule.RunCase) -> Iterator[Finding]:
    model, size = _model(case), checkpoint_gib(case.run)
    tolerance = case.checkpoints.size_tolerance
    share = _num_accelerators(case) / model.closed_processes if is_subset(case.run) else 1.0
    stated, by_architecture = share * model.size_gib, share * model.architecture_gib
    yield pass_if(
        any(abs(size - expected) <= tolerance * expected for expected in (stated, by_architecture)),
        evidence=case.run.summary.file,
        value=f"{size:g} GiB",
        limit=f"{stated:g} or {by_architecture:g} GiB +- {tolerance:.0%}",
        proof=f"{size:g} GiB, stated are {stated:g} GiB, by its architecture {by_architecture:g} GiB",
        fix="Let the reviewer see what was written.",
        otherwise=Verdict.WARNING,
    )
