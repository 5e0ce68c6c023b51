"""Refuse a checkpointing run that its division would not accept, before it starts.

Pure: a request in, breaches with the ids of their rules out. Invariant: every number is the edition's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from penstock.errors import UsageError
from penstock.workload.division_rules import Breach, SubmissionDivision

if TYPE_CHECKING:
    from penstock.submission.edition import Edition, ModelLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPreflight:
    """What a command line requests; `changed` are the keys that it sets, by dotted name."""

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
    edition: Edition, division: SubmissionDivision, asked: CheckpointPreflight
) -> Iterator[Breach]:
    """All breaches of the division's rules."""
    rules = edition.require_checkpoints()
    model = rules.models.get(asked.model)
    if model is None:
        yield Breach(rule="4.3.3", key=asked.model, why=f"is none of {', '.join(rules.models)}")
        return
    if asked.scale != 1:
        yield Breach(rule="4.3.4", key="--scale", why="must be 1: checkpoints are handed in whole")
    free = rules.parameters.allowed(division)
    for key in asked.changed:
        if key not in free:
            yield Breach(rule="4.6.3", key=key, why=f"must stay as it is in the {division.value} division")
    yield from _of_memory(edition, asked)
    if division is SubmissionDivision.CLOSED:
        yield from _of_closed(edition, model, asked)
    elif asked.num_processes % model.open_unit:
        yield Breach(
            rule="4.6.4", key=f"{asked.num_processes} ranks", why=f"are no multiple of {model.open_unit}"
        )


def require_allowed(edition: Edition, division: SubmissionDivision, asked: CheckpointPreflight) -> None:
    """Raise `UsageError` with every breach and its rule."""
    found = list(find_breaches(edition, division, asked))
    if found:
        raise UsageError(
            "; ".join(map(str, found)),
            where=f"--{division.value}",
            fix=f"Change these, or run without --{division.value}.",
        )


def _of_memory(edition: Edition, asked: CheckpointPreflight) -> Iterator[Breach]:
    memory = edition.require_checkpoints().accelerator_memory_gb
    if asked.accelerator not in memory:
        yield Breach(
            rule="4.3.4", key=asked.accelerator or "no accelerator", why=f"is none of {', '.join(memory)}"
        )
    elif memory[asked.accelerator] * asked.num_processes < asked.size_gib:
        yield Breach(
            rule="4.3.4",
            key=f"{asked.num_processes} x {memory[asked.accelerator]:g} GB",
            why=f"are less than a checkpoint of {asked.size_gib:.1f} GiB",
        )


def _of_closed(edition: Edition, model: ModelLimits, asked: CheckpointPreflight) -> Iterator[Breach]:
    rules = edition.require_checkpoints()
    allowed = (0, rules.num_checkpoints)
    for what, number in (("writes", asked.num_writes), ("reads", asked.num_reads)):
        if number not in allowed:
            yield Breach(rule="4.7.1", key=f"{number} {what}", why=f"are not {rules.num_checkpoints} or 0")
    if asked.is_subset:
        subset = rules.subset
        if asked.model not in subset.models or asked.num_processes != subset.num_accelerators:
            yield Breach(
                rule="4.3.5",
                key="--subset",
                why=f"is for {', '.join(sorted(subset.models))} on {subset.num_accelerators} accelerators",
            )
    elif asked.num_processes != model.closed_processes:
        yield Breach(
            rule="4.6.1", key=f"{asked.num_processes} ranks", why=f"are not {model.closed_processes}"
        )
