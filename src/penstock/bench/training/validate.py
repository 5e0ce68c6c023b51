"""Are the files there? The first, the last and every k-th are looked up, by all ranks in parallel.

Place in the flow: before the plan, outside the score. Invariant: one missing file fails the run before its
first step, on all ranks, with the first missing names and the ways out.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.cluster.collectives import all_gather_results
from penstock.errors import ObjectNotFound

if TYPE_CHECKING:
    from penstock.bench.training.files import TrainingFiles
    from penstock.cluster.comm import Comm
    from penstock.progress import Progress
    from penstock.storage import Storage

_NAMED: Final = 3
_LOOKED_UP_TOGETHER: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """How many files were looked up, over all ranks."""

    num_files: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class _Seen:
    num_files: int
    num_missing: int
    missing: tuple[tuple[int, str], ...]


def validate(files: TrainingFiles, storage: Storage, *, comm: Comm, progress: Progress) -> Validation:
    """Look up the files that `listing_validation_interval` asks for; `ObjectNotFound` if any is missing.

    Collective. An interval of 0 looks up nothing, nor is looked up what was just listed; a file whose index
    is missing is missing.
    """
    interval = 0 if files.num_found is not None else files.dataset.listing_validation_interval
    places = checked_places(files, interval)[comm.rank :: comm.size]
    began_s = time.monotonic()
    progress.begin("validating files", len(places))
    seen = all_gather_results(
        comm,
        lambda: _look_up(files, storage, places, progress),
        awaiting="all ranks to validate their files",
    )
    elapsed_s = time.monotonic() - began_s
    num_missing = sum(each.num_missing for each in seen)
    num_files = sum(each.num_files for each in seen)
    if num_missing:
        named = sorted(pair for each in seen for pair in each.missing)[:_NAMED]
        names = ", ".join(key for _, key in named)
        raise ObjectNotFound(
            f"{num_missing:,} of {num_files:,} files looked up in {elapsed_s:.1f} s are missing: {names}",
            uri=f"{storage.uri}/{named[0][1]}",
            fix="Generate the data set (`penstock training generate`) or correct --data and "
            "dataset.num_files_train; dataset.listing_validation_interval=0 looks up none, "
            "dataset.listing_threads sets how many are looked up at once.",
        )
    return Validation(num_files=num_files, elapsed_s=elapsed_s)


def checked_places(files: TrainingFiles, interval: int) -> list[int]:
    """Of both phases the first file, every `interval`-th after it, and the last."""
    if interval == 0:
        return []
    train, total = files.num_train, files.num_train + files.num_eval
    places = {*range(0, train, interval), *range(train, total, interval)}
    places.update(end - 1 for end in (train, total) if end)
    return sorted(places)


def _look_up(files: TrainingFiles, storage: Storage, places: list[int], progress: Progress) -> _Seen:
    missing: list[tuple[int, str]] = []
    num_missing = 0

    def missing_key(place: int) -> str | None:
        key = _first_missing(files, storage, place)
        progress.advance(1)
        return key

    with ThreadPoolExecutor(files.dataset.listing_threads, thread_name_prefix="penstock-validate") as pool:
        for start in range(0, len(places), _LOOKED_UP_TOGETHER):
            some = places[start : start + _LOOKED_UP_TOGETHER]
            for place, key in zip(some, pool.map(missing_key, some), strict=True):
                if key is not None:
                    num_missing += 1
                    missing.append((place, key))
            del missing[_NAMED:]
            if num_missing:
                left = len(places) - start - len(some)
                progress.begin(f"validating files, {num_missing:,} missing so far", left)
    return _Seen(len(places), num_missing, tuple(missing))


def _first_missing(files: TrainingFiles, storage: Storage, place: int) -> str | None:
    for key in files.keys_at(place):
        try:
            storage.stat(key)
        except ObjectNotFound:
            return key
    return None
