"""Rules on a checkpointing: what was written and read, by how many processes, and how far apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.submission.finding import Finding, Verdict
from penstock.submission.parsed_file import Unknown
from penstock.submission.recomputed_metrics import Interval, durations_of, interval_of
from penstock.submission.rules.host_rules import num_hosts_of
from penstock.submission.rules.rule import (
    CHECKPOINTING,
    LATER,
    NEWEST,
    JobRule,
    Rule,
    is_closed,
    judged,
    not_applicable,
    require_all_hosts,
)
from penstock.submission.rules.system_rules import SOLUTION, description_of

if TYPE_CHECKING:
    from penstock.submission.edition import Edition, Model
    from penstock.submission.result_files import Job, Result


def counts_of(job: Job) -> tuple[int, int]:
    """The writes and reads that were asked for; -1 was an older word for none."""
    writes, reads = (job.metadata.whole("args", f"num_checkpoints_{way}") for way in ("write", "read"))
    return max(writes, 0), max(reads, 0)


def is_subset(job: Job) -> bool:
    """Whether a part of the ranks stands for all."""
    path = ("workload", "checkpoint", "mode")
    by_mode = job.config.has(*path) and job.config.text(*path).lower() == "subset"
    option = ("args", "checkpoint_subset")
    return by_mode or (job.metadata.has(*option) and job.metadata.flag(*option))


def size_gib_of(job: Job) -> float:
    """One checkpoint, over all ranks."""
    return job.summary.number("metric", "checkpoint_size_GB")


def _model(job: Job, edition: Edition) -> Model:
    name, _ = job.workload()
    models = edition.of_checkpoints().models
    if name not in models:
        raise Unknown(f"{name} is no model of {edition.edition}", where=job.metadata.file)
    return models[name]


def _write_and_read(result: Result) -> tuple[Interval, Interval, Job] | None:
    """The times of two invocations, and the second; None where there is one. In the order of their names."""
    if not result.runs:
        raise Unknown("there are no runs", where=result.name)
    if len(result.runs) != 2:
        return None
    first, second = (run.jobs[0] for run in result.runs)
    return interval_of(first), interval_of(second), second


class Fsync(JobRule):
    """Durable writes."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.fsync"
    title = "Every checkpoint is synced"
    source = "4.3.2"
    formula = "checkpoint.fsync is true in the run's configuration"
    passes = "fsync: true"
    fails = "fsync: false"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for an invocation."""
        synced = job.config.flag("workload", "checkpoint", "fsync")
        yield judged(
            synced,
            evidence=job.config.file,
            value=str(synced).lower(),
            limit="true",
            proof=f"checkpoint.fsync is {str(synced).lower()}",
            fix="Repeat the run with fsync.",
        )


class Processes(JobRule):
    """The number of processes."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.processes"
    title = "As many processes took part as the model asks"
    source = "4.6.1, 4.6.4; in whatever case the tool wrote the division"
    formula = (
        "CLOSED: processes == the model's, of a subset == the subset's; OPEN: a positive multiple of the "
        "model's unit; and the summary has as many accelerators"
    )
    passes = "llama3-70b on 64 processes"
    fails = "llama3-70b on 60 processes, in CLOSED"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """A finding for the number, and one for the summary's."""
        model, found = _model(job, edition), job.metadata.whole("num_processes")
        if is_subset(job):
            part = edition.of_checkpoints().subset.num_accelerators
            asked, kept = f"{part}", found == part
        elif is_closed(result):
            asked, kept = f"{model.closed_processes}", found == model.closed_processes
        else:
            asked, kept = f"a multiple of {model.open_unit}", found > 0 and found % model.open_unit == 0
        yield judged(
            kept,
            evidence=job.metadata.file,
            value=found,
            limit=asked,
            proof=f"{found} processes, asked for is {asked}",
            fix="Repeat the run with this number of processes.",
        )
        summed = job.summary.whole("num_accelerators")
        yield judged(
            summed == found,
            evidence=job.summary.file,
            value=summed,
            limit=found,
            proof=f"the summary has {summed} accelerators, the metadata {found} processes",
            fix="Hand in the files of one run.",
        )


