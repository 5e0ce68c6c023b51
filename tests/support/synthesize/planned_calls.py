"""The calls of one rank of a described run: which, when, and for how long. Pure.

Invariant: the durations that a budget covers add up to it exactly, because tables of studies are checked
against such sums to the microsecond.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.synthesize.trace_description import (
    Call,
    Pattern,
    PatternUse,
    Run,
    SynthesisSpec,
    ThreadLane,
    TimeBudget,
)

from penstock.errors import UsageError

_BYTES_A_UNIT = 1 << 20
"""A call's share of its budget: one unit, and one more for each MiB that it moves."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One traced call: `thread` 0 is the main one; `checkpoint` is None before the first."""

    ts_us: int
    dur_us: int
    name: str
    cat: str
    thread: int
    path: str | None
    size_bytes: int | None
    epoch: int | None
    step: int | None


@dataclass(slots=True)
class _Draft:
    """A call that has no time yet."""

    call: Call
    checkpoint: int | None
    position: int
    path: str | None
    size_bytes: int | None
    budget: int | None
    dur_us: int | None = None
    weight: int = field(init=False)

    def __post_init__(self) -> None:
        self.weight = _BYTES_A_UNIT + (self.size_bytes or 0)


def plan_rank(description: SynthesisSpec, run: Run, rank: int) -> list[PlannedCall]:
    """All calls of `rank`, by the time they began."""
    drafts = [draft for use in _pattern_uses(run, rank) for draft in _draft(description, run, use, rank)]
    _spend_budgets(drafts, run.budgets, rank)
    return sorted(_lay_out(drafts, description.lanes, run), key=lambda call: call.ts_us)


def share_exactly(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion to `weights`; they add up to it."""
    whole = sum(weights)
    shares, before, done = [], 0, 0
    for weight in weights:
        before += weight
        upto = total * before // whole
        shares.append(upto - done)
        done = upto
    return shares


def _pattern_uses(run: Run, rank: int) -> Iterator[PatternUse]:
    named: dict[str, set[int]] = defaultdict(set)
    for use in run.does:
        if isinstance(use.ranks, tuple):
            named[use.pattern] |= set(use.ranks)
        taken = use.ranks == "others" and rank in named[use.pattern]
        if not taken and (isinstance(use.ranks, str) or rank in use.ranks):
            yield use


def _draft(description: SynthesisSpec, run: Run, use: PatternUse, rank: int) -> Iterator[_Draft]:
    pattern = description.patterns[use.pattern]
    rounds: Sequence[int | None] = [None] if use.is_once else range(len(run.checkpoints.steps))
    budgets = {id(call): _budget_of(run.budgets, use.pattern, call.op) for call in pattern.calls}
    for checkpoint in rounds:
        for copy in range(pattern.copies):
            path = _path(pattern, run, use.at, rank=rank, checkpoint=checkpoint, copy=copy)
            name = path.rpartition("/")[2]
            if name in use.omit:
                continue
            fixed = {op: iter(durations) for op, durations in use.fixed_us.get(name, {}).items()}
            for call in pattern.calls:
                for position, size in enumerate(call.num_bytes_each()):
                    draft = _Draft(call, checkpoint, position, path or None, size, budgets[id(call)])
                    if call.is_pathless:
                        draft.path = None
                    if call.op in fixed:
                        draft.dur_us = next(fixed[call.op], None)
                    yield draft


def _path(
    pattern: Pattern, run: Run, at: Mapping[str, str], *, rank: int, checkpoint: int | None, copy: int
) -> str:
    words = {
        **run.places,
        **at,
        "step": run.checkpoints.steps[checkpoint or 0],
        "epoch": run.checkpoints.epoch,
        "rank": rank,
        "host": run.host_of(rank),
        "copy": copy,
    }
    try:
        return pattern.path.format_map(words)
    except KeyError as missing:
        raise UsageError(
            f"The path contains {{{missing.args[0]}}}, which is not a place of the run", where=pattern.path,
            fix=f"Add it to the run's places, or use one of {', '.join(words)}.",
        ) from missing  # fmt: skip


def _budget_of(budgets: Sequence[TimeBudget], pattern: str, op: str) -> int | None:
    return next(
        (
            number
            for number, budget in enumerate(budgets)
            if (not budget.patterns or pattern in budget.patterns) and (not budget.ops or op in budget.ops)
        ),
        None,
    )


def _spend_budgets(drafts: Sequence[_Draft], budgets: Sequence[TimeBudget], rank: int) -> None:
    """Give every draft its duration."""
    open_drafts: dict[int, list[_Draft]] = defaultdict(list)
    spent: dict[int, int] = defaultdict(int)
    for draft in drafts:
        if draft.budget is None:
            draft.dur_us = 1 if draft.dur_us is None else draft.dur_us
        elif draft.dur_us is None:
            open_drafts[draft.budget].append(draft)
        else:
            spent[draft.budget] += draft.dur_us
    for number, waiting in open_drafts.items():
        us = budgets[number].us
        left = us.get(rank, us.get("others", 0)) - spent[number]
        if left < 0:
            raise UsageError(
                f"Fixed durations of rank {rank} exceed their budget by {-left} us",
                where=f"budgets.{number}",
                fix="Raise the budget.",
            )
        for draft, dur_us in zip(
            waiting, share_exactly(left, [each.weight for each in waiting]), strict=True
        ):
            draft.dur_us = dur_us


def _lay_out(drafts: Sequence[_Draft], lanes: Mapping[str, ThreadLane], run: Run) -> Iterator[PlannedCall]:
    """Calls of a thread follow one another; the threads of a lane take calls in turn."""
    cursors: dict[tuple[int | None, str, int], int] = {}
    assigned: dict[tuple[int | None, str], int] = defaultdict(int)
    names = list(lanes)
    most = max((lane.threads for lane in lanes.values()), default=0)
    for draft in drafts:
        lane = lanes.get(draft.call.lane, ThreadLane())
        spot, thread = 0, 0
        if lane.threads:
            spot = assigned[draft.checkpoint, draft.call.lane] % lane.threads
            assigned[draft.checkpoint, draft.call.lane] += 1
            # Fresh threads for each checkpoint, as libraries that flush in the background start them.
            block = (draft.checkpoint or 0) * len(names) + names.index(draft.call.lane)
            thread = 1 + block * most + spot
        key = (draft.checkpoint, draft.call.lane, spot)
        ts_us = cursors.get(key, _begin(run, draft.checkpoint) + lane.after_us)
        assert draft.dur_us is not None
        cursors[key] = ts_us + draft.dur_us
        stamped = draft.call.is_stamped and draft.checkpoint is not None
        yield PlannedCall(
            ts_us=ts_us,
            dur_us=draft.dur_us,
            name=draft.call.op,
            cat=draft.call.cat,
            thread=thread,
            path=draft.path,
            size_bytes=draft.size_bytes,
            epoch=run.checkpoints.epoch if stamped else None,
            step=run.checkpoints.steps[draft.checkpoint or 0] if stamped else None,
        )


def _begin(run: Run, checkpoint: int | None) -> int:
    if checkpoint is None:
        return run.start_us
    return run.start_us + run.checkpoints.first_us + checkpoint * run.checkpoints.every_us
