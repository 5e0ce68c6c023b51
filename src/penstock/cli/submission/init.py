"""`penstock submission init`: claim a folder for an organisation's results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal


def init(
    organisation: Annotated[
        str, typer.Argument(metavar="ORG", help="Yours: letters, digits, '.', '_' and '-'.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Make DIR the tree that an organisation's results go into.

    Said again for the same organisation, it changes nothing. A tree is never given to another one.

    Examples:

      penstock submission init acme ~/results
    """
    from datetime import UTC, datetime

    from penstock import __version__
    from penstock.submission.authoring.ownership import claim_tree
    from penstock.submission.tree_layout import SENTINEL

    made = claim_tree(folder, organisation, now=datetime.now(UTC), by=f"penstock {__version__}")
    document = {"root": str(made.root), "organisation": made.organisation, "is_new": made.is_new}
    said = "is now" if made.is_new else "was already"
    Terminal(as_json=as_json).result(
        document,
        lambda console: console.print(
            f"{made.root} {said} {made.organisation}'s ({SENTINEL}).\n"
            f"Next: penstock submission describe --submission {folder} --system NAME --closed",
            markup=False,
        ),
    )