class PerHost(JobRule):
    """Processes on each host."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.hosts"
    title = "In CLOSED every host has several accelerators"
    source = '4.6.2 says "more than 4", its table "minimal 4": exactly 4 is a warning'
    formula = "num_accelerators / num_hosts > min_per_host; equal is a warning"
    passes = "8 accelerators on one host"
    fails = "8 accelerators on 4 hosts"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for an invocation."""
        if not is_closed(result):
            yield not_applicable(job.name, "OPEN leaves this free")
            return
        accelerators, hosts = job.summary.whole("num_accelerators"), num_hosts_of(job)
        least = edition.of_checkpoints().min_per_host
        yield judged(
            accelerators > least * hosts,
            evidence=job.summary.file,
            value=f"{accelerators / hosts:g}",
            limit=f"more than {least}",
            proof=f"{accelerators} accelerators / {hosts} hosts = {accelerators / hosts:g}",
            fix="Use fewer hosts.",
            otherwise=Verdict.WARNING if accelerators == least * hosts else Verdict.FAIL,
        )


class AcceleratorMemory(JobRule):
    """The checkpoint fits."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.memory"
    title = "The checkpoint fits into the memory of its accelerators"
    source = "4.3.4, by each accelerator's own memory"
    formula = "memory of an accelerator of this type x accelerators >= checkpoint_size_GB"
    passes = "8 x 180 GB of b200, 105 GB written"
    fails = "8 x 80 GB of h100, 912 GB written"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for an invocation."""
        checkpoints = edition.of_checkpoints()
        kind, known = job.accelerator() or checkpoints.unnamed_accelerator, checkpoints.accelerator_memory_gb
        if not kind:
            raise Unknown("there is no field accelerator", where=job.metadata.file)
        each, accelerators, size = (
            known.get(kind, 0.0),
            job.summary.whole("num_accelerators"),
            size_gib_of(job),
        )
        kept = each * accelerators >= size
        yield judged(
            kept,
            evidence=job.summary.file,
            value=f"{size:g} GB",
            limit=f"{each * accelerators:g} GB",
            proof=(
                f"{accelerators} x {each:g} GB of {kind} {'>=' if kept else '<'} {size:g} GB"
                if kind in known
                else f"{kind} is no accelerator of {edition.edition}: {', '.join(known)}"
            ),
            fix="Name the accelerator that is simulated, with enough of them.",
        )


class SubsetRun(JobRule):
    """A part for all."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.subset"
    title = "In CLOSED a part of the ranks stands for all only where the edition lets it"
    source = "4.3.5"
    formula = (
        "no subset, or its model is of the edition's list and it has the edition's number of accelerators"
    )
    passes = "llama3-8b, checkpoint.mode subset, 8 accelerators"
    fails = "llama3-70b, checkpoint.mode subset, in v3.0"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for an invocation."""
        subset, (model, _) = edition.of_checkpoints().subset, job.workload()
        if not is_subset(job) or not is_closed(result):
            yield judged(kept=True, evidence=job.config.file, proof="no subset, or not in CLOSED")
            return
        accelerators = job.summary.whole("num_accelerators")
        kept = model in subset.models and accelerators == subset.num_accelerators
        yield judged(
            kept,
            evidence=job.config.file,
            value=f"{model} on {accelerators}",
            limit=f"{', '.join(sorted(subset.models))} on {subset.num_accelerators}",
            proof=f"a subset of {model} on {accelerators} accelerators",
            fix="Repeat the run with all ranks.",
        )


