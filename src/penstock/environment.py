"""The one module that touches environment variables; everything else receives their values as arguments.

`PENSTOCK_*` and `AWS_*` are the user's settings; the others say which launcher started this process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

Environment = Mapping[str, str]

USER_PREFIXES = ("AWS_", "PENSTOCK_")
"""Names that every rank must see: they travel to remote ranks by value, never on a command line."""

HOST_LABEL = "PENSTOCK_HOST"
"""What messages call this machine, where its host name says too little."""

CONTROL_ADDRESS = "PENSTOCK_CONTROL_ADDRESS"
CONTROL_TOKEN = "PENSTOCK_CONTROL_TOKEN"  # noqa: S105 - the name of a variable, not a secret
"""Set by the launching process for its ranks: where it listens, and the proof that a rank is its own."""


TRACE = "PENSTOCK_TRACE"
"""The folder that storage traces into, where it is set: worker processes inherit it."""
TRACE_RANK = "PENSTOCK_TRACE_RANK"
"""Which rank of how many a traced process and its workers belong to, as `3/8`."""

PROGRESS_COLUMNS = "PENSTOCK_PROGRESS_COLUMNS"
"""Set by the launching process for its ranks where its standard error is a terminal: how wide that is."""


def process_environment() -> Environment:
    """All variables of this process, as they were when asked. Call it at the edge and pass the result on."""
    return dict(os.environ)


def untraced(environment: Environment) -> Environment:
    """The same variables, but for the one that makes storages trace themselves."""
    return {name: value for name, value in environment.items() if name != TRACE}


def user_settings(environment: Environment) -> dict[str, str]:
    """The variables that belong to the user's request, as opposed to this machine or this one launch."""
    ours = {CONTROL_ADDRESS, CONTROL_TOKEN, PROGRESS_COLUMNS, TRACE_RANK}
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(USER_PREFIXES) and name not in ours
    }


def export_variables(values: Environment) -> None:
    """Set variables of this process, for libraries that can be told in no other way."""
    os.environ.update(values)


def withdraw_variable(name: str) -> None:
    """Unset a variable of this process, for the same libraries."""
    os.environ.pop(name, None)


def user_cache_folder(environment: Environment) -> Path:
    """Where this user keeps what can be made again, as machine code. It may not exist, or be read-only.

    Raises RuntimeError where the user has no home, as in some containers.
    """
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
