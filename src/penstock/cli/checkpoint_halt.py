"""`penstock checkpoint halt`: ask a running job to save once more and stop."""

from __future__ import annotations

import getpass
import time
from dataclasses import dataclass
from datetime import datetime
from socket import gethostname
from typing import TYPE_CHECKING

from penstock.cli.options import argument, flag, option, verb
from penstock.cli.parsers import TEXT, URI
from penstock.cli.terminal import Terminal
from penstock.errors import ObjectNotFound, UsageError
from penstock.storage.capabilities import find_local_root
from penstock.storage.uri import open_here

if TYPE_CHECKING:
    from penstock.checkpoint.manager.graceful_stop import StopRequest
    from penstock.storage import Storage


@dataclass(frozen=True, kw_only=True)
class _HaltOptions:
    run: str = argument("RUN", URI, "Durable directory or URI of the manager.")
    reason: str = option("--reason", TEXT, "Write this reason into the job's log.", default="")
    cancels: bool = flag("--cancel", "Withdraw the request, if no job has obeyed it yet.")
    shows_status: bool = flag("--status", "Show whether a stop has been requested, without requesting one.")


@verb(_HaltOptions)
def halt(options: _HaltOptions, terminal: Terminal) -> None:
    """Request a graceful stop: the job whose manager saves to RUN saves once more, flushes and exits.

    The job sees the marker, RUN/halt.json, some seconds later when its training loop asks the manager whether
    to save; all ranks stop at the same step. It removes the marker when it exits. A job that is not running
    yet obeys when it starts.

    Examples:

      penstock checkpoint halt /pfs/run --reason "maintenance at 18:00"

      penstock checkpoint halt /pfs/run --status --json

      penstock checkpoint halt /pfs/run --cancel
    """
    from penstock.checkpoint.manager import graceful_stop

    run = options.run
    if sum((options.cancels, options.shows_status, bool(options.reason))) > 1:
        raise UsageError(
            "--reason, --cancel and --status are mutually exclusive", fix="Give one of them, or none to halt."
        )
    storage = open_here(run)
    if options.cancels:
        was_requested = graceful_stop.cancel_stop_request(storage)
        text = "withdrawn" if was_requested else "no stop was requested"
        terminal.result({"cancelled": was_requested}, [f"halt {run}: {text}"])
        return
    if options.shows_status:
        request = graceful_stop.find_stop_request(storage)
    else:
        _require_folder(storage)
        request = _make_request(options.reason)
        graceful_stop.request_stop(storage, request)
    terminal.result(
        {"asked": request is not None, "order": request.model_dump() if request else None},
        [f"halt {run}: {_describe(request)}"],
    )


def _require_folder(storage: Storage) -> None:
    root = find_local_root(storage)
    if root is not None and not root.is_dir():
        raise ObjectNotFound(
            "There is no such directory of checkpoints, so no job would see the request",
            uri=storage.uri,
            fix="Give the one that the manager was made with. If that job has saved nothing yet, create it.",
        )


def _make_request(reason: str) -> StopRequest:
    from penstock.checkpoint.manager.graceful_stop import StopRequest

    return StopRequest(asked_by=f"{getpass.getuser()}@{gethostname()}", asked_at_s=time.time(), reason=reason)


def _describe(request: StopRequest | None) -> str:
    if request is None:
        return "no stop is requested"
    when = datetime.fromtimestamp(request.asked_at_s).astimezone().isoformat(timespec="seconds")
    reason = f": {request.reason}" if request.reason else ""
    return f"requested by {request.asked_by} at {when}{reason}"
