"""Rules on the description of the system: its schema, its name, and that the runs were made on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.submission.parsed_file import Document, Unknown
from penstock.submission.rules.rule import BOTH, NEWEST, JobRule, Rule, judged, require_all_hosts
from penstock.submission.system_description import problems

if TYPE_CHECKING:
    from penstock.submission.edition import Edition
    from penstock.submission.finding import Finding
    from penstock.submission.result_files import Job, Result

SOLUTION = ("system_under_test", "solution")
CLIENTS = ("system_under_test", "clients")


def description_of(result: Result) -> Document:
    """The description of the result's system."""
    if not result.systems:
        raise Unknown(
            f"there is no systems/{result.place.system}.yaml",
            where=result.around.name,
            fix="Describe the system there.",
        )
    return result.systems[0]


class Schema(Rule):
    """The description's schema."""

    editions = NEWEST
    benchmarks = BOTH
    id = "system.schema"
    title = "The description of the system keeps its schema"
    source = "schema of the system's description"
    formula = "every key is known and has a value of its type; each breach is named with its line"
    passes = "deployment: onprem"
    fails = "deployment: basement"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding for each breach."""
        described = description_of(result)
        found = problems(described)
        for problem in found:
            yield judged(
                kept=False,
                evidence=described.file,
                value=f"line {problem.line}",
                proof=str(problem),
                fix="Mend this line.",
            )
        if not found:
            yield judged(kept=True, evidence=described.file, proof="all keys and values are of the schema")


class SystemName(Rule):
    """The description's name."""

    editions = NEWEST
    benchmarks = BOTH
    id = "system.name"
    title = "The description names the system as its results do"
    source = "2.1.8"
    formula = "solution.submission_name == the folder in results/"
    passes = "results/fast/, submission_name: fast"
    fails = "results/fast/, submission_name: faster"

    def judge(self, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002 - the rule's signature
        """One finding."""
        described = description_of(result)
        named, folder = described.text(*SOLUTION, "submission_name"), result.place.system
        yield judged(
            named == folder,
            evidence=described.file,
            value=named,
            limit=folder,
            proof=f"submission_name is {named}, the results call it {folder}",
            fix="Give both one name.",
        )


class SameSystem(JobRule):
    """The runs were made on what is described."""

    editions = NEWEST
    benchmarks = BOTH
    id = "system.hosts"
    title = "The runs had the clients that the description tells of"
    source = "2.1.9"
    formula = (
        "num_hosts == sum of the clients' quantities; with one kind of client, the mean memory of a host is "
        "within the edition's tolerance of its memory_capacity; without multi_host there is one host"
    )
    passes = "2 clients of 256 GiB described, 2 hosts with 512 GiB together"
    fails = "2 clients described, 4 hosts in the runs"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """A finding for the number of hosts, and one for their memory."""
        require_all_hosts(job)
        described = description_of(result)
        num_hosts = job.summary.whole("num_hosts")
        kinds = described.value(*CLIENTS)
        if not isinstance(kinds, list):
            raise Unknown("system_under_test.clients is no list", where=described.file)
        clients = [Document(file=described.file, tree=kind) for kind in kinds]
        expected = sum(client.whole("quantity") for client in clients)
        yield judged(
            num_hosts == expected,
            evidence=job.summary.file,
            value=f"{num_hosts} hosts",
            limit=f"{expected} hosts",
            proof=f"{num_hosts} hosts in the run, {expected} clients in {described.file}",
            fix="Describe the clients that ran, in the number that ran.",
        )
        if not described.flag(*SOLUTION, "capabilities", "multi_host"):
            yield judged(
                num_hosts == 1,
                evidence=job.summary.file,
                value=f"{num_hosts} hosts",
                limit="1 host",
                proof=f"{num_hosts} hosts ran, of a system that serves one",
                fix="Say multi_host: true if the system serves several hosts.",
            )
        if len(clients) == 1 and num_hosts > 0:
            yield self._memory(job, clients[0], num_hosts, edition)

    def _memory(self, job: Job, client: Document, num_hosts: int, edition: Edition) -> Finding:
        stated_gib = client.number("chassis", "memory_capacity")
        measured_gib = sum(job.summary.numbers("host_memory_GB")) / num_hosts
        tolerance = edition.of_time().memory_tolerance
        kept = abs(measured_gib - stated_gib) <= tolerance * stated_gib
        return judged(
            kept,
            evidence=job.summary.file,
            value=f"{measured_gib:.6g} GiB",
            limit=f"{stated_gib:g} GiB +- {tolerance:.0%}",
            proof=(
                f"a host has {measured_gib:.6g} GiB on average, {'within' if kept else 'not within'} "
                f"{tolerance:.0%} of the described {stated_gib:g} GiB"
            ),
            fix="Describe the memory of the clients that ran, in GiB.",
        )