class Counts(JobRule):
    """Ten and ten."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.counts"
    title = "In CLOSED ten checkpoints are written and ten read, or none; and as many as were asked for"
    source = "tables 3 and 4, 4.7.1; -1 means none"
    formula = "CLOSED: each number is the edition's or 0; per_epoch_stats has as many writes and reads"
    passes = "--num-checkpoints-write 10 --num-checkpoints-read 0"
    fails = "--num-checkpoints-write 5"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """Two findings for an invocation."""
        asked, full = counts_of(job), edition.of_checkpoints().num_checkpoints
        kept = not is_closed(result) or (set(asked) <= {0, full} and any(asked))
        yield judged(
            kept,
            evidence=job.metadata.file,
            value=f"{asked[0]} writes, {asked[1]} reads",
            limit=f"{full} or 0",
            proof=f"{asked[0]} writes and {asked[1]} reads were asked for",
            fix=f"Repeat the run with {full} of each.",
        )
        if not job.stats:
            raise Unknown("there is no per_epoch_stats.json of a rank", where=job.name)
        done = tuple(len(durations_of(job.stats[0], prefix)) for prefix in ("save", "load"))
        yield judged(
            done == asked,
            evidence=job.stats[0].file if job.stats else job.name,
            value=f"{done[0]} writes, {done[1]} reads",
            limit=f"{asked[0]} writes, {asked[1]} reads",
            proof=f"{done[0]} writes and {done[1]} reads are in the statistics",
            fix="Hand in the files of one whole run.",
        )


class Invocations(Rule):
    """One invocation, or two."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.invocations"
    title = "All is written and read in one invocation, or written in one and then read in another"
    source = "2.1.23, 4.7.1; in whatever case the tool wrote the division"
    formula = "at most max_invocations leaves; CLOSED: (10, 10), or (10, 0) and then (0, 10) without overlap"
    passes = "(10, 0), then (0, 10)"
    fails = "(10, 0), (0, 5), (0, 5)"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding."""
        if not result.runs:
            raise Unknown("there are no runs", where=result.name)
        checkpoints = edition.of_checkpoints()
        full, found = checkpoints.num_checkpoints, [counts_of(job) for job in result.jobs()]
        ways = [[(full, full)], [(full, 0), (0, full)]]
        kept = len(found) <= checkpoints.max_invocations and (not is_closed(result) or found in ways)
        told = ", ".join(str(counts) for counts in found)
        overlap = ""
        if kept and (times := _write_and_read(result)):
            first, second, _ = times
            overlap = "; the second began before the first" if second.begin < first.begin else ""
        yield judged(
            kept and not overlap,
            evidence=result.name,
            value=told,
            limit=" or ".join(str(way) for way in ways),
            proof=f"{len(found)} invocations with (writes, reads) of {told}{overlap}",
            fix="Repeat it in one invocation, or in one that writes and one that reads.",
        )


class Gap(Rule):
    """Time to flush caches."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.gap"
    title = "Reading begins soon after writing ended"
    source = "4.7.1, by the marks that the tool itself makes"
    formula = "begin of reading - end of writing <= max_gap_s; below 0 the clocks differ (warning)"
    passes = "20 seconds"
    fails = "31 seconds"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding."""
        times = _write_and_read(result)
        if times is None:
            yield not_applicable(result.name, "there are no two invocations")
            return
        first, second, job = times
        gap_s, most_s = (second.begin - first.end).total_seconds(), edition.of_checkpoints().max_gap_s
        yield judged(
            0 <= gap_s <= most_s,
            evidence=job.metadata.file,
            value=f"{gap_s:g} s",
            limit=f"{most_s:g} s",
            proof=f"{gap_s:g} s lie between the two, at most {most_s:g} s may",
            fix="Compare the hosts' clocks." if gap_s < 0 else "Repeat it with less time between the two.",
            otherwise=Verdict.WARNING if gap_s < 0 else Verdict.FAIL,
        )


class TotalTime(Rule):
    """How long all of it took."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.duration"
    title = "The time from the first write to the last read is known"
    source = "4.7.2"
    formula = "end of the last invocation - begin of the first > 0 (else warning)"
    passes = "36 minutes"
    fails = "an invocation that ended before the first began (a warning)"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding."""
        if not result.runs:
            raise Unknown("there are no runs", where=result.name)
        times = [interval_of(job) for job in result.jobs()]
        total_s = (times[-1].end - times[0].begin).total_seconds()
        yield judged(
            total_s > 0,
            evidence=result.name,
            value=f"{total_s:g} s",
            limit="more than 0 s",
            proof=f"{total_s:g} s from the first begin to the last end",
            fix="Compare the hosts' clocks.",
            otherwise=Verdict.WARNING,
        )


class Remap(Rule):
    """A declared change of hosts."""

    editions = NEWEST
    benchmarks = CHECKPOINTING
    id = "checkpoint.remap"
    title = "A declared time to remap was spent"
    source = "4.7.3"
    formula = (
        "gap >= min_remap_share x remap_time_in_seconds; remapping beside simultaneous access is a warning"
    )
    passes = "remap_time_in_seconds 0, or 30 with a gap of 20 s"
    fails = "remap_time_in_seconds 60 with a gap of 20 s"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding, and one more where both ways are declared."""
        described = description_of(result)
        capabilities = (*SOLUTION, "capabilities")
        declared_s = described.number(*capabilities, "remap_time_in_seconds")
        share = edition.of_checkpoints().min_remap_share
        times = _write_and_read(result)
        gap_s = (times[1].begin - times[0].end).total_seconds() if times else 0.0
        yield judged(
            gap_s >= share * declared_s,
            evidence=described.file,
            value=f"{gap_s:g} s",
            limit=f"{share * declared_s:g} s",
            proof=f"{declared_s:g} s to remap are declared, {gap_s:g} s lie between writing and reading",
            fix="Declare the time that remapping takes, and let it pass between two invocations.",
        )
        both = all(described.flag(*capabilities, f"simultaneous_{way}") for way in ("write", "read"))
        if declared_s > 0 and both:
            yield judged(
                kept=False,
                evidence=described.file,
                proof="time to remap is declared beside simultaneous writes and reads, which need none",
                fix="Declare the one or the other.",
                otherwise=Verdict.WARNING,
            )


