"""The report as Markdown: for pull requests, tickets and terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.trace.questions.render import as_markdown

if TYPE_CHECKING:
    from penstock.trace.compare.comparison import Compared
    from penstock.trace.findings.base import Finding

MOST_ROWS = 60


def render(compared: Compared) -> str:
    """Mismatches, findings, tables: in the order in which they are to be read."""
    parts = [
        f"# {len(compared.runs)} runs compared\n",
        f"{', '.join(compared.runs)}; against {compared.baseline}.\n",
        "## What the runs differ in\n",
        as_markdown(compared.mismatches),
        "## What stands out\n",
        *(map(_finding, compared.findings)),
        *([] if compared.findings else ["Nothing.\n"]),
        "## Tables\n",
        *(as_markdown(table, most_rows=MOST_ROWS) for table in compared.tables),
    ]
    return "\n".join(parts)


def _finding(finding: Finding) -> str:
    said = "\n".join(f"- {sentence}" for sentence in finding.says)
    head = f"### {finding.code} ({finding.weight.value}): {finding.title}\n\n{said}\n"
    evidence = as_markdown(finding.evidence, most_rows=10).partition("\n")[2]
    return f"{head}\n{finding.evidence.title}:\n{evidence}"
