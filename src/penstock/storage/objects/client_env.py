"""What libraries are told that read only this process's environment, or have one client for all of it.

s3dlio and the AWS runtime look for credentials there and nowhere else. Invariant: a library that can be told
once is never silently told twice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.environment import export_variables, withdraw_variable
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.storage.objects.client_settings import ClientSettings


def export_credentials(settings: ClientSettings) -> Mapping[str, str]:
    """Put credentials and region where libraries look, and keep those from asking instance metadata."""
    exported = {
        "AWS_ACCESS_KEY_ID": settings.credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": settings.credentials.secret_key,
        "AWS_REGION": settings.options.region,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    if settings.credentials.session_token:
        exported["AWS_SESSION_TOKEN"] = settings.credentials.session_token
    else:
        withdraw_variable("AWS_SESSION_TOKEN")
    export_variables(exported)
    return exported


class ProcessWideSettings:
    """Settings that a library reads from the environment once, at its first request in this process."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._told: dict[str, str] = {}
        self._lock = threading.Lock()

    def tell(self, settings: Mapping[str, str], *, secret: frozenset[str] = frozenset()) -> None:
        """Export `settings`, or raise where an earlier storage of this process told the library otherwise."""
        with self._lock:
            differing = [name for name, value in self._told.items() if settings.get(name, "") != value]
            if differing:
                shown = [name for name in differing if name not in secret] or differing
                raise UsageError(
                    f"{self._library} has one configuration per process, and {', '.join(shown)} was another "
                    "when it was first used",
                    fix="Use one process for each configuration, or another client.",
                )
            self._told = dict(settings)
            export_variables(settings)

    def told(self, name: str) -> str:
        """What the library was told under this name; "" before the first time."""
        return self._told.get(name, "")
