"""`penstock submission describe`: what machines tell of the system under test; what is left to fill in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.handing_in import Closed, Open, System, Tree, division_of
from penstock.cli.terminal import JsonFlag, Terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from penstock.cluster.facts.host_facts import ClusterFacts
    from penstock.submission.authoring.ownership import OwnedTree
    from penstock.submission.system_description import SchemaProblem
    from penstock.workload.division_rules import SubmissionDivision

NOT_RIGHT_YET = 1


def describe(
    *,
    submission: Tree,
    system: System,
    closed: Closed = False,
    open_: Open = False,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", metavar="FILE", help="Of `penstock cluster collect`; else this machine."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write systems/NAME.yaml once, with what can be collected; then hold it against the machines.

    A description that is there is never changed: where the machines differ from it, the difference is shown.
    What breaks the schema is named with its line. Exits with 1 until neither is left.

    Examples:

      penstock cluster collect --hosts node1,node2 -o cluster.json

      penstock submission describe --submission ~/results --system fast --closed --cluster cluster.json
    """
    from penstock.submission.authoring.description_draft import diff_description, initial_text
    from penstock.submission.authoring.description_draft import draft_description as tell
    from penstock.submission.authoring.ownership import require_owned_tree
    from penstock.submission.parsed_file import read_description
    from penstock.submission.system_description import find_schema_problems

    terminal = Terminal(as_json=as_json)
    claim = require_owned_tree(Path(submission))
    path = _path(claim, system, division_of(closed=closed, open_=open_))
    collected = tell(_facts(cluster), system)
    is_new = not path.exists()
    if is_new:
        from penstock.results.durable import write_text

        write_text(path.parent, path.name, initial_text(collected))
    document = read_description(path, claim.root)
    differs = diff_description(document.value(), collected, name=path.name)
    wrong = find_schema_problems(document)
    terminal.result(
        {
            "file": str(path),
            "is_new": is_new,
            "drift": list(differs),
            "problems": [{"path": each.path, "line": each.line, "text": each.text} for each in wrong],
        },
        lambda console: _draw(console, path, differs, wrong, is_new=is_new),
    )
    if differs or wrong:
        raise typer.Exit(NOT_RIGHT_YET)


def _path(claim: OwnedTree, system: str, division: SubmissionDivision | None) -> Path:
    from penstock.errors import UsageError
    from penstock.submission.authoring.ownership import require_plain_name

    if division is None:
        raise UsageError(
            "Nothing says in which division the system is described",
            where="--submission",
            fix="Add --closed or --open.",
        )
    name = require_plain_name(system, what="system's name")
    return claim.root / division.value / claim.organisation / "systems" / f"{name}.yaml"


def _facts(cluster: Path | None) -> ClusterFacts:
    """Those of the file, whole; else this machine's own."""
    from datetime import UTC, datetime

    from penstock.cluster.base_comm import SoloComm
    from penstock.cluster.facts.collect_facts import collect_from_ranks
    from penstock.cluster.facts.host_facts import read_cluster_facts
    from penstock.environment import process_environment
    from penstock.errors import UsageError

    if cluster is None:
        return collect_from_ranks(SoloComm(), process_environment(), now=lambda: datetime.now(UTC))
    facts = read_cluster_facts(cluster)
    if facts.is_partial:
        missing = ", ".join(each.host for each in facts.absent)
        raise UsageError(
            f"These facts are partial, and a description of some hosts is none: {missing} did not report",
            where=str(cluster),
            fix="Collect the facts of all hosts.",
        )
    return facts


def _draw(
    console: Console, path: Path, differs: Sequence[str], wrong: Sequence[SchemaProblem], *, is_new: bool
) -> None:
    def say(text: Any) -> None:
        console.print(str(text), markup=False)

    say(f"{path}: {'written' if is_new else 'is there'}")
    if differs:
        say("The machines are not what it says; it was left as it is:")
        for line in differs:
            say(f"  {line}")
    if wrong:
        say(f"{len(wrong)} to fill in or mend:")
        for problem in wrong:
            say(f"  {problem}")
    if not differs and not wrong:
        say("It fits the machines and the schema.")
    if not path.with_suffix(".pdf").is_file():
        say(f"A picture of the system is missing: {path.with_suffix('.pdf')}")
