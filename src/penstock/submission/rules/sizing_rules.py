"""Rules about the data set's size: enough steps, and more than memory holds; computed in exact fractions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from penstock.submission.finding import Finding, Verdict, not_checked, pass_if
from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.recomputed_metrics import num_accelerators, record_bytes
from penstock.submission.rules.rule import ALL, ResultCase, require_all_hosts, require_runs, result_rule
from penstock.workload.dataset_size import bytes_text, quotient_text

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.result_files import ResultDir, ResultRun

GIB: Final = 1 << 30
_SOURCE: Final = "v1.0 rules and sizing command; 3.1.2 of later editions"
_MEMORY_LIMIT: Final = re.compile(
    r"\b(\d+)\s*([MGT])i?B?\b[^&;|]*>\s*\S*memory\.(?:max|limit_in_bytes)", re.IGNORECASE
)
"""A shell command that limits a cgroup's memory, as descriptions quote it."""
_UNITS: Final = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def min_files(samples: Fraction, samples_per_file: int, edition: Edition) -> int:
    """Whole files for `samples`, rounded as the edition says."""
    exact = samples / samples_per_file
    return math.ceil(exact) if edition.sizing.rounding == "up" else math.floor(exact)


def _judge_each_run(case: ResultCase, judge: Callable[[ResultRun, ResultCase], Finding]) -> Iterator[Finding]:
    """One finding for each run: the clients of a run, which read one data set, are judged together."""
    require_runs(case.result)
    for run in case.result.runs:
        try:
            yield judge(run, case)
        except MissingFact as reason:
            yield not_checked(reason)


@result_rule(
    id="sizing.steps",
    title="The data set feeds every accelerator for enough steps an epoch",
    editions=ALL,
    source=_SOURCE,
    formula="files >= min_steps x batch x accelerators / samples a file, rounded as the edition says",
    passes="unet3d, batch 7, 2 accelerators: 7,000 files (500 x 7 x 2)",
    fails="the same with 6,999 files",
)
def _check_steps(case: ResultCase) -> Iterator[Finding]:
    yield from _judge_each_run(case, _judge_steps_of)


def _judge_steps_of(run: ResultRun, case: ResultCase) -> Finding:
    first, steps = run.dirs[0], case.edition.sizing.min_steps
    batch = first.config.integer("workload", "reader", "batch_size")
    per_file, files = _read_files(first)
    accelerators = num_accelerators(run)
    samples = steps * batch * accelerators
    needed = min_files(Fraction(samples), per_file, case.edition)
    return pass_if(
        files >= needed,
        evidence=first.summary.file,
        value=f"{files:,} files",
        limit=f"{needed:,} files",
        proof=(
            f"{steps} steps x {batch:,} samples x {accelerators:,} accelerators / "
            f"{per_file:,} samples a file = {quotient_text(Fraction(samples, per_file))} -> "
            f"{needed:,} files {'<=' if files >= needed else '>'} {files:,}"
        ),
        fix=f"Generate at least {needed:,} files and repeat the runs.",
    )


@result_rule(
    id="sizing.memory",
    title="The data set is several times larger than the memory of all hosts",
    editions=ALL,
    source=_SOURCE,
    formula=(
        "files >= memory_multiple x sum of the hosts' memory / record length / samples a file, rounded as "
        "the edition says; memory that the system description limits (a cgroup's memory.max) counts as "
        "limited, and is then left to the reviewer as a warning"
    ),
    passes="unet3d on one host of 256 GiB: 9,376 files of 146,600,628 bytes",
    fails="the same with 9,374 files",
)
def _check_memory(case: ResultCase) -> Iterator[Finding]:
    yield from _judge_each_run(case, _judge_memory_of)


def _judge_memory_of(run: ResultRun, case: ResultCase) -> Finding:
    """First by the memory that the hosts have, then by what they may use of it."""
    first, systems = run.dirs[0], case.result.systems
    require_all_hosts(first)
    hosts = tuple(memory for each in run.dirs for memory in _read_memory(each.summary, case.edition))
    physical = _compare_with_memory(first, hosts, case.edition)
    limit = stated_limit(systems)
    if physical.verdict is Verdict.PASS:
        return physical
    if limit is None:
        for system in systems:  # one that cannot be read may state a limit
            system.value()
        return physical
    limit_bytes, evidence = limit
    limited = tuple(min(memory, Fraction(limit_bytes)) for memory in hosts)
    return physical if limited == hosts else _compare_with_memory(first, limited, case.edition, evidence)


def _compare_with_memory(
    run: ResultDir, hosts: tuple[Fraction, ...], edition: Edition, limited_by: str = ""
) -> Finding:
    length = record_bytes(run)
    per_file, files = _read_files(run)
    multiple, memory = edition.sizing.memory_multiple, sum(hosts, Fraction(0))
    needed = min_files(multiple * memory / length, per_file, edition)
    kept = files >= needed
    note = f" (limited to this by {limited_by})" if limited_by else ""
    fix = f"Generate at least {needed:,} files and repeat the runs."
    verdict = Verdict.PASS if kept else Verdict.FAIL
    if kept and limited_by:  # only a person can tell whether the limit was in force
        verdict, fix = Verdict.WARNING, "Let the reviewer confirm that this limit held during the runs."
    return Finding(
        verdict=verdict,
        evidence=run.summary.file,
        value=f"{files:,} files",
        limit=f"{needed:,} files",
        proof=(
            f"{multiple} x {float(memory / GIB):.6g} GiB of memory{note} / {bytes_text(length)} B / "
            f"{per_file:,} samples a file -> {needed:,} files {'<=' if kept else '>'} {files:,}"
        ),
        fix="" if verdict is Verdict.PASS else fix,
    )


def _read_files(run: ResultDir) -> tuple[int, int]:
    """Samples in a file, and files."""
    per_file = run.summary.integer("num_samples_per_file")
    if per_file < 1:
        raise MissingFact("num_samples_per_file is not positive", where=run.summary.file)
    return per_file, run.summary.integer("num_files_train")


def _read_memory(summary: ParsedFile, edition: Edition) -> tuple[Fraction, ...]:
    """Each host's memory in bytes, or that of all where only the sum is right."""
    stated = summary.numbers("host_memory_GB")
    num_hosts = summary.integer("num_hosts")
    if edition.sizing.host_memory == "sum":
        if min(stated) < 0 or sum(stated) <= 0:
            raise MissingFact(f"host_memory_GB is {stated!r:.60}, which is no memory", where=summary.file)
        return (sum(map(Fraction, stated), Fraction(0)) * GIB,)
    if len(stated) != num_hosts or min(stated) <= 0:
        raise MissingFact(
            f"host_memory_GB has {len(stated)} entries, {sum(entry <= 0 for entry in stated)} of them empty, "
            f"for {num_hosts} hosts: the benchmark of this edition fills the list wrongly",
            where=summary.file,
            fix="Let the reviewer compare the hosts' memory with the number of files.",
        )
    return tuple(Fraction(entry) * GIB for entry in stated)


def stated_limit(systems: tuple[ParsedFile, ...]) -> tuple[int, str] | None:
    """The limit of a host's memory in bytes that the system description states, and its file."""
    limits = {
        (int(match[1]) * _UNITS[match[2].upper()], system.file)
        for system in systems
        if not system.problem
        for text in _strings(system.content)
        for match in _MEMORY_LIMIT.finditer(text)
    }
    return limits.pop() if len(limits) == 1 else None


def _strings(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | dict):
        for entry in content.values() if isinstance(content, dict) else content:
            yield from _strings(entry)
