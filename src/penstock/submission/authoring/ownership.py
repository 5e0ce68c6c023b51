"""Whose a results tree is: a sentinel file at its root, put there once and never changed.

Place in the flow: `penstock submission init` claims, every maker of leaves asks. Invariant: of two who claim
one folder at once, one gets it and the other is told whose it is.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import DataDamaged, UsageError
from penstock.results.durable import write_text
from penstock.storage.files.file_sink import is_unfinished
from penstock.storage.files.system_calls import translate_os_errors
from penstock.submission.tree_layout import SENTINEL
from penstock.workload.strict_yaml import parse_yaml

VERSION: Final = 2
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


class _Sentinel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    mlperf_results_version: int
    orgname: str
    initialized_at: str
    initialized_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTree:
    """A tree that is an organisation's; `is_new` where this call claimed it."""

    root: Path
    organisation: str
    is_new: bool = False


def claim_tree(root: Path, organisation: str, *, now: datetime, by: str) -> OwnedTree:
    """Make `root` the organisation's, or find that it is; `UsageError` where it is anybody else's."""
    require_plain_name(organisation, what="organisation's name")
    held = _read(root)
    if held is None:
        _require_empty(root)
        is_new = _put(root, organisation, now=now, by=by)
        held = _read(root)
        assert held is not None
    else:
        is_new = False
    if held.orgname != organisation:
        raise UsageError(
            f"This tree is {held.orgname}'s since {held.initialized_at}, and names differ in case, too",
            where=str(root),
            fix=f"Name another folder for {organisation}.",
        )
    return OwnedTree(root=root.absolute(), organisation=organisation, is_new=is_new)


def require_owned_tree(root: Path) -> OwnedTree:
    """The claim that lies at `root`; `UsageError` that says how to make one where there is none."""
    held = _read(root)
    if held is None:
        raise UsageError(
            "This is nobody's results tree",
            where=str(root),
            fix=f"Make it yours: penstock submission init ORGANISATION {root}",
        )
    return OwnedTree(root=root.absolute(), organisation=held.orgname)


def require_plain_name(name: str, *, what: str) -> str:
    """A name that is a folder's in the tree: letters, digits, dot, underscore and minus (rule 2.1.1)."""
    if not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"{name!r} cannot be an {what}" if what[0] in "aeiou" else f"{name!r} cannot be a {what}",
            fix="Write letters, digits, '.', '_' and '-' alone (rule 2.1.1).",
        )
    return name


def _read(root: Path) -> _Sentinel | None:
    path = root / SENTINEL
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), source=str(path))
        held = _Sentinel.model_validate(tree)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise DataDamaged(f"This sentinel cannot be read: {error}", where=str(path)) from error
    if held.mlperf_results_version != VERSION:
        raise DataDamaged(
            f"This tree has layout {held.mlperf_results_version}, not {VERSION}",
            where=str(path),
            fix="Write into it with the tool that made it.",
        )
    return held


def _require_empty(root: Path) -> None:
    with translate_os_errors("Looking for what is there", str(root)):
        names = sorted(path.name for path in root.iterdir()) if root.exists() else []
    # Whoever claims it at the same time is judged by the link, not by what is on its way there.
    found = [name for name in names if SENTINEL not in name and not is_unfinished(name)]
    if found:
        raise UsageError(
            f"There are other files here ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''}), and no "
            f"{SENTINEL}",
            where=str(root),
            fix="Name a new or an empty folder.",
        )


def _put(root: Path, organisation: str, *, now: datetime, by: str) -> bool:
    """Whether this call put the sentinel there: a link never replaces what has its name."""
    document = _Sentinel(
        mlperf_results_version=VERSION,
        orgname=organisation,
        initialized_at=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        initialized_by=by,
    )
    draft = f".{SENTINEL}-{secrets.token_hex(4)}"
    write_text(root, draft, yaml.safe_dump(document.model_dump(), sort_keys=False))
    with translate_os_errors("Claiming the folder", str(root)):
        try:
            (root / SENTINEL).hardlink_to(root / draft)
        except FileExistsError:
            return False
        finally:
            (root / draft).unlink()
    return True
