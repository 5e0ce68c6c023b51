"""The page of a cluster's facts: whether its hosts are alike, and what each of them is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from penstock.cluster.facts.homogeneity import HomogeneityCheck, check_homogeneity, overall_verdict
from penstock.cluster.facts.host_facts import ClusterFacts
from penstock.reports.report import Banner, Chart, Look, Report, bar_chart, table_section
from penstock.units import format_bytes

GIB: Final = 2**30
_LOOKS: Final = {"pass": Look.GOOD, "fail": Look.BAD, "warning": Look.DOUBT, "not checked": Look.DOUBT}
_WORDS: Final = {
    "pass": "alike",
    "fail": "not alike",
    "warning": "nearly alike",
    "not checked": "not checked",
}


def make_cluster_page(facts: ClusterFacts, rows: Sequence[Mapping[str, str]]) -> Report:
    """The page of the hosts; `rows` have the facts of each."""
    checks = check_homogeneity(facts)
    verdict = overall_verdict(checks)
    bad = [check for check in checks if check.verdict != "pass"]
    collected = facts.collected_at[:16].replace("T", " ") + facts.collected_at[19:].replace("+00:00", " UTC")
    memory = "unknown" if facts.memory_bytes is None else format_bytes(facts.memory_bytes)
    return Report(
        title=f"Facts of {len(facts.present)} host{'s' * (len(facts.present) != 1)}",
        subtitle=f"collected {collected}",
        banner=Banner(
            verdict=_WORDS.get(verdict, verdict),
            look=_LOOKS[verdict],
            figure=(
                f"{len(facts.present)} of {len(facts.asked)} hosts answered, with {memory} of memory "
                f"together; {len(checks) - len(bad)} of {len(checks)} checks pass"
            ),
            limited_by=", ".join(check.subject for check in bad) or "nothing",
            since=f"the facts of {collected}",
            to_do=next((check.fix for check in bad if check.fix), "Nothing."),
            troubles=[
                *(f"{check.subject}: {check.found}" for check in bad),
                *(f"{host.host} is missing: {host.reason}" for host in facts.absent),
            ],
        ),
        highlights=list(_charts(facts)),
        sections=[
            table_section("checks", "All checks", list(map(_check_row, checks))),
            table_section("hosts", "Hosts", rows),
        ],
    )


def _check_row(check: HomogeneityCheck) -> dict[str, str]:
    return {"check": check.subject, "verdict": check.verdict, "found": check.found, "fix": check.fix or "-"}


def _charts(facts: ClusterFacts) -> Iterator[Chart]:
    """Memory and cores of each host, where a host that is not like the others is seen."""
    memory = {host.host: host.report.memory_bytes / GIB for host in facts.present if host.report.memory_bytes}
    cores = {host.host: float(host.report.cpu.num_logical) for host in facts.present if host.report.cpu}
    for title, values, unit in (("Memory by host", memory, "GiB"), ("Cores by host", cores, "")):
        if values:
            yield bar_chart(title, "cluster", values, unit)
