"""Rules on the hosts of a run: as many as were named, alike, with as many accelerators on each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.submission.finding import Finding, Verdict
from penstock.submission.parsed_file import Unknown
from penstock.submission.rules.rule import LATER, JobRule, judged, require_all_hosts

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.result_files import Job, Result


def num_hosts_of(job: Job) -> int:
    """The hosts of a run; at least one."""
    found = job.summary.whole("num_hosts")
    if found < 1:
        raise Unknown(f"num_hosts is {found}", where=job.summary.file)
    return found


class FewAccelerators(JobRule):
    """A host alone."""

    editions = LATER
    id = "hosts.accelerators"
    title = "A single host simulates several accelerators"
    source = "3.3.3, an advice"
    formula = "num_hosts > 1, or num_accelerators >= the edition's number (else warning)"
    passes = "one host, 4 accelerators"
    fails = "one host, 3 accelerators (a warning)"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a run."""
        hosts, accelerators = num_hosts_of(job), job.summary.whole("num_accelerators")
        least = edition.of_time().min_accelerators_alone
        yield judged(
            hosts > 1 or accelerators >= least,
            evidence=job.summary.file,
            value=accelerators,
            limit=least,
            proof=f"{accelerators} accelerators on {hosts} hosts; one host should have {least}",
            fix="Simulate more accelerators on this host.",
            otherwise=Verdict.WARNING,
        )


class SingleHost(JobRule):
    """One host where one is said to be."""

    editions = LATER
    id = "hosts.single"
    title = "A run on one host was started on one"
    source = "3.3.4"
    formula = "num_hosts > 1, or at most one host in the metadata's args.hosts"
    passes = "num_hosts 1, hosts [node1]"
    fails = "num_hosts 1, hosts [node1, node2]"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a run."""
        hosts, named = num_hosts_of(job), job.metadata.value("args", "hosts")
        if isinstance(named, str):
            named = named.replace(",", " ").split()
        count = len(named) if isinstance(named, list) else 0
        kept = hosts > 1 or count <= 1
        yield judged(
            kept,
            evidence=job.metadata.file,
            value=f"{count} named",
            limit=f"{hosts} in the summary",
            proof=f"{count} hosts were named, the summary has {hosts}",
            fix="Repeat the run on the hosts that are to be handed in.",
        )


class EqualAccelerators(JobRule):
    """As many on each host."""

    editions = LATER
    id = "hosts.equal"
    title = "Every host has as many accelerators"
    source = "3.3.6"
    formula = "num_accelerators is a multiple of num_hosts"
    passes = "8 accelerators on 2 hosts"
    fails = "9 accelerators on 2 hosts"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a run."""
        hosts, accelerators = num_hosts_of(job), job.summary.whole("num_accelerators")
        rest = accelerators % hosts
        yield judged(
            rest == 0,
            evidence=job.summary.file,
            value=rest,
            limit=0,
            proof=f"{accelerators} accelerators / {hosts} hosts leaves {rest}",
            fix="Give every host as many accelerators.",
        )


class AlikeHosts(JobRule):
    """Hosts that are alike."""

    editions = LATER
    id = "hosts.alike"
    title = "Hosts are alike in memory and cores"
    source = "3.3.7, an advice"
    formula = (
        "largest / smallest of host_memory_GB and of host_cpu_count <= the edition's ratio (else warning); "
        "lists without one entry a host cannot tell, and are a warning"
    )
    passes = "hosts of 256 and 256 GiB"
    fails = "hosts of 256 and 512 GiB (a warning)"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for memory, one for cores."""
        require_all_hosts(job)
        hosts, most = num_hosts_of(job), edition.of_time().max_ratio_of_hosts
        for name in ("host_memory_GB", "host_cpu_count"):
            found = job.summary.numbers(name)
            is_sound = len(found) == hosts and min(found) > 0
            ratio = max(found) / min(found) if is_sound else 0.0
            yield judged(
                is_sound and ratio <= most,
                evidence=job.summary.file,
                value=f"{ratio:.4g}" if is_sound else f"{len(found)} entries",
                limit=f"{most:g}",
                proof=(
                    f"{name}: {max(found):g} / {min(found):g} = {ratio:.4g}"
                    if is_sound
                    else f"{name} has {len(found)} entries for {hosts} hosts, so nobody can compare them"
                ),
                fix="Let the reviewer compare the hosts.",
                otherwise=Verdict.WARNING,
            )
