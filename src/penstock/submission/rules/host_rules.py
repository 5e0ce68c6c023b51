"""Rules about the hosts of a run: as many as were named, alike, with the same accelerators on each."""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

from penstock.submission.finding import Finding, Verdict, pass_if
from penstock.submission.parsed_file import ParsedFile
from penstock.submission.rules import rule


def _num_accelerators(case: rule.RunCase) -> int:
    return case.run.summary.integer("num_accelerators")


@rule.run_rule(
    id="hosts.accelerators",
    title="A single host simulates several accelerators",
    editions=rule.LATER,
    source="3.3.3, a recommendation",
    formula="num_hosts > 1, or num_accelerators >= the edition's number (else warning)",
    passes="one host, 4 accelerators",
    fails="one host, 3 accelerators (a warning)",
)
def _check_accelerators(case: rule.RunCase) -> Iterator[Finding]:
    hosts, accelerators = rule.num_hosts(case.run), _num_accelerators(case)
    recommended = case.timed.min_accelerators_alone
    yield pass_if(
        hosts > 1 or accelerators >= recommended,
        evidence=case.run.summary.file,
        value=accelerators,
        limit=recommended,
        proof=f"{accelerators} accelerators on {hosts} hosts; one host should have {recommended}",
        fix="Simulate more accelerators on this host.",
        otherwise=Verdict.WARNING,
    )


@rule.run_rule(
    id="hosts.single",
    title="A run on one host was started on one",
    editions=rule.LATER,
    source="3.3.4",
    formula="num_hosts > 1, or at most one host in the metadata's args.hosts",
    passes="num_hosts 1, hosts [node1]",
    fails="num_hosts 1, hosts [node1, node2]",
)
def _check_single_host(case: rule.RunCase) -> Iterator[Finding]:
    hosts, names = rule.num_hosts(case.run), case.run.metadata.value("args", "hosts")
    if isinstance(names, str):
        names = names.replace(",", " ").split()
    num_named = len(names) if isinstance(names, list) else 0
    yield pass_if(
        hosts > 1 or num_named <= 1,
        evidence=case.run.metadata.file,
        value=f"{num_named} named",
        limit=f"{hosts} in the summary",
        proof=f"{num_named} hosts were named, the summary has {hosts}",
        fix="Repeat the run on the hosts that are to be handed in.",
    )


rule.limit_rule(
    rule.RunCase,
    id="hosts.equal",
    title="Every host has the same number of accelerators",
    editions=rule.LATER,
    source="3.3.6",
    formula="num_accelerators is a multiple of num_hosts",
    passes="8 accelerators on 2 hosts",
    fails="9 accelerators on 2 hosts",
    value=lambda case: _num_accelerators(case) % rule.num_hosts(case.run),
    compare="==",
    limit=0,
    evidence=lambda case: case.run.summary.file,
    proof=lambda case, value, _: (
        f"{_num_accelerators(case)} accelerators / {rule.num_hosts(case.run)} hosts leaves {value}"
    ),
    fix="Give every host the same number of accelerators.",
)


_OF_HOST: Final = MappingProxyType(
    {"host_memory_GB": ("memory", "total"), "host_cpu_count": ("cpu", "num_logical_cores")}
)


def _numbers_of_hosts(case: rule.RunCase, name: str, num_hosts: int) -> tuple[float, ...]:
    """A list of the summary, which DLIO fills wrongly on clusters; else the same facts in the metadata."""
    summary, metadata = case.run.summary, case.run.metadata
    numbers = summary.numbers(name)
    path = ("system_info", "hosts")
    hosts = metadata.value(*path) if metadata.has(*path) else []
    if (len(numbers) == num_hosts and min(numbers) > 0) or not isinstance(hosts, list) or not hosts:
        return numbers
    return tuple(ParsedFile(file=metadata.file, content=host).number(*_OF_HOST[name]) for host in hosts)


@rule.run_rule(
    id="hosts.alike",
    title="Hosts are alike in memory and cores",
    editions=rule.LATER,
    source="3.3.7, a recommendation",
    formula=(
        "largest / smallest of host_memory_GB and of host_cpu_count <= the edition's ratio (else warning); "
        "without one entry a host the metadata's hosts are compared, and without these nothing (a warning)"
    ),
    passes="hosts of 256 and 256 GiB",
    fails="hosts of 256 and 512 GiB (a warning)",
)
def _check_alike_hosts(case: rule.RunCase) -> Iterator[Finding]:
    summary = case.run.summary
    rule.require_all_hosts(case.run)
    hosts, max_ratio = rule.num_hosts(case.run), case.timed.max_ratio_of_hosts
    for name in ("host_memory_GB", "host_cpu_count"):
        numbers = _numbers_of_hosts(case, name, hosts)
        is_comparable = len(numbers) == hosts and min(numbers) > 0
        ratio = max(numbers) / min(numbers) if is_comparable else 0.0
        yield pass_if(
            is_comparable and ratio <= max_ratio,
            evidence=summary.file,
            value=f"{ratio:.4g}" if is_comparable else f"{len(numbers)} entries",
            limit=f"{max_ratio:g}",
            proof=(
                f"{name}: {max(numbers):g} / {min(numbers):g} = {ratio:.4g}"
                if is_comparable
                else f"{name} has {len(numbers)} entries for {hosts} hosts, which cannot be compared"
            ),
            fix="Let the reviewer compare the hosts.",
            otherwise=Verdict.WARNING,
        )
