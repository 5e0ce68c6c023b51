"""List the folders of a submission without what operating systems and editors leave behind.

Names in real trees differ in case from what rules say, so entries are looked up in any case. Invariant: a
folder that is a link is never searched, because it may lead out of the tree or back into it.
"""

import os
from pathlib import Path
from typing import Final

from penstock.errors import Unavailable

_LEAVINGS: Final = frozenset({"__macosx", ".ds_store", "thumbs.db", "desktop.ini", "__pycache__"})


def is_leaving(name: str) -> bool:
    """Check whether an operating system, an editor or a file manager left such a file."""
    return name.lower() in _LEAVINGS or name.startswith(("._", ".#", "~$")) or name.endswith(("~", ".swp"))


def _scan(folder: Path | None) -> list[os.DirEntry[str]]:
    """The entries that are neither hidden nor leavings, in the order of names; none if there is no folder."""
    if folder is None:
        return []
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Unavailable(f"This folder cannot be listed: {error.strerror}", where=str(folder)) from error
    return [entry for entry in found if not (entry.name.startswith(".") or is_leaving(entry.name))]


def list_folder(folder: Path | None) -> list[Path]:
    """The entries that are neither hidden nor leavings, in the order of names; none if there is no folder."""
    return [Path(entry.path) for entry in _scan(folder)]


def list_subfolders(folder: Path | None) -> list[Path]:
    """The folders among them."""
    return [Path(entry.path) for entry in _scan(folder) if entry.is_dir(follow_symlinks=False)]


def list_linked_subfolders(folder: Path | None) -> list[Path]:
    """The folders among them and links to folders, for those that are read and not searched."""
    return [Path(entry.path) for entry in _scan(folder) if _is_folder(entry)]


def list_names(folder: Path | None) -> tuple[str, ...]:
    """The names of the entries; folders end in a slash."""
    return tuple(f"{entry.name}/" if _is_folder(entry) else entry.name for entry in _scan(folder))


def list_links(folder: Path) -> list[Path]:
    """All links below a folder, whatever their names; what cannot be listed has none."""
    found: list[Path] = []
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                below = sorted(entries, key=lambda entry: entry.name)
        except OSError:  # whoever reads the files of this folder says so
            continue
        found += [Path(entry.path) for entry in below if entry.is_symlink()]
        pending += [Path(entry.path) for entry in below if entry.is_dir(follow_symlinks=False)]
    return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def find_folder(folder: Path | None, name: str) -> Path | None:
    """The folder called `name`, in any case."""
    found = (entry for entry in _scan(folder) if entry.name.lower() == name.lower())
    return next((Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)), None)


def find_file(folder: Path | None, name: str) -> Path | None:
    """The file called `name`, in any case; the one in this very case is preferred."""
    alike = [entry for entry in _scan(folder) if entry.name.lower() == name.lower()]
    found = next((entry for entry in alike if entry.name == name), alike[0] if alike else None)
    return None if found is None else Path(found.path)
