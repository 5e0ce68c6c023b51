"""`penstock cluster collect` and `check`: the facts of all hosts in one file, and their differences."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from socket import gethostname
from typing import cast

from penstock.cli.option_groups import STORAGE
from penstock.cli.options import flag, option, optional_argument, refuse_ignored, repeated, verb
from penstock.cli.parsers import FILE, GATE, LAUNCHER, NEW_FILE, NEW_FOLDER, TEXT, TIME, URI, chosen
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal, View, table
from penstock.cluster.comm import Comm
from penstock.cluster.facts import homogeneity, host_facts
from penstock.cluster.gates.gate_model import Gate, PreflightRequest
from penstock.cluster.host_slots import find_hosts, list_allocation
from penstock.environment import process_environment, untraced
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage import open_storage
from penstock.units import format_bytes

_VIA = chosen(("local", "ssh", "slurm", "mpi"), lambda word: cast("host_facts.Via", word))


@verb
def collect(
    terminal: Terminal,
    *,
    hosts: str | None = option("--hosts", TEXT, "Query these hosts (default: this one).", metavar="A,B:4"),
    hostfile: Path | None = option("--hostfile", FILE, "Read the hosts from a file, one per line."),
    via: host_facts.Via | None = option(
        "--via",
        _VIA,
        "How to start a process on each host: ssh, slurm (by default on all hosts of the allocation), mpi "
        "(any launcher) or local, for this machine only (default: mpi if hosts are named, else local).",
    ),
    output: Path = option("--output", NEW_FILE, "Write this file.", default="cluster.json", short="-o"),
    allow_partial: bool = flag("--allow-partial", "Accept missing hosts, and mark the facts as partial."),
    timeout_s: float = option("--timeout", TIME, "Wait at most this long for each host.", default="60s"),
    launcher: str = option(
        "--launcher", LAUNCHER, "Start processes with this launcher (for --via mpi).", default="auto"
    ),
    launcher_args: tuple[str, ...] = repeated(
        "--launcher-arg", TEXT, "Pass an argument to the launcher, or to ssh."
    ),
    python: str | None = option(
        "--python",
        TEXT,
        "Run this Python interpreter on the hosts (default: the path of the one that runs here).",
        metavar="PATH",
    ),
) -> None:
    """Collect the facts of each host: cores, memory, networks, drives, mounts, kernel and settings.

    Runs one process on each host. If a host fails, hangs or returns invalid output, the command reports an
    error that names the host. Only settings and variables on a fixed list are read; secrets are redacted.

    Examples:

      penstock cluster collect -o cluster.json

      penstock cluster collect --hosts node1,node2,node3 --via ssh --python /opt/penstock/bin/python

      penstock cluster collect --hostfile hosts.txt --launcher srun --timeout 2min
    """
    from penstock.cluster.facts.collect_facts import collect_from_hosts, plan_agents, query_hosts
    from penstock.results.published_files import write_text

    environment = process_environment()
    if not output.absolute().parent.is_dir():
        raise ObjectNotFound("No such directory", uri=str(output.parent), fix="Create it first.")
    asked = tuple(find_hosts(hosts, hostfile)[0])
    via = via or ("mpi" if asked else "local")
    if via == "slurm" and not asked:
        asked = list_allocation(environment)
    if via == "local" and len(asked) > 1:
        raise UsageError(
            f"--via local cannot query {len(asked)} hosts",
            where="--via local",
            fix="Leave --via out to start one process on each host by a launcher.",
        )
    if via != "local" and not asked:
        raise UsageError(
            "No hosts are named", where=f"--via {via}", fix="Give --hosts a,b,c or --hostfile FILE."
        )
    if via != "mpi":
        unused = ("--launcher", "--launcher-arg") if via == "local" else ("--launcher",)
        refuse_ignored(unused, f"--via {via} starts no launcher", fix="Leave one of them out.")
    command_for, variables = plan_agents(
        via,
        environment,
        python=python or sys.executable,
        launcher=launcher,
        arguments=launcher_args,
        timeout_s=timeout_s,
    )
    asked = asked or (gethostname(),)
    facts = collect_from_hosts(
        query_hosts(asked, command_for, variables, timeout_s=timeout_s),
        asked,
        via=via,
        timeout_s=timeout_s,
        collected_at=datetime.now(UTC).isoformat(timespec="seconds"),
        allow_partial=allow_partial,
    )
    write_text(output.absolute().parent, output.name, facts.model_dump_json(indent=2) + "\n")
    terminal.notes(f"{host.host} is missing: {host.reason}" for host in facts.absent)
    state = f"PARTIAL: {len(facts.absent)} missing" if facts.is_partial else "complete"
    memory = "unknown" if facts.memory_bytes is None else format_bytes(facts.memory_bytes)
    view = [
        *table("Hosts", _host_rows(facts)),
        f"{len(facts.present)} of {len(facts.asked)} hosts, {state}, memory of all {memory}: {output}",
    ]
    terminal.result(facts.model_dump(mode="json"), view)


def _host_rows(facts: host_facts.ClusterFacts) -> list[dict[str, str]]:
    return [
        {
            "host": host.host,
            "cores": str(host.report.cpu.num_logical) if host.report.cpu else "-",
            "memory": format_bytes(host.report.memory_bytes) if host.report.memory_bytes else "-",
            **{
                name: "-" if found is None else str(len(found))
                for name, found in (
                    ("networks", host.report.nics),
                    ("drives", host.report.drives),
                    ("mounts", host.report.mounts),
                )
            },
            "unread": ", ".join(host.report.unread) or "-",
        }
        for host in facts.present
    ]


_COLOURS = {"pass": "green", "warning": "yellow", "not checked": "yellow", "fail": "red"}
_WORST_FIRST = ("fail", "not checked", "warning")
_EXIT_CODES = {"pass": 0, "warning": 0, "not checked": 3, "fail": 1}


@ranked
def check(
    comm: Comm,
    terminal: Terminal,
    *,
    file: Path | None = optional_argument(
        "[FILE]", FILE, "File written by `penstock cluster collect` (default: inspect the gates)."
    ),
    gates: tuple[Gate, ...] = repeated("--gate", GATE, "Inspect only this gate (default: all)."),
    data: str | None = option("--data", URI, "Check the storage that ranks will read or write."),
    storage: tuple[tuple[str, str], ...] = STORAGE,
    results: Path | None = option(
        "--results", NEW_FOLDER, "Check the directory where results will be created."
    ),
) -> int:
    """Compare the hosts of a collected cluster, or inspect the preflight gates of runs.

    With FILE, compares its hosts: memory, cores, kernel, versions, mounts, settings and clocks. Without FILE,
    inspects the gates on all ranks. Exits with 1 if a check fails, and with 3 if one was not possible.

    Examples:

      penstock cluster check cluster.json

      penstock cluster check --data /mnt/pfs/unet3d --results runs --hosts node1:4,node2:4

      penstock cluster check --gate clock --gate versions --ranks 8 --json
    """
    from penstock.cluster.gates.preflight import run_preflight

    if file is not None:
        refuse_ignored(
            ("--gate", "--data", "--option", "--results"),
            "FILE is compared, and no gate is inspected",
            fix="Leave FILE out to inspect gates, or the options to compare hosts.",
        )
        facts = host_facts.read_cluster_facts(file)
        checks = homogeneity.check_homogeneity(facts)
        verdict = homogeneity.overall_verdict(checks)
        document = {
            "verdict": verdict,
            "is_partial": facts.is_partial,
            "hosts": [host.host for host in facts.present],
            "checks": [asdict(check) for check in checks],
        }
        terminal.result(
            document,
            _view_checks([(check.verdict, check.subject, check.found, check.fix) for check in checks]),
        )
        return _EXIT_CODES[verdict]
    if data is None:
        refuse_ignored(("--option",), "no storage is named", fix="Name the storage with --data.")
    environment = untraced(process_environment())
    reopen = None if data is None else partial(open_storage, data, environment, options=dict(storage))
    request = PreflightRequest(environment=environment, uri=data, reopen=reopen, results=results)
    findings = run_preflight(request, comm, gates=gates or tuple(Gate)).preflight.findings
    verdicts = {str(finding.verdict) for finding in findings}
    worst = next((word for word in _WORST_FIRST if word in verdicts), "pass")
    terminal.result(
        {"verdict": worst, "ranks": comm.size, "gates": [asdict(finding) for finding in findings]},
        _view_checks(
            [(str(finding.verdict), str(finding.gate), finding.found, finding.fix) for finding in findings]
        ),
    )
    return _EXIT_CODES[worst]


def _view_checks(lines: Sequence[tuple[str, str, str, str]]) -> View:
    """Yield a line for each check, followed by the fix if the check does not pass."""
    verdict_width, subject_width = (max(len(line[column]) for line in lines) for column in (0, 1))
    indent = " " * (verdict_width + subject_width + 3)
    for verdict, subject, finding, fix in lines:
        coloured = (verdict.ljust(verdict_width), _COLOURS.get(verdict, "default"))
        yield [coloured, f" {subject:<{subject_width}}  {finding}"]
        if fix and verdict != "pass":
            yield [indent, (fix, "italic")]
