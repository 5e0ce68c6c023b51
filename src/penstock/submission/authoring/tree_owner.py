"""The owner of a submission tree: a sentinel file at its root, written once and never changed.

`penstock submission init` claims a tree, writers of result directories look up its owner. Invariant: of two
processes that claim one folder at the same time, one succeeds and the other learns who owns it.
"""

import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.errors import DataDamaged, UsageError, name_some
from penstock.results.published_files import write_text
from penstock.storage.files import file_storage, system_calls
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
    rehearsal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTree:
    """A tree of an organisation; `is_new` if this call claimed it. A rehearsal's holds no real result."""

    root: Path
    organisation: str
    is_new: bool = False
    is_rehearsal: bool = False

    def require_purpose(self, *, is_rehearsal: bool) -> None:
        """Raise `UsageError` where rehearsed and real results would be mixed."""
        if self.is_rehearsal and not is_rehearsal:
            raise UsageError(
                "This tree is a rehearsal's, which real results must not be added to",
                where=str(self.root),
                fix="Make another one: penstock submission init ORGANISATION DIR",
            )
        if is_rehearsal and not self.is_rehearsal:
            raise UsageError(
                "This tree is for real results, which a rehearsal must not be mixed with",
                where=str(self.root),
                fix="Rehearse in a new or an empty folder.",
            )


def claim_tree(
    root: Path, organisation: str, *, now: datetime, by: str, is_rehearsal: bool = False
) -> OwnedTree:
    """Make `root` the organisation's; `UsageError` if it belongs to another one, or has another purpose."""
    require_plain_name(organisation, what="organisation's name")
    sentinel, is_new = _read(root), False
    if sentinel is None:
        _require_empty(root)
        is_new = _write_sentinel(root, organisation, now=now, by=by, is_rehearsal=is_rehearsal)
        sentinel = _read(root)
        assert sentinel is not None
    if sentinel.orgname != organisation:
        raise UsageError(
            f"This submission tree already belongs to {sentinel.orgname!r} (initialized "
            f"{sentinel.initialized_at}; names are case-sensitive)",
            where=str(root),
            fix=f"Name another folder for {organisation}.",
        )
    tree = _own(root, sentinel, is_new=is_new)
    tree.require_purpose(is_rehearsal=is_rehearsal)
    return tree


def require_owned_tree(root: Path) -> OwnedTree:
    """The owner of the tree at `root`; `UsageError` with the command that claims it if there is none."""
    sentinel = _read(root)
    if sentinel is None:
        raise UsageError(
            "This is not a submission tree",
            where=str(root),
            fix=f"Initialize it: penstock submission init ORGANISATION {root}",
        )
    return _own(root, sentinel, is_new=False)


def _own(root: Path, sentinel: _Sentinel, *, is_new: bool) -> OwnedTree:
    return OwnedTree(
        root=root.absolute(),
        organisation=sentinel.orgname,
        is_new=is_new,
        is_rehearsal=sentinel.rehearsal,
    )


def require_plain_name(name: str, *, what: str) -> str:
    """The name, if it can be a folder's in the tree (rule 2.1.1)."""
    if not _PLAIN_NAME.fullmatch(name) or name in (".", ".."):
        raise UsageError(
            f"{name!r} cannot be an {what}" if what[0] in "aeiou" else f"{name!r} cannot be a {what}",
            fix="Use only letters, digits, '.', '_' and '-' (rule 2.1.1).",
        )
    return name


def _read(root: Path) -> _Sentinel | None:
    path = root / SENTINEL
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), source=str(path))
        sentinel = _Sentinel.model_validate(tree)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise DataDamaged(f"This sentinel cannot be read: {error}", where=str(path)) from error
    if sentinel.mlperf_results_version != VERSION:
        raise DataDamaged(
            f"This tree has layout {sentinel.mlperf_results_version}, not {VERSION}",
            where=str(path),
            fix="Write into it with the tool that made it.",
        )
    return sentinel


def _require_empty(root: Path) -> None:
    with system_calls.translate_os_errors("Listing the folder", str(root)):
        names = sorted(path.name for path in root.iterdir()) if root.exists() else []
    # Drafts of a sentinel are allowed: another process may be claiming the folder, and the link decides.
    other_files = [name for name in names if SENTINEL not in name and not file_storage.is_unfinished(name)]
    if other_files:
        raise UsageError(
            f"There are other files here ({name_some(other_files)}), and no {SENTINEL}",
            where=str(root),
            fix="Choose a new or an empty folder.",
        )


def _write_sentinel(root: Path, organisation: str, *, now: datetime, by: str, is_rehearsal: bool) -> bool:
    """Write the sentinel; False if another process was faster. Unlike a rename, a link never replaces."""
    document = _Sentinel(
        mlperf_results_version=VERSION,
        orgname=organisation,
        initialized_at=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        initialized_by=by,
        rehearsal=is_rehearsal,
    )
    draft = f".{SENTINEL}-{secrets.token_hex(4)}"
    write_text(root, draft, yaml.safe_dump(document.model_dump(exclude_defaults=True), sort_keys=False))
    with system_calls.translate_os_errors("Claiming the folder", str(root)):
        try:
            (root / SENTINEL).hardlink_to(root / draft)
        except FileExistsError:
            return False
        finally:
            (root / draft).unlink()
    return True
