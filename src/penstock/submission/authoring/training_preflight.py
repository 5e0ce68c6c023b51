"""Refuse a training result that the edition does not know, before anything of it is made.

Pure, but for resolving links: a request in, breaches with the ids of their rules out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import UsageError
from penstock.storage.uri import find_local_paths_at
from penstock.submission.authoring.result_dir import HIDDEN, Series
from penstock.submission.edition import Edition
from penstock.workload.mlperf_divisions import Breach


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPreflight:
    """The request of a command line; `data` is the URI of the data set."""

    series: Series
    accelerator: str
    num_accelerators: int
    num_hosts: int
    data: str


def find_breaches(edition: Edition, request: TrainingPreflight) -> Iterator[Breach]:
    """All breaches of the edition's rules."""
    workloads, model = edition.min_utilization_percent, request.series.model
    if model not in workloads:
        yield Breach(rule="2.1.11", key=model, why=f"is not one of {', '.join(workloads)}")
    if request.accelerator not in edition.accelerators:
        why = f"is not one of {', '.join(edition.accelerators)}"
        yield Breach(rule="2.1.11", key=request.accelerator or "no accelerator", why=why)
    if request.num_accelerators % request.num_hosts:
        key = f"{request.num_accelerators} accelerators"
        yield Breach(rule="3.3.6", key=key, why=f"do not divide evenly among {request.num_hosts} hosts")
    yield from check_place(request.series, request.data, key="--data", rule="3.4.1")


def check_place(series: Series, uri: str, *, key: str, rule: str) -> Iterator[Breach]:
    """The storage under test must not be in the tree; `.mlps/` does not belong to it."""
    paths = find_local_paths_at(uri)
    if paths is None:
        return
    place, root = Path(paths.local_root).resolve(), series.tree.root.resolve()
    if place.is_relative_to(root) and not place.is_relative_to(root / HIDDEN):
        yield Breach(rule=rule, key=f"{key} {place}", why="must be outside of the submission's tree")


def require_allowed(edition: Edition, request: TrainingPreflight) -> None:
    """Raise `UsageError` with every breach and its rule."""
    breaches = list(find_breaches(edition, request))
    if breaches:
        raise UsageError(
            "; ".join(map(str, breaches)),
            where=f"edition {edition.edition}",
            fix="Change these: nothing was made yet.",
        )
