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
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.manager.save_policy import StopRequest


@dataclass(frozen=True, kw_only=True)
class _HaltOptions:
    run: str = argument("RUN", URI, "Durable directory or URI of the manager.")
    reason: str = option("--reason", TEXT, "Reason to write into the job's log.", default="")
    cancels: bool = flag("--cancel", "Withdraw the request, if no job has obeyed it yet.")
    shows_status: bool = flag("--status", "Show whether a stop is requested, and request none.")


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
    from penstock.checkpoint.manager import save_policy
    from penstock.storage.uri import open_here

    run = options.run
    if sum((options.cancels, options.shows_status, bool(options.reason))) > 1:
        raise UsageError(
            "--reason, --cancel and --status are mutually exclusive", fix="Give one of them, or none to halt."
        )
    storage = open_here(run)
    if options.cancels:
        was_requested = save_policy.cancel_stop_request(storage)
        text = "withdrawn" if was_requested else "no stop was requested"
        terminal.result({"cancelled": was_requested}, lambda console: console.print(f"halt {run}: {text}"))
        return
    order = save_policy.find_stop_request(storage) if options.shows_status else _make_order(options.reason)
    if order is not None and not options.shows_status:
        save_policy.request_stop(storage, order)
    terminal.result(
        {"asked": order is not None, "order": None if order is None else order.model_dump()},
        lambda console: console.print(f"halt {run}: {_describe(order)}"),
    )


def _make_order(reason: str) -> StopRequest:

    from penstock.checkpoint.manager.save_policy import StopRequest

    return StopRequest(asked_by=f"{getpass.getuser()}@{gethostname()}", asked_at_s=time.time(), reason=reason)


def _describe(order: StopRequest | None) -> str:

    if order is None:
        return "no stop is requested"
    when = datetime.fromtimestamp(order.asked_at_s).astimezone().isoformat(timespec="seconds")
    reason = f": {order.reason}" if order.reason else ""
    return f"requested by {order.asked_by} at {when}{reason}"
