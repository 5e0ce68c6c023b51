"""The manager: one object, present on all ranks, that saves, keeps, finds and restores a run's checkpoints.

Both paths are in this module: `save` calls `_start` (agree, stage; then write, commit and apply retention on
a separate thread), and `restore` tries the copies of a `RestoreSearch` until one can be loaded. A `StepStore`
knows where steps are; a `Saver` and a `CheckpointLoader` know how to transfer bytes. Invariant: whatever
`restore` returns was committed and loaded completely; a failed save raises in `SaveHandle.result` or, at the
latest, on all ranks in the next collective call.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from penstock.checkpoint.commit.checkpoints import AnyPath, StepCatalog, stage_on_all_ranks, step_dirname
from penstock.checkpoint.engine import (
    TRANSFER_TIMEOUT_S,
    LoadChoice,
    RankSaveStats,
    Replicas,
    SaveCancelled,
    SaveChoice,
    StagedSave,
    State,
    Urgency,
    list_ranks,
    make_comm,
)
from penstock.checkpoint.levels.options import EACH, Flush, Scheme, Single, require_cache_for
from penstock.checkpoint.manager import policies, step_store
from penstock.checkpoint.manager.policies import ON_REQUEST, GracefulStop, StopConditions
from penstock.checkpoint.state.walk import NamePatterns
from penstock.cluster.comm import Comm, blame, format_cause, run_on_all_ranks
from penstock.errors import RankError, RankFailed, UsageError, WaitTimeout, printable
from penstock.optional_libraries import explained_imports
from penstock.progress import Progress
from penstock.storage import Storage
from penstock.storage.uri import open_here

if TYPE_CHECKING:
    from penstock.checkpoint.manager.user_files import Restart, UserOutput

Staging = Literal["copied", "background"]
"""The moment when `save_async` returns: "copied", once the tensors may change; "background", at once."""

logger = logging.getLogger(__name__)


class Manager:
    """Saves and restores the checkpoints of a run below `durable`: a path, a URI or an open `Storage`.

    >>> with Manager("/pfs/run", keep=3) as manager:
    ...     step = manager.restore(state) or 0
    ...     handle = manager.save_async(step + 1, state)

    The newest `keep` checkpoints are kept; None keeps all. `process_group` names the ranks that save together
    (default: all ranks, or this process alone). Managers of disjoint groups can work at the same time if each
    has its own folder. Creating and closing a manager is collective. No wait takes longer than
    `timeout_s`. With `has_pointer`, a file `latest` names the newest step.

    Each rank writes `writers` files in parallel. `staging_bytes` limits the memory of pending saves on a rank
    (default: 2 GiB); if the state is larger, `save_async` blocks until the excess is written. With
    `replicas="compare"`, a save is refused if tensors differ between ranks.

    With `cache`, a folder on each node, steps are saved there, protected by `redundancy`, and copied to
    `durable` in the background according to `flush`; the newest `keep_cached` are kept there. Ranks with the
    same `failure_domain` (default: this host) never protect each other. See `penstock docs levels`.

    `save_policy` determines what `should_save` returns: `if manager.should_save(step):
    manager.save_async(step, state)`. `stop` lists events that end the job: once one has occurred,
    `should_save` returns True and `stop_reason` gives the reason.
    """

    def __init__(  # noqa: PLR0913 - as many as a run has choices
        self,
        durable: AnyPath | Storage,
        *,
        keep: int | None = None,
        cache: AnyPath | Storage | None = None,
        redundancy: Scheme | Sequence[Scheme] = (),
        flush: Flush | None = EACH,
        keep_cached: int | None = 2,
        failure_domain: str | None = None,
        save_policy: policies.SavePolicy = policies.EVERY_STEP,
        stop: StopConditions = ON_REQUEST,
        process_group: Any = None,
        writers: int = 2,
        staging_bytes: int | None = None,
        replicas: Replicas = "share",
        has_pointer: bool = True,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        options: dict[str, Any] = {"keep": keep, "keep_cached": keep_cached}
        for option, number in options.items():
            if number is not None and (not isinstance(number, int) or number < 1):
                raise UsageError(
                    f"{option} must be a whole number from 1 or None, not {number!r}",
                    fix="None keeps all steps.",
                )
        require_cache_for(redundancy, flush, is_cached=cache is not None)
        # Two connections: a background save must not wait for another rank's foreground call, nor vice versa.
        ranks = list_ranks(process_group)
        self._front, self._back = make_comm(ranks, timeout_s), make_comm(ranks, timeout_s)
        self._timeout_s = timeout_s
        self._rank = self._front.rank
        self._storage = _open_storage(durable, self._rank)
        catalog = StepCatalog(self._storage, has_pointer=has_pointer)
        self._store = step_store.StepStore(catalog, self._back, keep=keep)
        if cache is not None:
            from penstock.checkpoint.levels.tiered_store import TieredStore  # noqa: PLC0415 - optional

            self._store = TieredStore(
                self._store,
                _open_storage(cache, self._rank),
                schemes=[redundancy] if isinstance(redundancy, Scheme) else redundancy or [Single()],
                flush=flush,
                keep_cached=keep_cached,
                domain=failure_domain,
                uri=os.fspath(durable) if isinstance(durable, str | os.PathLike) else None,
            )
        self._scheduler = policies.SaveScheduler(save_policy)
        self._stop = GracefulStop(stop, self._storage, self._rank)
        with explained_imports():
            from penstock.checkpoint.loader import CheckpointLoader  # noqa: PLC0415 - loads torch
            from penstock.checkpoint.plan.save_plan import SaveOptions  # noqa: PLC0415 - loads numpy
            from penstock.checkpoint.saver import DEFAULT_STAGING_BYTES, Saver  # noqa: PLC0415 - loads torch

        self._loader = CheckpointLoader()
        self._saver = Saver(
            SaveOptions(writers=writers),
            staging_bytes=staging_bytes or DEFAULT_STAGING_BYTES,
            replicas=replicas,
        )
        self._restart: Restart | None = None
        self._in_flight = SavesInFlight(self._front, self._storage.uri, timeout_s)
        self._num_saves = 0
        self._worker = step_store.start_lasting_worker("penstock-save", self._in_flight.print_failures)
        self._owner: int | None = os.getpid()
        self.skipped_steps: tuple[step_store.SkippedStep, ...] = ()
        """Steps that the last `restore` could not load, newest first."""

    def steps(self) -> list[int]:
        """Return all committed steps, in ascending order. Not collective."""
        return self._store.steps()

    def latest(self) -> int | None:
        """Return the newest committed step, or None. Not collective."""
        return max(self.steps(), default=None)

    @property
    def stop_reason(self) -> str:
        """The reason to end this job, or "". After a call of `should_save`, it is the same on all ranks."""
        return self._stop.reason

    def should_save(self, step: int) -> bool:
        """Return whether to save now, for the policy or because the job should end. Collective."""
        comm, awaiting = self._front, "all ranks at should_save"
        is_due, reason = self._scheduler.is_due(step), self._stop.find_reason()
        answers = comm.gather((is_due, reason), awaiting=awaiting)
        self._stop.agree([reason for _, reason in answers])
        # Rank 0's policy decides for all: if each rank read its own clock, they would not agree.
        return answers[0][0] or bool(self.stop_reason)

    def save(
        self,
        step: int,
        state: State,
        *,
        only: NamePatterns | None = None,
        dtype: Any = None,
        progress: Progress | None = None,
    ) -> SaveReport:
        """Save `state` as `step`, and return when it is committed. Collective.

        An existing checkpoint of this step stays usable until the new one replaces it. `only` saves the parts
        whose names match; `dtype` converts floating-point tensors; `progress` is informed of every byte
        transferred.
        """
        choice = SaveChoice(only=only, dtype=dtype)
        with self._scheduler.measure():
            return self._start(step, state, choice, progress, urgent="commit").result()

    def save_async(
        self,
        step: int,
        state: State,
        *,
        staging: Staging = "copied",
        only: NamePatterns | None = None,
        dtype: Any = None,
        progress: Progress | None = None,
    ) -> SaveHandle:
        """Save `state` as `step` in the background; `only`, `dtype`, `progress` as in `save`. Collective.

        Returns once the state is copied, so that its tensors may change. With staging="background", returns
        at once; then the tensors may change only after the handle's `wait_staged`. If the save fails, the
        handle's `result` raises, or else the next collective call of this manager.
        """
        if staging not in ("copied", "background"):
            raise UsageError(f"Invalid staging={staging!r}", fix='Choose "copied" or "background".')
        with self._scheduler.measure():
            handle = self._start(step, state, SaveChoice(only=only, dtype=dtype), progress, urgent="copy")
            if staging == "copied":
                handle.wait_staged()
        return handle

    def _start(
        self, step: int, state: State, choice: SaveChoice, progress: Progress | None, *, urgent: Urgency
    ) -> SaveHandle:
        """Begin a save: agree on who writes what, and start to copy. The caller waits for this part."""
        name, is_last = step_dirname(step), bool(self.stop_reason)
        with self._front.leaving_if_interrupted():
            self._sync(f"saving {name}")
            prepared = self._saver.prepare(state, self._front, choice)
            staged = stage_on_all_ranks(prepared, urgent, self._front)
        if self._rank == 0 and not self._num_saves:
            self._worker.submit(step_store.warn_of_newer_steps, self._store, step)
        self._num_saves += 1
        handle = SaveHandle(step, self._num_saves, staged, timeout_s=self._timeout_s)

        def complete() -> None:
            """Write, commit, hide older steps; all on one thread, so that ranks save in the same order."""
            with ExitStack() as undo:
                undo.callback(staged.cancel)
                transaction = self._store.open(name)
                uri, stats, clear_up = self._store.complete(
                    transaction, prepared, staged, progress, is_last=is_last
                )
                report = SaveReport(step, uri, stats)
                undo.pop_all()
            handle.commit(report)
            logger.info("Committed step %d, rank %d: %s", step, self._rank, report.ranks[self._rank])
            # Only now that no one waits any longer: removing files may take as long as writing them.
            clear_up()

        with ExitStack() as undo:
            undo.callback(staged.cancel)
            self._worker.submit(self._stop.time_save, complete).add_done_callback(handle.end)
            undo.pop_all()
        self._in_flight.add(handle)
        return handle

    def restore(
        self,
        state: State,
        *,
        step: int | None = None,
        only: NamePatterns | None = None,
        exclude: NamePatterns | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
        convert_dtypes: bool = False,
        trust: bool = False,
        verify: bool = False,
        progress: Progress | None = None,
    ) -> int | None:
        """Fill `state` in place from the newest usable step, or from exactly `step`. Collective.

        Returns the step, or None if no step was ever committed. Steps that are damaged or incomplete are
        skipped with a warning and listed in `skipped_steps`; if no step is usable, every rank raises
        `StorageError` with the reasons. Every rank also raises it if storage fails, because the newest step
        may be intact. With `verify`, steps that are damaged anywhere or have no checksums are skipped as
        well. `only`, `exclude`, `rename`, `strict`, `convert_dtypes`, `trust` and `progress` are as in
        `pc.load`.
        """
        self.skipped_steps = ()
        with self._front.leaving_if_interrupted():
            self._sync(f"restoring {'the newest step' if step is None else step_dirname(step)}", waits=True)
            choice = LoadChoice(
                only, exclude, rename, strict=strict, convert_dtypes=convert_dtypes, trust=trust
            )
            search = step_store.RestoreSearch(self._store, step, self._front)
            for copy in search.copies:
                with search:
                    checkpoint = copy.open()
                    if verify:
                        from penstock.checkpoint.tools.verify import require_verified  # noqa: PLC0415 - rare

                        check = partial(require_verified, checkpoint, self._rank, self._front.size)
                        run_on_all_ranks(self._front, check, awaiting="all ranks to verify their parts")
                    try:
                        self._loader.load(state, checkpoint, self._front, choice, progress)
                    except (UsageError, RankError) as error:
                        from penstock.checkpoint.manager import user_files  # noqa: PLC0415 - rarely needed

                        user_files.explain_missing_state(checkpoint, error)
                        raise
                if search.has_loaded:
                    logger.info("Restored step %d from: %s", search.step, copy.level)
                    break
            self.skipped_steps = search.skipped_steps
            if search.has_loaded:
                return search.step
            search.require_any()
            return None

    def output(self, name: str | int, *, checkpoint: bool = True) -> UserOutput:
        """Open a step whose files the program writes itself. Entering and leaving the block is collective.

        >>> with manager.output("step-100") as out:
        ...     torch.save(state, out.path(f"rank_{rank}.pt"))

        The step is kept, protected and flushed like any other. It is discarded on all ranks if one of them
        calls `out.mark_invalid()` or raises. With `checkpoint=False`, the files are results: they have a
        name other than `step-N`, are written to the durable level immediately, and are never removed.
        """
        from penstock.checkpoint.manager.user_files import UserOutput, check_output_name  # noqa: PLC0415

        output_name = check_output_name(name, checkpoint=checkpoint)
        self._sync(f"writing {output_name}")
        return UserOutput(
            output_name,
            self._front,
            self._store,
            is_last=bool(self.stop_reason),
            in_turn=lambda work: self._worker.submit(self._stop.time_save, work).result(),
            timed=self._scheduler.measure(),
        )

    def restart(self, *, step: int | None = None) -> Restart:
        """Find the newest step whose files the program wrote itself, or exactly `step`. Collective.

        >>> with manager.restart() as found:
        ...     if found.step is not None:
        ...         state = torch.load(found.path(f"rank_{rank}.pt"))

        The step's files have been verified. If a rank calls `found.mark_invalid()`, the next call of
        `restart` returns the next copy of this step, or an older step. `found.step` is None if no step was
        ever committed.
        """
        from penstock.checkpoint.manager.user_files import Restart  # noqa: PLC0415 - loads `verify`

        self._sync(f"restarting from {'the newest step' if step is None else step_dirname(step)}", waits=True)
        if self._restart and not self._restart.is_valid:
            search = self._restart.search
        else:
            search = step_store.RestoreSearch(self._store, step, self._front)
        self._restart = Restart(search, self._front)
        self.skipped_steps = search.skipped_steps
        return self._restart

    def close(self) -> None:
        """Wait for all saves, then release everything; raise any failure not reported so far. Collective."""
        # A forked process has a copy of the manager, but neither its threads nor its lease.
        if self._owner != os.getpid():
            return
        try:
            self._in_flight.wait()
            # Not after an error, which may be this rank's alone: no flusher would get the other ranks' files.
            self._store.close(flushes_newest=True)
            self._sync("closing")
        finally:
            self._close_resources()

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied: two managers would give the same numbers to their saves."""
        raise UsageError("A Manager cannot be copied or pickled", fix="Make a new one in each process.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. After an error or `sys.exit`, pending saves finish without raising; Ctrl-C cancels them."""
        if kind is None or self._owner != os.getpid():
            self.close()
            return
        if issubclass(kind, KeyboardInterrupt):
            for handle in self._in_flight.handles:
                handle.cancel()
        self._close_resources()

    def _sync(self, activity: str, *, waits: bool = False) -> None:
        """Wait until all ranks make the same call; raise any rank's unreported failures on all ranks."""
        if self._owner != os.getpid():
            state = (
                "was closed" if self._owner is None else f"belongs to process {self._owner}, not to its fork"
            )
            raise UsageError(f"This manager {state}, so {activity} is impossible", fix="Make a new Manager.")
        if waits:
            self._in_flight.wait()
        self._in_flight.sync_and_raise(activity, self._store.unreported_failures())

    def _close_resources(self) -> None:
        self._owner = None
        self._worker.shutdown()
        for part in (self._stop, self._store, self._saver, self._loader, self._front, self._back):
            part.close()


def _open_storage(location: AnyPath | Storage, rank: int) -> Storage:
    if location is None:
        raise UsageError("The path of the manager is None", fix="Give the folder or the URI of the run.")
    return open_here(location, rank=rank) if isinstance(location, str | os.PathLike) else location


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of a save: the `step`, its `uri`, and the statistics of the `ranks`, in rank order."""

    step: int
    uri: str
    ranks: tuple[RankSaveStats, ...]

    @property
    def payload_bytes(self) -> int:
        """The size of the state, summed over all ranks."""
        return sum(stats.payload_bytes for stats in self.ranks)


class SaveHandle:
    """A save in the background, as returned by `save_async`.

    Any thread may call its methods; none is collective. A failure is raised by `result`, or else once by the
    manager's next collective call on all ranks, or else printed to stderr when the program ends.

    The manager creates it from the `step`, the save's `number` (counted from 1, the same on all ranks), the
    `staged` save and `timeout_s`, and then calls `commit(report)` and `end(work)`.
    """

    def __init__(self, step: int, number: int, staged: StagedSave, *, timeout_s: float) -> None:
        self.step = step
        self.number = number
        self._staged = staged
        self._future: Future[SaveReport] = Future()
        self._timeout_s = timeout_s
        self.is_reported = False

    def wait_staged(self, timeout: float | None = None) -> None:
        """Return when the tensors may change.

        Raises `WaitTimeout` after `timeout` seconds; if that is None, the manager's limit applies.
        """
        try:
            self._staged.wait_staged(self._timeout_s if timeout is None else timeout)
        except SaveCancelled:
            self.result()  # a failure has cancelled the copying: raise it, because it is the cause
            raise

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the step is committed, and return the report.

        If the save failed, every call raises its error. Raises `WaitTimeout` after `timeout` seconds. If that
        is None, only the save's own time limits apply.
        """
        self.wait_done(timeout)
        self.is_reported = True
        return self._future.result()

    @property
    def done(self) -> bool:
        """True once the save is committed, failed or cancelled."""
        return self._future.done()

    @property
    def stats(self) -> SaveReport | None:
        """The report if the step is committed; None before that, and after a failure."""
        is_committed = self._future.done() and self._future.exception() is None
        return self._future.result() if is_committed else None

    def cancel(self) -> None:
        """Cancel the save on all ranks; an existing checkpoint of this step is unaffected.

        `result` then raises. Has no effect once this rank's files are written: the step will be committed.
        """
        self.is_reported = True
        self._staged.cancel()

    def wait_done(self, timeout_s: float | None) -> None:
        """Return when the save is over, successful or not; raise `WaitTimeout` after `timeout_s`."""
        try:
            self._future.exception(timeout_s)
        except FutureTimeout as error:
            raise WaitTimeout(f"step {self.step} to be committed", timeout_s or 0.0) from error

    def unreported_error(self) -> BaseException | None:
        """Return the error of a failed save if no call has raised it yet; otherwise None."""
        return None if self.is_reported or not self._future.done() else self._future.exception()

    def commit(self, report: SaveReport) -> None:
        """Record that the step is committed."""
        self._future.set_result(report)

    def end(self, work: Future[None]) -> None:
        """Record how the save ended.

        A failure is logged, because the program may end before it asks for the result.
        """
        error = work.exception()
        if error is None:
            return
        if self._future.done():
            logger.error("Not all old steps were removed: %s", format_cause(error))
            return
        self._future.set_exception(error)
        log_failure(f"Step {self.step} was not saved", work)


MOST_PENDING = 8
"""The largest number of background saves that may be pending on a rank."""


class SavesInFlight:
    """One rank's saves that are pending, or that failed and have not been reported."""

    def __init__(self, comm: Comm, folder: str, timeout_s: float) -> None:
        self._comm = comm
        self._folder = folder
        self._timeout_s = timeout_s
        self.handles: list[SaveHandle] = []
        self._has_warned = False

    def add(self, handle: SaveHandle) -> None:
        """Watch one more save. Wait if too many are pending: each has threads, and a crash would lose all."""
        self.handles.append(handle)
        if len(self.handles) <= MOST_PENDING:
            return
        first = self.handles[-MOST_PENDING - 1]
        if not (first.done or self._has_warned):
            self._has_warned = True
            logger.warning(
                "Saves take longer than the time between them: %d are pending, so calls wait", MOST_PENDING
            )
        first.wait_done(self._timeout_s)

    def wait(self) -> None:
        """Return when all saves are over, successful or not."""
        for handle in self.handles:
            handle.wait_done(self._timeout_s)

    def sync_and_raise(self, activity: str, flush_failures: Mapping[int, BaseException]) -> None:
        """Wait until all ranks make the same call, then raise the first unreported failure. Collective.

        This is where a background failure of one rank becomes an error on all: ranks gather their failures
        before they start anything new. `flush_failures`, by step, are those of flushes whose saves had
        already returned.
        """
        found = [
            (handle.number, f"saving step {handle.step}", failure)
            for handle in self.handles
            if (failure := handle.unreported_error()) is not None
        ]
        # Handles count from 1, and a flush has no handle: its number is 0.
        found += [(0, f"making durable step {step}", failure) for step, failure in flush_failures.items()]
        own_failures = []
        for number, what, failure in found:
            blamed = blame(self._comm, failure)
            cause = f"{what} in the background: {blamed.cause}"
            own_failures.append((number, blamed.rank, blamed.host, cause))
        call = (activity, self._folder)
        views = self._comm.gather((call, own_failures), awaiting=f"all ranks to begin {activity}")
        if {other for other, _ in views} != {call}:
            is_elsewhere = len({folder for (_, folder), _ in views}) > 1
            calls = ", ".join(
                f"rank {rank}: {other}" + is_elsewhere * f" in {folder}"
                for rank, ((other, folder), _) in enumerate(views)
            )
            raise UsageError(
                f"Ranks made different calls: {calls}",
                fix="Make the same calls in the same order on all ranks, on managers of the same folder.",
            )
        failures = sorted(failure for _, failed in views for failure in failed)
        reported = {number for number, *_ in failures}
        for handle in self.handles:
            # A save that failed on another rank fails on this one, too.
            if handle.number in reported:
                handle.wait_done(self._timeout_s)
                handle.is_reported = True
        self.handles[:] = [handle for handle in self.handles if not handle.done or handle.unreported_error()]
        if failures:
            _, rank, host, cause = failures[0]
            raise RankFailed(rank, host, cause)

    def print_failures(self) -> None:
        """Print to stderr the failures that no call has raised, wherever the log goes.

        The exit code is unaffected.
        """
        for handle in self.handles:
            if (error := handle.unreported_error()) is not None:
                cause = format_cause(error)
                with suppress(OSError, ValueError):
                    print(  # noqa: T201 - whatever becomes of the log
                        printable(
                            f"penstock: step {handle.step} was not saved, and no call reported it: {cause}"
                        ),
                        file=sys.stderr,
                    )


def log_failure(what: str, work: Future[Any]) -> None:
    """Log the failure of background work unless it was cancelled."""
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, SaveCancelled):
        logger.error("%s: %s", what, format_cause(error))
