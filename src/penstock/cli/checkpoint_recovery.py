"""`penstock checkpoint rebuild` and `scavenge`: recover cached steps after a crash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.options import arguments, flag, group, repeated, required
from penstock.cli.parsers import FOLDER_URI, URI, whole
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal, table
from penstock.errors import ObjectNotFound, UsageError

if TYPE_CHECKING:
    from penstock.checkpoint.levels.cache import CacheLevel
    from penstock.checkpoint.levels.recovery import StepRepair
    from penstock.cluster.comm import Comm

NOT_RECOVERED = 1


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The caches of all ranks, and the steps in them."""

    paths: tuple[str, ...] = arguments(
        "CACHE...", FOLDER_URI, "Cache of each rank's node: one path for all ranks, or one for each."
    )
    steps: tuple[int, ...] = repeated("--step", whole(), "Recover only this step (default: all).")

    @contextmanager
    def open(self, comm: Comm) -> Iterator[CacheLevel]:
        """The cache level of all ranks. Collective."""
        from penstock.checkpoint.levels.cache import CacheLevel
        from penstock.checkpoint.levels.options import Single
        from penstock.storage.uri import open_here

        if len(self.paths) not in (1, comm.size):
            raise UsageError(
                f"{len(self.paths)} caches for {comm.size} ranks",
                fix=f"Name one for all ranks, or one for each: --ranks {len(self.paths)}.",
            )
        path = self.paths[0] if len(self.paths) == 1 else self.paths[comm.rank]
        level = CacheLevel(open_here(path, rank=comm.rank), comm, schemes=[Single()])
        try:
            yield level
        finally:
            level.close()

    def select(self, cached_steps: Sequence[int]) -> list[int]:
        """The steps to recover, in order; raises ObjectNotFound if the caches lack one."""
        if not cached_steps:
            raise ObjectNotFound(
                "No step is in these caches", fix="Name the directory of cache= on each rank's node."
            )
        absent = sorted(set(self.steps) - set(cached_steps))
        if absent:
            raise ObjectNotFound(
                f"Step {absent[0]} is in none of these caches",
                fix=f"They hold {', '.join(map(str, cached_steps))}.",
            )
        return sorted(self.steps or cached_steps)


@dataclass(frozen=True, kw_only=True)
class _RebuildOptions:
    caches: CacheOptions = group(CacheOptions)
    no_verify: bool = flag("--no-verify", "Check only names and sizes; skip checksums.")


@ranked(_RebuildOptions)
def rebuild(options: _RebuildOptions, comm: Comm, terminal: Terminal) -> int:
    """Rebuild lost or damaged files of cached steps, as far as each step's redundancy allows.

    Run it on the nodes that own the caches, replaced nodes included, with one rank on each. Exits with 1 if a
    step cannot be rebuilt; nothing of it is removed.

    Examples:

      srun --ntasks-per-node=1 penstock checkpoint rebuild /local/ssd/run

      penstock checkpoint rebuild /mnt/a/run /mnt/b/run /mnt/c/run --ranks 3 --step 100 --json
    """
    from penstock.checkpoint.levels.recovery import list_cached_steps, repair_step

    reports = []
    with options.caches.open(comm) as level, terminal.progress() as progress:
        steps = options.caches.select(list_cached_steps(level, comm))
        progress.begin("steps", len(steps))
        for step in steps:
            reports.append(repair_step(level, comm, step, verified=not options.no_verify))
            progress.advance(1)
    terminal.result({"steps": _documents(reports)}, table("caches", [_row(report) for report in reports]))
    _note_reasons(reports, terminal)
    return NOT_RECOVERED if any(report.reason for report in reports) else 0


@dataclass(frozen=True, kw_only=True)
class _ScavengeOptions:
    caches: CacheOptions = group(CacheOptions)
    durable: str = required("--to", URI, "Durable directory or URI of the manager.")


@ranked(_ScavengeOptions)
def scavenge(options: _ScavengeOptions, comm: Comm, terminal: Terminal) -> int:
    """Copy the newest step that the surviving caches can restore or rebuild to durable storage.

    Run it after a crash on the nodes that are left, with one rank on each. Every file is verified before it
    is copied, and the step is committed as a flush would commit it. Exits with 1 if no step can be recovered.

    Examples:

      srun --ntasks-per-node=1 penstock checkpoint scavenge /local/ssd/run --to /pfs/run

      penstock checkpoint scavenge /mnt/a/run /mnt/b/run --ranks 2 --to /pfs/run --step 100
    """
    from penstock.checkpoint.commit.catalog import StepCatalog
    from penstock.checkpoint.levels import recovery
    from penstock.storage.uri import open_here

    with options.caches.open(comm) as level, terminal.progress():
        steps = options.caches.select(recovery.list_cached_steps(level, comm))
        durable = StepCatalog(open_here(options.durable, rank=comm.rank))
        scavenged = recovery.scavenge(level, comm, durable, steps)
    step = scavenged.step
    text = "nothing to scavenge" if step is None else f"step {step} is durable: {scavenged.uri}"
    document = {"step": step, "uri": scavenged.uri, "looked_at": _documents(scavenged.looked_at)}
    terminal.result(document, lambda console: console.print(text, markup=False))
    _note_reasons(scavenged.looked_at, terminal)
    return NOT_RECOVERED if step is None else 0


def _documents(reports: Sequence[StepRepair]) -> list[dict[str, Any]]:
    return [{**asdict(report), "outcome": report.outcome} for report in reports]


def _row(report: StepRepair) -> dict[str, str]:
    return {
        "step": str(report.step),
        "outcome": report.outcome,
        "missing": ", ".join(map(str, report.missing)) or "-",
        "damaged": ", ".join(map(str, report.damaged)) or "-",
    }


def _note_reasons(reports: Sequence[StepRepair], terminal: Terminal) -> None:
    for report in reports:
        if report.reason:
            terminal.note(f"step {report.step}: {report.reason}")
