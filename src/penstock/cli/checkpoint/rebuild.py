"""`penstock checkpoint rebuild` and `scavenge`: what caches can still give after a crash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.ranks import ranked
from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from penstock.checkpoint.levels.cache import CacheLevel
    from penstock.checkpoint.levels.recovery import Mended

NOT_GIVEN = 1

_Caches = Annotated[
    list[str],
    typer.Argument(metavar="CACHE...", help="The cache of each rank's node: one for all, or one a rank."),
]
_Steps = Annotated[
    list[int] | None, typer.Option("--step", metavar="N", help="Only this step; repeatable. [default: all]")
]


@ranked
def rebuild(
    comm: Comm,
    cache: _Caches,
    *,
    step: _Steps = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Believe names and sizes; read no sums.")
    ] = False,
    as_json: JsonFlag = False,
) -> int:
    """Give caches back what was lost or damaged, as far as each step's redundancy allows.

    Runs on the nodes whose caches they are, those of replaced nodes included, with a rank on each. Exits with
    1 if a step is beyond repair; nothing of it is removed.

    Examples:

      srun --ntasks-per-node=1 penstock checkpoint rebuild /local/ssd/run

      penstock checkpoint rebuild /mnt/a/run /mnt/b/run /mnt/c/run --ranks 3 --step 100 --json
    """
    from penstock.checkpoint.levels.recovery import cached_steps, mend

    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    with _level(cache, comm) as level, terminal.progress() as progress:
        steps = _asked(step, cached_steps(level, comm))
        progress.begin("steps", len(steps))
        found = []
        for each in steps:
            found.append(mend(level, comm, each, verified=not no_verify))
            progress.advance(1)
    terminal.result({"steps": _document(found)}, table("caches", [_row(each) for each in found]))
    return _told(terminal, found)


@ranked
def scavenge(
    comm: Comm,
    cache: _Caches,
    *,
    to: Annotated[str, typer.Option("--to", metavar="RUN", help="The manager's durable folder or URI.")],
    step: _Steps = None,
    as_json: JsonFlag = False,
) -> int:
    """Make the newest step durable that the surviving caches hold or can rebuild.

    For after a crash, on the nodes that are left, with a rank on each. Every file is held against its sums
    before it is copied, and the step is committed as a flush would have. Exits with 1 if there is none.

    Examples:

      srun --ntasks-per-node=1 penstock checkpoint scavenge /local/ssd/run --to /pfs/run

      penstock checkpoint scavenge /mnt/a/run /mnt/b/run --ranks 2 --to /pfs/run --step 100
    """
    from penstock.checkpoint.commit.catalog import Steps
    from penstock.checkpoint.levels import recovery
    from penstock.storage.registry import open_here

    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    with _level(cache, comm) as level, terminal.progress():
        steps = _asked(step, recovery.cached_steps(level, comm))
        found = recovery.scavenge(level, comm, Steps(open_here(to, rank=comm.rank)), steps)
    passed_over = [each for each in found.looked_at if each.reason]
    document = {"step": found.step, "uri": found.uri, "looked_at": _document(found.looked_at)}
    text = "nothing to scavenge" if found.step is None else f"step {found.step} is durable: {found.uri}"
    terminal.result(document, lambda console: console.print(text, markup=False))
    _told(terminal, passed_over)
    return NOT_GIVEN if found.step is None else 0


@contextmanager
def _level(caches: Sequence[str], comm: Comm) -> Iterator[CacheLevel]:
    from penstock.checkpoint.levels.cache import CacheLevel
    from penstock.checkpoint.levels.options import Single
    from penstock.errors import UsageError
    from penstock.storage.registry import open_here

    if len(caches) not in (1, comm.size):
        raise UsageError(
            f"{len(caches)} caches are named for {comm.size} ranks",
            fix=f"Name one for all ranks, or one for each: --ranks {len(caches)}.",
        )
    path = caches[0] if len(caches) == 1 else caches[comm.rank]
    level = CacheLevel(open_here(path, rank=comm.rank), comm, schemes=[Single()])
    try:
        yield level
    finally:
        level.close()


def _asked(wanted: Sequence[int] | None, held: Sequence[int]) -> list[int]:
    from penstock.errors import ObjectNotFound

    if not held:
        raise ObjectNotFound(
            "None of these caches holds a step", fix="Name the manager's cache= of each rank's node."
        )
    absent = sorted(set(wanted or ()) - set(held))
    if absent:
        raise ObjectNotFound(
            f"Step {absent[0]} is in none of these caches",
            fix=f"They hold {', '.join(map(str, held))}.",
        )
    return sorted(wanted or held)


def _document(found: Sequence[Mended]) -> list[dict[str, Any]]:
    return [{**asdict(each), "outcome": each.outcome} for each in found]


def _row(found: Mended) -> dict[str, str]:
    return {
        "step": str(found.step),
        "outcome": found.outcome,
        "missing": ", ".join(map(str, found.missing)) or "-",
        "damaged": ", ".join(map(str, found.damaged)) or "-",
    }


def _told(terminal: Terminal, found: Sequence[Mended]) -> int:
    for each in found:
        if each.reason:
            terminal.note(f"step {each.step}: {each.reason}")
    return NOT_GIVEN if any(each.reason for each in found) else 0
