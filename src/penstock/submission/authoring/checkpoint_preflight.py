"""Refuse a checkpointing run that its division would not accept, before it starts.

Pure: a request in, breaches with the ids of their rules out. Invariant: every number is the edition's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from penstock.errors import UsageError
from penstock.submission.edition import Edition, ModelLimits
from penstock.workload.mlperf_divisions import Breach, SubmissionDivision


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPreflight:
    """The request of a command line; `changed` are the keys that it sets, by dotted name."""

    model: str
    accelerator: str
    num_processes: int
    num_writes: int
    num_reads: int
    is_subset: bool
    scale: Fraction
    changed: Sequence[str]
    size_gib: float


def find_breaches(
    edition: Edition, division: SubmissionDivision, request: CheckpointPreflight
) -> Iterator[Breach]:
    """All breaches of the division's rules."""
    rules = edition.require_checkpoints()
    model = rules.models.get(request.model)
    if model is None:
        why = f"is not one of {', '.join(rules.models)}"
        yield Breach(rule="4.3.3", key=request.model, why=why)
        return
    if request.scale != 1:
        yield Breach(rule="4.3.4", key="--scale", why="must be 1: submitted checkpoints are full-size")
    free = rules.parameters.allowed(division)
    for key in request.changed:
        if key not in free:
            yield Breach(rule="4.6.3", key=key, why=f"must stay as it is in the {division.value} division")
    yield from _check_memory(edition, request)
    if division is SubmissionDivision.CLOSED:
        yield from _check_closed(edition, model, request)
    elif request.num_processes % model.open_unit:
        yield Breach(
            rule="4.6.4", key=f"{request.num_processes} ranks", why=f"are not a multiple of {model.open_unit}"
        )


def require_allowed(edition: Edition, division: SubmissionDivision, request: CheckpointPreflight) -> None:
    """Raise `UsageError` with every breach and its rule."""
    breaches = list(find_breaches(edition, division, request))
    if breaches:
        raise UsageError(
            "; ".join(map(str, breaches)),
            where=f"--{division.value}",
            fix="Change these: nothing was made yet.",
        )


def _check_memory(edition: Edition, request: CheckpointPreflight) -> Iterator[Breach]:
    memory = edition.require_checkpoints().accelerator_memory_gb
    if request.accelerator not in memory:
        yield Breach(
            rule="4.3.4",
            key=request.accelerator or "no accelerator",
            why=f"is not one of {', '.join(memory)}",
        )
    elif memory[request.accelerator] * request.num_processes < request.size_gib:
        yield Breach(
            rule="4.3.4",
            key=f"{request.num_processes} x {memory[request.accelerator]:g} GB",
            why=f"are less than a checkpoint of {request.size_gib:.1f} GiB",
        )


def _check_closed(edition: Edition, model: ModelLimits, request: CheckpointPreflight) -> Iterator[Breach]:
    rules = edition.require_checkpoints()
    allowed = (0, rules.num_checkpoints)
    for what, number in (("writes", request.num_writes), ("reads", request.num_reads)):
        if number not in allowed:
            yield Breach(rule="4.7.1", key=f"{number} {what}", why=f"are not {rules.num_checkpoints} or 0")
    if request.is_subset:
        subset = rules.subset
        if request.model not in subset.models or request.num_processes != subset.num_accelerators:
            yield Breach(
                rule="4.3.5",
                key="--subset",
                why=f"is for {', '.join(sorted(subset.models))} on {subset.num_accelerators} accelerators",
            )
    elif request.num_processes != model.closed_processes:
        yield Breach(
            rule="4.6.1", key=f"{request.num_processes} ranks", why=f"are not {model.closed_processes}"
        )
