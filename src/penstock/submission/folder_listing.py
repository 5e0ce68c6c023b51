"""List the folders of a submission without what operating systems and editors leave behind.

Names in real trees differ in case from what rules say, so entries are looked up in any case. Invariant: a
folder that is a link is never searched, because it may lead out of the tree or back into it.
"""

from pathlib import Path
from typing import Final

from penstock.errors import Unavailable

_LEAVINGS: Final = frozenset({"__macosx", ".ds_store", "thumbs.db", "desktop.ini", "__pycache__"})


def is_leaving(name: str) -> bool:
    """Whether an operating system, an editor or a file manager left such a file."""
    return name.lower() in _LEAVINGS or name.startswith(("._", ".#", "~$")) or name.endswith(("~", ".swp"))


def list_folder(folder: Path | None) -> list[Path]:
    """The entries that are neither hidden nor leavings, in the order of names; none if there is no folder."""
    if folder is None:
        return []
    try:
        entries = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Unavailable(f"This folder cannot be listed: {error.strerror}", where=str(folder)) from error
    return [entry for entry in entries if not (entry.name.startswith(".") or is_leaving(entry.name))]


def list_subfolders(folder: Path | None) -> list[Path]:
    """The folders among them."""
    return [entry for entry in list_folder(folder) if entry.is_dir() and not entry.is_symlink()]


def list_linked_subfolders(folder: Path | None) -> list[Path]:
    """The folders among them and links to folders, for those that are read and not searched."""
    return [entry for entry in list_folder(folder) if entry.is_dir()]


def list_names(folder: Path | None) -> tuple[str, ...]:
    """The names of the entries; those of folders end in a slash."""
    return tuple(f"{entry.name}/" if entry.is_dir() else entry.name for entry in list_folder(folder))


def find_folder(folder: Path | None, name: str) -> Path | None:
    """The folder called `name`, in any case."""
    return next((entry for entry in list_subfolders(folder) if entry.name.lower() == name.lower()), None)


def find_file(folder: Path | None, name: str) -> Path | None:
    """The file called `name`, in any case; the one in this very case is preferred."""
    alike = [entry for entry in list_folder(folder) if entry.name.lower() == name.lower()]
    return next((entry for entry in alike if entry.name == name), alike[0] if alike else None)