class SharedAccess(JobRule):
    """Several hosts at once."""

    editions = NEWEST
    benchmarks = CHECKPOINTING
    id = "checkpoint.shared"
    title = "Hosts that work at once are declared to"
    source = "4.7.4, by the keys of the description's schema"
    formula = "num_hosts 1, or simultaneous_write and simultaneous_read are declared (else warning)"
    passes = "one host"
    fails = "two hosts, simultaneous_read: false (a warning)"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for an invocation."""
        hosts, described = num_hosts_of(job), description_of(result)
        missing = [
            f"simultaneous_{way}"
            for way in ("write", "read")
            if not described.flag(*SOLUTION, "capabilities", f"simultaneous_{way}")
        ]
        yield judged(
            hosts == 1 or not missing,
            evidence=described.file,
            value=", ".join(missing),
            limit="simultaneous_write, simultaneous_read",
            proof=f"{hosts} hosts; {', '.join(missing) or 'nothing'} is declared false",
            fix="Declare what the system can, and let the reviewer see that it did.",
            otherwise=Verdict.WARNING,
        )


class DataRatio(Rule):
    """More than caches hold."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.ratio"
    title = "More is written than the hosts can keep in memory"
    source = "4.3.1, by all that was written and not by one checkpoint"
    formula = "checkpoint_size_GB x writes > memory_multiple x sum of the hosts' memory (else warning)"
    passes = "10 x 105 GiB on one host of 256 GiB"
    fails = "10 x 105 GiB on one host of 512 GiB (a warning)"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding."""
        written = [(job, counts_of(job)[0]) for job in result.jobs()]
        writing = [(job, count) for job, count in written if count]
        if not writing:
            raise Unknown("nothing was written", where=result.name)
        total = sum(size_gib_of(job) * count for job, count in writing)
        job = writing[0][0]
        require_all_hosts(job)
        memory = sum(job.summary.numbers("host_memory_GB"))
        multiple = edition.of_checkpoints().memory_multiple
        kept = total > multiple * memory
        yield judged(
            kept,
            evidence=job.summary.file,
            value=f"{total:g} GiB",
            limit=f"{multiple * memory:g} GiB",
            proof=f"{total:g} GiB written {'>' if kept else '<='} {multiple:g} x {memory:g} GiB of memory",
            fix="Let the reviewer confirm that caches were cleared before reading.",
            otherwise=Verdict.WARNING,
        )


class Size(JobRule):
    """The checkpoint is whole."""

    editions = LATER
    benchmarks = CHECKPOINTING
    id = "checkpoint.size"
    title = "A checkpoint is as large as its model asks"
    source = "ours, by the edition's table 2 and by the model's own architecture, which differ for llama3-1t"
    formula = (
        "checkpoint_size_GB is within size_tolerance of one of both (of a subset: of its share), else warning"
    )
    passes = "llama3-8b with 104.7 GiB"
    fails = "llama3-8b with 10 GiB (a warning)"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for an invocation."""
        model, size = _model(job, edition), size_gib_of(job)
        tolerance = edition.of_checkpoints().size_tolerance
        share = job.summary.whole("num_accelerators") / model.closed_processes if is_subset(job) else 1.0
        asked = [share * model.size_gib, share * model.architecture_gib]
        kept = any(abs(size - each) <= tolerance * each for each in asked)
        yield judged(
            kept,
            evidence=job.summary.file,
            value=f"{size:g} GiB",
            limit=f"{asked[0]:g} or {asked[1]:g} GiB +- {tolerance:.0%}",
            proof=f"{size:g} GiB, stated are {asked[0]:g} GiB, by its architecture {asked[1]:g} GiB",
            fix="Let the reviewer see what was written.",
            otherwise=Verdict.WARNING,
        )
