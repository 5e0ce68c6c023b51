"""Rules on the data set's size: enough steps, and more than all hosts keep in memory; exact, by samples."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Final

from penstock.submission.finding import Finding, Verdict
from penstock.submission.parsed_file import Document, Unknown
from penstock.submission.recomputed_metrics import num_accelerators, record_bytes
from penstock.submission.rules.rule import ALL, Rule, not_checked, require_all_hosts, verdict_of
from penstock.workload.dataset_size import bytes_text, quotient_text

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.result_files import Job, Result, Run

GIB: Final = 1 << 30
_LIMIT: Final = re.compile(
    r"\b(\d+)\s*([MGT])i?B?\b[^&;|]*>\s*\S*memory\.(?:max|limit_in_bytes)", re.IGNORECASE
)
_UNITS: Final = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def min_files(samples: Fraction, samples_per_file: int, edition: Edition) -> int:
    """Whole files for `samples`, rounded as the edition says."""
    exactly = samples / samples_per_file
    return math.ceil(exactly) if edition.sizing.rounding == "up" else math.floor(exactly)


class _SizingRule(Rule):
    """What both sizes share: one finding a run, files against files."""

    editions = ALL
    source = "v1.0 rules and sizing command; 3.1.2 of later editions"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding a run, or the reason why it could not be judged."""
        if not result.runs:
            raise Unknown("there are no runs", where=result.name)
        for run in result.runs:
            try:
                yield self.judge_run(run, result, edition)
            except Unknown as reason:
                yield not_checked(reason)

    @abstractmethod
    def judge_run(self, run: Run, result: Result, edition: Edition) -> Finding:
        """One finding."""


class EnoughSteps(_SizingRule):
    """500 steps."""

    id = "sizing.steps"
    title = "The data set feeds every accelerator for enough steps an epoch"
    formula = "files >= min_steps x batch x accelerators / samples a file, rounded as the edition says"
    passes = "unet3d, batch 7, 2 accelerators: 7,000 files (500 x 7 x 2)"
    fails = "the same with 6,999 files"

    def judge_run(self, run: Run, result: Result, edition: Edition) -> Finding:  # noqa: ARG002
        """Files against the steps' files."""
        job = run.jobs[0]
        batch = job.config.whole("workload", "reader", "batch_size")
        per_file, files = _files(job)
        accelerators = num_accelerators(run)
        samples = edition.sizing.min_steps * batch * accelerators
        needed = min_files(Fraction(samples), per_file, edition)
        kept = files >= needed
        return Finding(
            verdict=verdict_of(kept),
            evidence=job.summary.file,
            value=f"{files:,} files",
            limit=f"{needed:,} files",
            proof=(
                f"{edition.sizing.min_steps} steps x {batch:,} samples x {accelerators:,} accelerators / "
                f"{per_file:,} samples a file = {quotient_text(Fraction(samples, per_file))} -> "
                f"{needed:,} files {'<=' if kept else '>'} {files:,}"
            ),
            fix="" if kept else f"Generate at least {needed:,} files and repeat the runs.",
        )


class EnoughForMemory(_SizingRule):
    """Five times memory."""

    id = "sizing.memory"
    title = "The data set is several times larger than the memory of all hosts"
    formula = (
        "files >= memory_multiple x sum of the hosts' memory / record length / samples a file, rounded as "
        "the edition says; memory that the system description limits (a cgroup's memory.max) counts as "
        "limited, and is then left to the reviewer as a warning"
    )
    passes = "unet3d on one host of 256 GiB: 9,376 files of 146,600,628 bytes"
    fails = "the same with 9,374 files"

    def judge_run(self, run: Run, result: Result, edition: Edition) -> Finding:
        """Files against the memory's files, first by what the hosts have, then by what they may use."""
        job = run.jobs[0]
        require_all_hosts(job)
        hosts = tuple(memory for each in run.jobs for memory in _hosts(each.summary, edition))
        physical = self._finding(job, hosts, edition, "")
        limit = stated_limit(result.systems)
        if physical.verdict is Verdict.PASS:
            return physical
        if limit is None:
            for system in result.systems:  # one that cannot be read may state a limit
                system.value()
            return physical
        limited_bytes, evidence = limit
        limited = tuple(min(memory, Fraction(limited_bytes)) for memory in hosts)
        if limited == hosts:
            return physical
        return self._finding(job, limited, edition, evidence)

    def _finding(self, job: Job, hosts: tuple[Fraction, ...], edition: Edition, limited_by: str) -> Finding:
        length = record_bytes(job)
        per_file, files = _files(job)
        multiple = edition.sizing.memory_multiple
        exactly = multiple * sum(hosts, Fraction(0)) / length
        needed = min_files(exactly, per_file, edition)
        kept = files >= needed
        verdict = Verdict.WARNING if kept and limited_by else verdict_of(kept)
        note = f" (limited to this by {limited_by})" if limited_by else ""
        gibibytes = float(sum(hosts, Fraction(0)) / GIB)
        return Finding(
            verdict=verdict,
            evidence=job.summary.file,
            value=f"{files:,} files",
            limit=f"{needed:,} files",
            proof=(
                f"{multiple} x {gibibytes:.6g} GiB of memory{note} / {bytes_text(length)} B / {per_file:,} "
                f"samples a file -> {needed:,} files {'<=' if kept else '>'} {files:,}"
            ),
            fix=_memory_fix(verdict, needed),
        )


def _memory_fix(verdict: Verdict, needed: int) -> str:
    if verdict is Verdict.FAIL:
        return f"Generate at least {needed:,} files and repeat the runs."
    if verdict is Verdict.WARNING:
        return "Let the reviewer confirm that this limit held during the runs."
    return ""


def _files(job: Job) -> tuple[int, int]:
    """Samples in a file, and files."""
    per_file = job.summary.whole("num_samples_per_file")
    if per_file < 1:
        raise Unknown("num_samples_per_file is not positive", where=job.summary.file)
    return per_file, job.summary.whole("num_files_train")


def _hosts(summary: Document, edition: Edition) -> tuple[Fraction, ...]:
    """Each host's memory in bytes, or all hosts' where only that is right; `Unknown` where none is."""
    stated = summary.numbers("host_memory_GB")
    num_hosts = summary.whole("num_hosts")
    if edition.sizing.host_memory == "sum":
        if min(stated) < 0 or sum(stated) <= 0:
            raise Unknown(f"host_memory_GB is {stated!r:.60}, which is no memory", where=summary.file)
        return (sum(map(Fraction, stated), Fraction(0)) * GIB,)
    if len(stated) != num_hosts or min(stated) <= 0:
        raise Unknown(
            f"host_memory_GB has {len(stated)} entries, {sum(entry <= 0 for entry in stated)} of them empty, "
            f"for {num_hosts} hosts: the benchmark of this edition fills the list wrongly",
            where=summary.file,
            fix="Let the reviewer compare the hosts' memory with the number of files.",
        )
    return tuple(Fraction(entry) * GIB for entry in stated)


def stated_limit(systems: tuple[Document, ...]) -> tuple[int, str] | None:
    """A host's memory as the system description limits it, in bytes, and the file; None if it does not."""
    found = {
        (int(match[1]) * _UNITS[match[2].upper()], system.file)
        for system in systems
        if not system.problem
        for text in _texts(system.tree)
        for match in _LIMIT.finditer(text)
    }
    return found.pop() if len(found) == 1 else None


def _texts(tree: object) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, list | dict):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(each)
