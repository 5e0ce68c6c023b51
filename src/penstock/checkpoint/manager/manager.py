"""The checkpoints of one run: saved, kept, found again and restored by one object that all ranks have.

Calls that move a state are collective: all ranks make them in the same order. Foreground calls and background
saves speak over groups of their own, so that neither waits for the other. Invariant: what `restore` returns
was committed and loaded whole; a failed save is told on all ranks by the next collective call, at the latest.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from penstock.checkpoint.commit.catalog import Steps, step_dirname
from penstock.checkpoint.commit.transaction import stage_together
from penstock.checkpoint.engine import LoadChoice, SaveChoice
from penstock.checkpoint.levels.options import EACH, Flush, Scheme, Single
from penstock.checkpoint.levels.tiered_store import leveled
from penstock.checkpoint.manager.graceful_stop import ON_REQUEST, Halt, Halting
from penstock.checkpoint.manager.inflight import (
    Meter,
    SaveHandle,
    SaveReport,
    UnderWay,
    lasting_worker,
    log_failure,
)
from penstock.checkpoint.manager.save_policy import EVERY_STEP, Pacer
from penstock.checkpoint.manager.step_store import (
    DurableKeeper,
    PassedOver,
    Search,
    none_restorable,
    try_step,
)
from penstock.checkpoint.manager.user_files import Output, Restart, next_restart, require_state, set_name
from penstock.checkpoint.state.process_group import own_members
from penstock.errors import RankError, UsageError
from penstock.storage.registry import open_here

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from penstock.checkpoint.commit.catalog import AnyPath
    from penstock.checkpoint.engine import Engine, Names, PreparedSave, StagedSave, State, Urgency
    from penstock.checkpoint.manager.save_policy import Policy
    from penstock.checkpoint.manager.step_store import Find, Keeper
    from penstock.progress import Progress
    from penstock.storage import Storage

DEFAULT_TIMEOUT_S = 1800.0
"""The slowest rank may take so long to write its share."""

Staging = Literal["copied", "background"]
"""When `save_async` returns: once the tensors may change, or at once."""

logger = logging.getLogger(__name__)


class Manager:
    """The checkpoints below `durable`, a path, a URI or an open storage, of which the newest `keep` stay.

    >>> with Manager("/pfs/run", keep=3) as manager:
    ...     step = manager.restore(state) or 0
    ...     handle = manager.save_async(step + 1, state)

    `process_group` says whose checkpoints these are: None means all ranks of the default group, or this
    process alone. Managers of disjoint groups work at the same time; each needs a place of its own. Making
    and closing one is collective, too.

    Each rank writes `writers` files side by side; parts whose names begin with `separation_hint` go to files
    of their own. `staging_bytes` bounds what saves under way take beside the state on each rank (2 GiB); a
    larger state blocks `save_async` until the rest of it is written. An `engine` stands in for torch's.

    With a `cache`, a folder on each node, steps are saved there, protected by `redundancy`, and made durable
    in the background as `flush` says; `keep_cached` of them stay. `failure_domain` names what fails together
    with this rank (its host); ranks of one domain never protect each other. See docs/levels.md.

    `due` decides when to save, for those who ask: `if manager.due(step): manager.save_async(step, state)`.
    `halt` says what else lets the job leave: then a save is due, and `manager.halting` says why.
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
        due: Policy = EVERY_STEP,
        halt: Halt = ON_REQUEST,
        process_group: Any = None,
        writers: int = 2,
        separation_hint: str | None = None,
        staging_bytes: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        engine: Engine | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep} keeps nothing", fix="Keep one or more, or None for all.")
        self._front = own_members(process_group)
        self._back = own_members(process_group)
        for members in (self._front, self._back):
            members.comm.timeout_s = timeout_s
        self._rank = self._front.comm.rank
        self._storage = _opened(durable, self._rank)
        self._timeout_s = timeout_s
        plain = DurableKeeper(Steps(self._storage), self._back.comm, keep=keep, timeout_s=timeout_s)
        self._keeper: Keeper = plain
        if cache is not None:
            self._keeper = leveled(
                plain,
                _opened(cache, self._rank),
                own_members(process_group),
                schemes=[redundancy] if isinstance(redundancy, Scheme) else redundancy or [Single()],
                flush=flush,
                keep_cached=keep_cached,
                domain=failure_domain,
                path=os.fspath(durable) if isinstance(durable, str | os.PathLike) else None,
            )
        self._pacer = Pacer(due)
        self._halting = Halting(halt, self._storage, self._rank)
        self._engine = engine or _torch_engine(writers, separation_hint, staging_bytes)
        self._restart: Restart | None = None
        self._under_way = UnderWay(self._front.comm, timeout_s)
        self._num_saves = 0
        self._worker = lasting_worker("penstock-save")
        self._is_open = True
        self.passed_over: tuple[PassedOver, ...] = ()
        """What the last `restore` could not load, newest first."""

    def steps(self) -> list[int]:
        """All committed steps, ascending. Not collective."""
        return self._keeper.steps()

    def latest(self) -> int | None:
        """The newest committed step. Not collective."""
        return max(self.steps(), default=None)

    @property
    def halting(self) -> str:
        """Why this job is to leave, known on all ranks after the same `due`; empty while it is not."""
        return self._halting.reason

    def due(self, step: int) -> bool:
        """Whether to save at this step: as the policy says, or because the job is to leave. Collective."""
        answers = self._front.comm.gather(
            (self._pacer.is_due(step), self._halting.look()), awaiting="all ranks to say what is due"
        )
        self._halting.hear([reason for _, reason in answers])
        return answers[0][0] or bool(self.halting)

    def save(
        self,
        step: int,
        state: State,
        *,
        only: Names | None = None,
        dtype: Any = None,
        progress: Progress | None = None,
    ) -> SaveReport:
        """Save `state` as `step`, and return when it is committed. Collective.

        An older checkpoint of this step is replaced, and stays whole until then. `only` saves the parts whose
        names match; `dtype` converts tensors of floating point.
        """
        choice = SaveChoice(only=only, dtype=dtype)
        with self._pacer.measure():
            return self._start(step, state, choice, progress, urgent="commit").result()

    def save_async(
        self,
        step: int,
        state: State,
        *,
        staging: Staging = "copied",
        only: Names | None = None,
        dtype: Any = None,
        progress: Progress | None = None,
    ) -> SaveHandle:
        """Save `state` as `step` in the background. Collective.

        Returns when the state is copied and its tensors may change; with staging="background" at once, and
        they may change after `wait_staged`. If the save fails, `result` or the next call here raises.
        """
        if staging not in ("copied", "background"):
            raise UsageError(f"staging={staging!r} is unknown", fix='Use "copied" or "background".')
        choice = SaveChoice(only=only, dtype=dtype)
        with self._pacer.measure():
            handle = self._start(step, state, choice, progress, urgent="copy")
            if staging == "copied":
                handle.wait_staged()
        return handle

    def restore(  # noqa: PLR0913 - as many ways as `load` has
        self,
        state: State,
        *,
        step: int | None = None,
        only: Names | None = None,
        exclude: Names | None = None,
        rename: Mapping[str, str] | None = None,
        strict: bool = True,
        convert_dtypes: bool = False,
        trust: bool = False,
        progress: Progress | None = None,
    ) -> int | None:
        """Fill `state` in place from the newest step that is whole, or from `step` and no other. Collective.

        Returns the step; None where none was ever committed. A step that cannot be loaded is passed over with
        a warning, and told in `passed_over`; where all are, `StorageError` on every rank lists the reasons.
        """
        self.passed_over = ()
        self._under_way.wait()
        self._meet(f"restoring {'the newest step' if step is None else step_dirname(step)}")
        comm = self._front.comm
        choice = LoadChoice(
            only=only,
            exclude=exclude,
            rename=rename,
            strict=strict,
            convert_dtypes=convert_dtypes,
            trust=trust,
        )

        def load(copy: Find) -> None:
            stored = copy.find()
            try:
                self._engine.load(state, stored, self._front, choice, progress)
            except (UsageError, RankError) as error:
                require_state(stored, error)
                raise

        search = Search(self._keeper, step, self._rank)
        while copy := search.next_copy():
            reason = try_step(comm, partial(load, copy), search.step)
            if reason is None:
                break
            search.refuse(reason)
        self.passed_over = search.passed_over
        if copy is not None:
            logger.info("Restored step %d from: %s", search.step, copy.level)
            return search.step
        if self.passed_over:
            raise none_restorable(self.passed_over, self._storage.uri)
        return None

    def output(self, name: str | int, *, checkpoint: bool = True) -> Output:
        """A step whose files the program writes itself. Collective where its block begins and ends.

        >>> with manager.output("step-100") as out:
        ...     torch.save(state, out.route(f"rank_{rank}.pt"))

        The step is kept, protected and flushed as any other. It is discarded on all ranks where one calls
        `out.invalid()` or raises. Results (`checkpoint=False`) have any other name, go to the durable level
        at once and stay there.
        """
        called = set_name(name, checkpoint=checkpoint)
        self._meet(f"writing {called}")
        return Output(
            called,
            self._front.comm,
            open_slot=lambda: self._keeper.open(called, is_last=bool(self.halting)),
            in_turn=lambda work: self._worker.submit(self._halting.timed, work).result(),
            timed=self._pacer.measure(),
        )

    def restart(self, *, step: int | None = None) -> Restart:
        """The newest step whose files the program wrote itself, or `step` and no other. Collective.

        >>> with manager.restart() as found:
        ...     if found.step is not None:
        ...         state = torch.load(found.route(f"rank_{rank}.pt"))

        Its files were verified. Where a rank says `found.invalid()`, the next call gives the next copy, or an
        older step. `found.step` is None where none was ever committed.
        """
        self._under_way.wait()
        self._meet(f"restarting from {'the newest step' if step is None else step_dirname(step)}")
        before = self._restart
        search = before.search if before and not before.is_valid else Search(self._keeper, step, self._rank)
        self._restart = next_restart(search, self._front.comm, self._storage.uri)
        self.passed_over = search.passed_over
        return self._restart

    def close(self) -> None:
        """Wait for all saves and let go of everything; a failure not yet told is raised. Collective."""
        if not self._is_open:
            return
        try:
            self._under_way.wait()
            self._keeper.close()
            self._meet("closing")
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. After an error in the block, saves under way are still finished, but nothing more is raised.

        An interrupt (Ctrl-C) cancels them.
        """
        if kind is None:
            self.close()
            return
        if not issubclass(kind, Exception):
            self._under_way.cancel()
        self._let_go()

    def _start(
        self, step: int, state: State, choice: SaveChoice, progress: Progress | None, *, urgent: Urgency
    ) -> SaveHandle:
        self._meet(f"saving {step_dirname(step)}")
        prepared = self._engine.prepare(state, self._front, choice)
        staged = stage_together(prepared, urgent, self._front.comm)
        meter = Meter(progress)
        complete = partial(self._complete, step, prepared, staged, meter, is_last=bool(self.halting))
        future = self._worker.submit(self._halting.timed, complete)
        future.add_done_callback(partial(log_failure, step))
        self._num_saves += 1
        handle = SaveHandle(step, self._num_saves, staged, future, meter=meter, timeout_s=self._timeout_s)
        self._under_way.add(handle)
        return handle

    def _complete(
        self, step: int, prepared: PreparedSave, staged: StagedSave, meter: Meter, *, is_last: bool
    ) -> SaveReport:
        """The rest of a save, in the worker's thread, where saves follow each other on all ranks alike."""
        with ExitStack() as undo:
            undo.callback(staged.cancel)
            slot = self._keeper.open(step_dirname(step), is_last=is_last)
            uri, stats = slot.complete(prepared, staged, meter)
            undo.pop_all()
        report = SaveReport(step=step, uri=uri, ranks=stats)
        logger.info("Committed %s", report.line_of(self._rank))
        return report

    def _meet(self, doing: str) -> None:
        """Let all ranks come to the same call, and raise on all of them what failed on any and is untold."""
        if not self._is_open:
            raise UsageError(f"This manager is closed, before {doing}", fix="Make a new Manager.")
        self._under_way.meet(doing, self._keeper.untold_failures())

    def _let_go(self) -> None:
        self._is_open = False
        self._worker.shutdown()
        self._halting.close()
        self._keeper.close()
        self._engine.close()
        self._front.close()
        self._back.close()


def _opened(place: AnyPath | Storage, rank: int) -> Storage:
    return open_here(place, rank=rank) if isinstance(place, str | os.PathLike) else place


def _torch_engine(writers: int, separation_hint: str | None, staging_bytes: int | None) -> Engine:
    from penstock.checkpoint.api import TorchEngine  # noqa: PLC0415 - likewise
    from penstock.checkpoint.plan.save_plan import SaveOptions  # noqa: PLC0415 - loads numpy
    from penstock.checkpoint.saving.saver import DEFAULT_STAGING_BYTES  # noqa: PLC0415 - loads torch

    options = SaveOptions(writers=writers, separation_hint=separation_hint)
    return TorchEngine(options, staging_bytes=staging_bytes or DEFAULT_STAGING_BYTES)
