"""`penstock submission init`, `describe` and `status`: a submission tree, its systems and its progress."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import __version__
from penstock.cli.options import argument, group, option, verb
from penstock.cli.parsers import FILE, FOLDER, NAME
from penstock.cli.submission_options import TreeOptions
from penstock.cli.terminal import Terminal, table
from penstock.cluster.comm import SoloComm
from penstock.environment import process_environment
from penstock.errors import UsageError
from penstock.submission.authoring import owned_tree
from penstock.submission.edition import load_edition
from penstock.submission.parsed_file import read_description
from penstock.submission.system_description import find_schema_problems
from penstock.submission.tree_layout import SENTINEL

if TYPE_CHECKING:
    from penstock.cluster.facts.host_facts import ClusterFacts

INCOMPLETE = 1


@verb
def init(
    terminal: Terminal,
    *,
    organisation: str = argument(
        "ORG", NAME, "Name of your organization: letters, digits, '.', '_' and '-'."
    ),
    folder: Path = argument("DIR", FOLDER, "New or empty directory."),
) -> None:
    """Create a submission tree for an organization's results.

    Running it again for the same organization changes nothing. A tree cannot change its organization.

    Examples:

      penstock submission init acme ~/results
    """
    tree = owned_tree.claim_tree(folder, organisation, now=datetime.now(UTC), by=f"penstock {__version__}")
    verb_ = "now belongs" if tree.is_new else "already belongs"
    text = [
        f"{tree.root} {verb_} to {tree.organisation} ({SENTINEL}).",
        f"Next: penstock submission describe --submission {shlex.quote(str(folder))} --system NAME --closed",
    ]
    document = {"root": str(tree.root), "organisation": tree.organisation, "is_new": tree.is_new}
    terminal.result(document, text)


@verb
def describe(
    terminal: Terminal,
    *,
    target: TreeOptions = group(TreeOptions),
    cluster: Path | None = option(
        "--cluster",
        FILE,
        "Describe the hosts in this file, written by `penstock cluster collect` (default: this machine).",
    ),
) -> int:
    """Write a system description from collected facts, or compare an existing one with the machines.

    Never changes an existing systems/NAME.yaml: shows how it differs from the machines, and lists violations
    of the schema with their lines. Exits with 1 as long as there are differences or violations.

    Examples:

      penstock cluster collect --hosts node1,node2 -o cluster.json

      penstock submission describe --submission ~/results --system fast --closed --cluster cluster.json
    """
    from penstock.submission.authoring import description_draft

    tree = owned_tree.require_owned_tree(Path(target.tree))
    name = owned_tree.require_plain_name(target.system, what="system's name")
    division = target.rules.require_division().value
    path = tree.root / division / tree.organisation / "systems" / f"{name}.yaml"
    collected = description_draft.draft_description(_read_facts(cluster), target.system)
    is_new = not path.exists()
    if is_new:
        from penstock.results.published_files import write_text

        write_text(path.parent, path.name, description_draft.initial_text(collected))
    document = read_description(path, tree.root)
    differences = description_draft.diff_description(document.value(), collected, name=path.name)
    violations = find_schema_problems(document)
    lines = [f"{path}: {'written' if is_new else 'exists'}"]
    if differences:
        lines.append("The machines differ from the description, which was not changed:")
        lines += [f"  {difference}" for difference in differences]
    if violations:
        lines.append(f"{len(violations)} to fill in or correct:")
        lines += [f"  {violation}" for violation in violations]
    if not differences and not violations:
        lines.append("It matches the machines and the schema.")
    if not path.with_suffix(".pdf").is_file():
        lines.append(f"A picture of the system is missing: {path.with_suffix('.pdf')}")
    terminal.result(
        {
            "file": str(path),
            "is_new": is_new,
            "drift": list(differences),
            "problems": [
                {"path": violation.path, "line": violation.line, "text": violation.text}
                for violation in violations
            ],
        },
        lines,
    )
    return INCOMPLETE if differences or violations else 0


def _read_facts(cluster: Path | None) -> ClusterFacts:
    """Read the facts in the file, which must be complete; without a file, collect this machine's facts."""
    from penstock.cluster.facts.collect_facts import collect_from_ranks
    from penstock.cluster.facts.host_facts import read_cluster_facts

    if cluster is None:
        return collect_from_ranks(SoloComm(), process_environment(), now=lambda: datetime.now(UTC))
    facts = read_cluster_facts(cluster)
    if facts.is_partial:
        missing = ", ".join(host.host for host in facts.absent)
        raise UsageError(
            f"These facts are partial: {missing} did not report",
            where=str(cluster),
            fix="Collect the facts of all hosts: a description covers the whole system.",
        )
    return facts


@verb
def status(
    terminal: Terminal,
    *,
    folder: Path = argument("DIR", FOLDER, "Submission tree, created by `penstock submission init`."),
) -> None:
    """Show the progress of each result: which runs count, what is missing, and which attempts failed.

    A run counts if the next run followed it, or still can, within the time that the rules allow. Once a
    result is complete, its runs stay counted.

    Examples:

      penstock submission status ~/results
    """
    from penstock.submission.authoring.run_sequence import list_progress

    tree = owned_tree.require_owned_tree(folder)
    results = list_progress(tree, load_edition("v3.0"), now=datetime.now(UTC))
    document = {
        "organisation": tree.organisation,
        "is_rehearsal": tree.is_rehearsal,
        "results": results,
    }
    rows = [
        {
            "division": result["division"],
            "system": result["system"],
            "workload": result["workload"],
            "accelerators": f"{result['num_accelerators'] or '?'} {result['accelerator']}".strip(),
            "runs": f"{result['num_runs']} of {result['num_runs_wanted']}",
            "state": "incomplete" if result["lacks"] else "complete",
        }
        for result in results
    ]
    view = [*table("Results of a rehearsal" if tree.is_rehearsal else "Results", rows)]
    for result in results:
        view += [f"{result['system']} {result['workload']} lacks {lack}" for lack in result["lacks"]]
        view += [f"{each['outcome']}: {each['folder']}: {each['why']}" for each in result["attempts"]]
        view += [f"cannot be read: {text}" for text in result["unread"]]
    terminal.result(document, view)
