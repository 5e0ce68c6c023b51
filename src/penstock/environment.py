"""What this process finds around it: variables, which no other module touches, and who owns files.

`PENSTOCK_*` and `AWS_*` are the user's settings; other variables show which launcher started this process.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.errors import UsageError

Environment = Mapping[str, str]

USER_PREFIXES = ("AWS_", "PENSTOCK_")
"""Prefixes of the variables that every rank gets. They are passed to remote ranks by value, never on a
command line.
"""

HOST_LABEL = "PENSTOCK_HOST"
"""The name of this machine in messages, for machines whose host name says too little."""

CONTROL_ADDRESS = "PENSTOCK_CONTROL_ADDRESS"
CONTROL_TOKEN = "PENSTOCK_CONTROL_TOKEN"  # noqa: S105 - the name of a variable, not a secret
"""Set by the launching process for its ranks: the address of its control server, and the token that the
server checks.
"""


TRACE = "PENSTOCK_TRACE"
"""If set, the folder to which every `Storage` writes traces. Worker processes inherit it."""
TRACE_RANK = "PENSTOCK_TRACE_RANK"
"""The rank of a traced process and its workers, and the number of ranks, such as `3/8`."""

PROGRESS_COLUMNS = "PENSTOCK_PROGRESS_COLUMNS"
"""The width of the launching process's terminal. Set for its ranks if its standard error is a terminal."""


def process_environment() -> Environment:
    """Return a copy of this process's variables. Call this in entry points and pass the result on."""
    return dict(os.environ)


def keep_working_folder_off_path() -> None:
    """Keep Python processes that this one starts (workers) from importing from their working folder."""
    os.environ["PYTHONSAFEPATH"] = "1"


@contextmanager
def settings_refused(file: str, library: str) -> Iterator[None]:
    """Raise `UsageError` if a library would obey a file in the current directory, which may be a stranger's.

    Load the library in the block: the file may name code that it runs, and files that it writes. A directory
    to which others may write, so that they could create the file after this check, is left meanwhile.
    """
    if Path(file).exists():
        raise UsageError(
            f"{library} would obey a file in the current directory",
            where=file,
            fix=f"Move the file or leave the directory; {library.upper()}_* variables are the same settings.",
        )
    if not find_other_writer(Path()):
        yield
        return
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def untraced(environment: Environment) -> Environment:
    """Return the variables without the one that switches traces on."""
    return {name: value for name, value in environment.items() if name != TRACE}


def user_settings(environment: Environment) -> dict[str, str]:
    """Return the variables with the user's prefixes, without those that a launch sets for its ranks."""
    of_launch = {CONTROL_ADDRESS, CONTROL_TOKEN, PROGRESS_COLUMNS, TRACE_RANK}
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(USER_PREFIXES) and name not in of_launch
    }


def export_variables(values: Environment) -> None:
    """Set variables of this process, for libraries that have no other configuration."""
    os.environ.update(values)


def withdraw_variable(name: str) -> None:
    """Unset a variable of this process, for the libraries that `export_variables` serves."""
    os.environ.pop(name, None)


def find_other_writer(path: Path, forbidden: int = 0o022) -> str:
    """Return why a user other than root may change this file or folder; "" if none may.

    Each of the `forbidden` mode bits is a reason. Links are not followed; their mode has all of these bits.
    """
    with suppress(FileNotFoundError):
        facts = path.lstat()
        if facts.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to user {facts.st_uid}"
        if facts.st_mode & forbidden:
            return f"others may write to {path}, or it is a link"
    return ""
