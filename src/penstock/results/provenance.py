"""Whence a run's figures come: command line, settings, versions, state of the working folder, process.

Place in the flow: read once, before a run starts. Invariant: no word that may be a secret leaves here.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.environment import user_settings
from penstock.storage.process_id import ProcessId, current_process

if TYPE_CHECKING:
    from penstock.environment import Environment

PACKAGES: Final = (
    "numpy", "numba", "pyarrow", "h5py", "Pillow", "obstore", "minio", "s3dlio", "s3torchconnector",
    "torch", "mpi4py", "mpich",
)  # fmt: skip
"""Packages whose versions can move a figure."""

_SECRET_NAME: Final = re.compile(r"(?i)(secret|password|passwd|token|credential|access_?key|account_?key)")
_USER_INFO: Final = re.compile(r"://[^/@\s]+@")
_HIDDEN: Final = "***"
_GIT_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """The working folder's commit, and whether files differed from it."""

    commit: str
    is_modified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """One process, never to be taken for another: not after its death, a reboot or in another container."""

    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int


def redacted(words: Sequence[str]) -> tuple[str, ...]:
    """A command line without secrets: values of telling names and users in URIs become `***`."""
    shown: list[str] = []
    for word in words:
        follows_secret_option = shown and shown[-1].startswith("--") and _is_secret_option(shown[-1])
        shown.append(_HIDDEN if follows_secret_option else _redacted_word(as_text(word)))
    return tuple(shown)


def redacted_settings(environment: Environment) -> dict[str, str]:
    """The user's own variables (`AWS_*`, `PENSTOCK_*`), without secrets."""
    return {
        as_text(name): _HIDDEN if _SECRET_NAME.search(name) else _redacted_word(as_text(value))
        for name, value in sorted(user_settings(environment).items())
    }


def as_text(word: str) -> str:
    """A word of the system's with U+FFFD for bytes that are no UTF-8: records hold nothing else than text."""
    return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of those packages that are installed, from their metadata: nothing is imported."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> GitState | None:
    """The state of the repository that holds `folder`; None where there is none, or no git."""
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None or status is None else GitState(commit=commit, is_modified=bool(status))


def mark_this_process() -> ProcessMark:
    """The calling process."""
    process = current_process()
    return ProcessMark(
        boot_id=process.kernel,
        pid_namespace=int(process.numbering.strip("pid:[]")),
        pid=process.pid,
        start_ticks=int(process.started),
    )


def is_alive(mark: ProcessMark) -> bool | None:
    """Whether this process runs; None where that cannot be seen: on another host, in another container."""
    observer = current_process()
    process = ProcessId(
        host=observer.host,
        pid=mark.pid,
        started=str(mark.start_ticks),
        kernel=mark.boot_id,
        numbering=f"pid:[{mark.pid_namespace}]",
    )
    has_ended = process.has_ended(observer=observer)
    return None if has_ended is None else not has_ended


def _is_secret_option(word: str) -> bool:
    return "=" not in word and _SECRET_NAME.search(word) is not None


def _redacted_word(word: str) -> str:
    name, equals, _ = word.partition("=")
    if equals and "?" not in name and _SECRET_NAME.search(name):
        return f"{name}={_HIDDEN}"
    open_word = _USER_INFO.sub(f"://{_HIDDEN}@", word)
    address, question, query = open_word.partition("?")
    if "://" not in address or not question:
        return open_word
    return f"{address}?{'&'.join(map(_redacted_word, query.split('&')))}"


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
