"""`penstock checkpoint halt`: let a running job save once more and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.manager.graceful_stop import HaltOrder


def halt(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The manager's durable folder or URI.")],
    *,
    reason: Annotated[str, typer.Option("--reason", help="What the job's log is to say.")] = "",
    cancel: Annotated[bool, typer.Option("--cancel", help="Take it back, if no job has obeyed yet.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only say whether it is asked for.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Ask the job whose manager saves to RUN to save once more, flush and leave.

    The job sees the marker, RUN/halt.json, at its next `manager.due`, some seconds later: all of its ranks
    at the same step. It removes the marker when it leaves. A job that is not running yet obeys at its start.

    Examples:

      penstock checkpoint halt /pfs/run --reason "maintenance at 18:00"

      penstock checkpoint halt /pfs/run --status --json

      penstock checkpoint halt /pfs/run --cancel
    """
    from penstock.checkpoint.manager import graceful_stop
    from penstock.storage.registry import open_here

    if sum((cancel, status, bool(reason))) > 1:
        raise UsageError(
            "--reason, --cancel and --status exclude each other", fix="Give one of them, or none to halt."
        )
    terminal = Terminal(as_json=as_json)
    storage = open_here(run)
    if cancel:
        was_asked = graceful_stop.cancel_halt(storage)
        text = "taken back" if was_asked else "nobody had asked for it"
        terminal.result({"cancelled": was_asked}, lambda console: console.print(f"halt {run}: {text}"))
        return
    order = graceful_stop.find_halt(storage) if status else _ordered(reason)
    if order is not None and not status:
        graceful_stop.order_halt(storage, order)
    terminal.result(
        {"asked": order is not None, "order": None if order is None else order.model_dump()},
        lambda console: console.print(f"halt {run}: {_told(order)}"),
    )


def _ordered(reason: str) -> HaltOrder:
    import getpass
    import time
    from socket import gethostname

    from penstock.checkpoint.manager.graceful_stop import HaltOrder

    return HaltOrder(asked_by=f"{getpass.getuser()}@{gethostname()}", asked_at_s=time.time(), reason=reason)


def _told(order: HaltOrder | None) -> str:
    from datetime import datetime

    if order is None:
        return "nobody asks for it"
    when = datetime.fromtimestamp(order.asked_at_s).astimezone().isoformat(timespec="seconds")
    why = f": {order.reason}" if order.reason else ""
    return f"asked for by {order.asked_by} at {when}{why}"
