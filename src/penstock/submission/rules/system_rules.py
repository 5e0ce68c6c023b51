"""Rules about the description of the system: its schema, its name, and the hosts that the runs used."""

from collections.abc import Iterator

from penstock.submission.finding import Finding, Verdict, pass_if, violation
from penstock.submission.parsed_file import MissingFact, ParsedFile
from penstock.submission.rules import rule
from penstock.submission.system_description import find_schema_problems

SOLUTION = ("system_under_test", "solution")
CLIENTS = ("system_under_test", "clients")


def require_description(case: rule.ResultCase) -> ParsedFile:
    """The description of the result's system."""
    result = case.result
    if not result.systems:
        raise MissingFact(
            f"there is no systems/{result.location.system}.yaml",
            where=result.context.name,
            fix="Describe the system there.",
        )
    return result.systems[0]


@rule.result_rule(
    id="system.schema",
    title="The description of the system follows its schema",
    editions=rule.NEWEST,
    benchmarks=rule.EVERY,
    source="schema of the system's description",
    formula=(
        "every key is known and has a value of its type, and keys that belong together agree; each problem "
        "is named with its line. What reviewers accepted is a warning: facts of a server that are null for "
        "other hardware, and a total_rack_units that its parts do not come to"
    ),
    passes="deployment: onprem",
    fails="deployment: basement",
)
def _check_schema(case: rule.ResultCase) -> Iterator[Finding]:
    yield from judge_schema(require_description(case))


def judge_schema(description: ParsedFile) -> Iterator[Finding]:
    """A finding for each problem of a description, else a pass."""
    problems = find_schema_problems(description)
    for problem in problems:
        yield violation(
            evidence=description.file,
            value=f"line {problem.line}",
            proof=str(problem),
            fix="Let a reviewer confirm it." if problem.is_accepted else "Correct this line.",
            verdict=Verdict.WARNING if problem.is_accepted else Verdict.FAIL,
        )
    if not problems:
        yield Finding(
            verdict=Verdict.PASS, evidence=description.file, proof="all keys and values follow the schema"
        )


rule.limit_rule(
    rule.ResultCase,
    id="system.name",
    title="The description names the system as its results do",
    editions=rule.NEWEST,
    benchmarks=rule.EVERY,
    source="2.1.8",
    formula="solution.submission_name == the folder in results/",
    passes="results/fast/, submission_name: fast",
    fails="results/fast/, submission_name: faster",
    value=lambda case: require_description(case).text(*SOLUTION, "submission_name"),
    compare="==",
    limit=lambda case: case.result.location.system,
    evidence=lambda case: require_description(case).file,
    proof="submission_name is {value}, the results call it {limit}",
    fix="Use one name for both.",
)


@rule.run_rule(
    id="system.hosts",
    title="The runs used the clients that are described",
    editions=rule.NEWEST,
    benchmarks=rule.BOTH,
    source="2.1.9",
    formula=(
        "num_hosts == sum of the clients' quantities; with one kind of client, the mean memory of a host is "
        "within the edition's tolerance of its memory_capacity; without multi_host there is one host"
    ),
    passes="2 clients of 256 GiB described, 2 hosts with 512 GiB together",
    fails="2 clients described, 4 hosts in the runs",
)
def _check_clients(case: rule.RunCase) -> Iterator[Finding]:
    """A finding for the number of hosts, and one for their memory."""
    run = case.run
    rule.require_all_hosts(run)
    description = require_description(case)
    hosts = run.summary.integer("num_hosts")
    kinds = description.value(*CLIENTS)
    if not isinstance(kinds, list):
        raise MissingFact("system_under_test.clients is not a list", where=description.file)
    clients = [ParsedFile(file=description.file, content=kind) for kind in kinds]
    expected = sum(client.integer("quantity") for client in clients)
    yield pass_if(
        hosts == expected,
        evidence=run.summary.file,
        value=f"{hosts} hosts",
        limit=f"{expected} hosts",
        proof=f"{hosts} hosts in the run, {expected} clients in {description.file}",
        fix="Describe the clients that ran, and how many of them did.",
    )
    if not description.boolean(*SOLUTION, "capabilities", "multi_host"):
        yield pass_if(
            hosts == 1,
            evidence=run.summary.file,
            value=f"{hosts} hosts",
            limit="1 host",
            proof=f"{hosts} hosts ran, of a system that serves one",
            fix="Say multi_host: true if the system serves several hosts.",
        )
    # The list of the hosts' memory is doubled or has gaps on real clusters, and only its sum is right. A mean
    # says something about a host only where all are of one kind.
    if len(clients) == 1 and hosts > 0:
        yield _judge_memory(case, clients[0], hosts)


def _judge_memory(case: rule.RunCase, client: ParsedFile, hosts: int) -> Finding:
    summary, tolerance = case.run.summary, case.timed.memory_tolerance
    described_gib = client.number("chassis", "memory_capacity")
    measured_gib = sum(summary.numbers("host_memory_GB")) / hosts
    holds = abs(measured_gib - described_gib) <= tolerance * described_gib
    return pass_if(
        holds,
        evidence=summary.file,
        value=f"{measured_gib:.6g} GiB",
        limit=f"{described_gib:g} GiB +- {tolerance:.0%}",
        proof=(
            f"a host has {measured_gib:.6g} GiB on average, {'within' if holds else 'not within'} "
            f"{tolerance:.0%} of the described {described_gib:g} GiB"
        ),
        fix="Describe the memory of the clients that ran, in GiB.",
    )
