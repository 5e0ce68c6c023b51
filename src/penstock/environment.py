"""The one module that reads environment variables; everything else receives their values as arguments.

`PENSTOCK_*` and `AWS_*` are the user's settings; the others say which launcher started this process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

Environment = Mapping[str, str]

USER_PREFIXES = ("AWS_", "PENSTOCK_")
"""Names that every rank must see: they travel to remote ranks by value, never on a command line."""


def process_environment() -> Environment:
    """All variables of this process, as they were when asked. Call it at the edge and pass the result on."""
    return dict(os.environ)


def user_settings(environment: Environment) -> dict[str, str]:
    """The variables that belong to the user's request, as opposed to this machine."""
    return {name: value for name, value in environment.items() if name.startswith(USER_PREFIXES)}
