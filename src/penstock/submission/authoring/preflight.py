"""Refuse a result that its edition or division would not accept, before anything of it is made.

Pure, but for resolving links: a request in, breaches with the ids of their rules out. Invariant: every number
is the edition's.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from penstock.errors import UsageError
from penstock.storage.uri import find_local_paths_at
from penstock.submission.authoring.result_dir import HIDDEN, Series
from penstock.submission.edition import Edition, ModelLimits
from penstock.workload.mlperf_divisions import Breach, SubmissionDivision


def require_none(breaches: Iterable[Breach], where: str) -> None:
    """Raise `UsageError` with every breach and its rule."""
    if found := "; ".join(map(str, breaches)):
        raise UsageError(found, where=where, fix="Change these: nothing was made yet.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPreflight:
    """The request of a training result; `data` is the URI of the data set."""

    series: Series
    accelerator: str
    num_accelerators: int
    num_hosts: int
    data: str


def training_breaches(edition: Edition, request: TrainingPreflight) -> Iterator[Breach]:
    """All breaches of the edition's rules for a training result."""
    workloads, model = edition.min_utilization_percent, request.series.model
    if model not in workloads:
        yield Breach(rule="2.1.11", key=model, why=f"is not one of {', '.join(workloads)}")
    if request.accelerator not in edition.accelerators:
        why = f"is not one of {', '.join(edition.accelerators)}"
        yield Breach(rule="2.1.11", key=request.accelerator or "no accelerator", why=why)
    if request.num_accelerators % request.num_hosts:
        key = f"{request.num_accelerators} accelerators"
        yield Breach(rule="3.3.6", key=key, why=f"do not divide evenly among {request.num_hosts} hosts")
    yield from _data_within_tree(request)


def _data_within_tree(request: TrainingPreflight) -> Iterator[Breach]:
    """The storage under test must not be in the tree; `.mlps/` does not belong to it."""
    paths = find_local_paths_at(request.data)
    if paths is None:
        return
    place, root = Path(paths.local_root).resolve(), request.series.tree.root.resolve()
    if place.is_relative_to(root) and not place.is_relative_to(root / HIDDEN):
        yield Breach(rule="3.4.1", key=f"--data {place}", why="must be outside of the submission's tree")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPreflight:
    """The request of a checkpointing run; `changed` are the keys that it sets, by dotted name."""

    model: str
    accelerator: str
    num_processes: int
    num_writes: int
    num_reads: int
    is_subset: bool
    scale: Fraction
    changed: Sequence[str]
    size_gib: float


def checkpoint_breaches(
    edition: Edition, division: SubmissionDivision, request: CheckpointPreflight
) -> Iterator[Breach]:
    """All breaches of the division's rules for a checkpointing run."""
    rules = edition.require(edition.checkpoints)
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


def _check_memory(edition: Edition, request: CheckpointPreflight) -> Iterator[Breach]:
    memory = edition.require(edition.checkpoints).accelerator_memory_gb
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
    rules = edition.require(edition.checkpoints)
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
