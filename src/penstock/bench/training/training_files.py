"""The files of a training run: their names and sizes, and a check that they exist.

They are opened once per run, before planning. File sizes are checked only if a Penstock manifest has them; of
external data sets, only the names are known. One missing file fails the run on all ranks before its first
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.cluster.comm import Comm, all_gather_results
from penstock.dataset.content import Reduction
from penstock.dataset.data_files import DataFiles, evaluation_files, training_files
from penstock.dataset.dataset_manifest import DatasetRecipe, read_manifest, require_same
from penstock.dataset.external_dataset import ExternalFiles
from penstock.dataset.formats import open_format
from penstock.dataset.formats.format_protocol import FileFormat, FilePlan, ReadWhole
from penstock.errors import ObjectNotFound, UsageError
from penstock.progress import Progress
from penstock.results.step_events import StepPhase
from penstock.storage import Storage
from penstock.workload.enums import DataFormat
from penstock.workload.spec import Dataset

OpenFormat = Callable[["Dataset", int], "FileFormat"]
"""Opens the format of a data set whose sample sizes are drawn by a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFiles:
    """The files that a run reads: the first `num_train` and `num_eval` of those that exist."""

    dataset: Dataset
    data_files: DataFiles
    num_train: int
    num_eval: int
    recipe: DatasetRecipe | None
    """Everything that determines the files' bytes; None for an external data set."""
    num_found: int | None = None
    """The number of files that a listing found, over both phases; None if names are computed."""

    @property
    def needs_listing(self) -> bool:
        """True if names are only assumed so far, and a listing must find the real ones."""
        return (
            self.are_stored
            and self.recipe is None
            and self.num_found is None
            and not self.dataset.skip_listing
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on the files for the user."""
        num_used = self.num_train + self.num_eval
        if self.num_found is None or self.num_found <= num_used:
            return ()
        return (f"{self.num_found:,} files were found, and the first {num_used:,} of them are read",)

    def with_listing(self, found: ExternalFiles) -> TrainingFiles:
        """Return the same files, with the names that a listing found."""
        evaluation = self.data_files.evaluation if found.evaluation is None else found.evaluation
        return replace(
            self,
            data_files=replace(self.data_files, train=found.train, evaluation=evaluation),
            num_found=len(found.train) + (len(found.evaluation) if found.evaluation else 0),
        )

    @property
    def are_read_whole(self) -> bool:
        """True if each file holds one sample and is read in one request."""
        if self.dataset.num_samples_per_file != 1 or self.dataset.format.is_stream:
            return False
        return type(self.data_files.kind).reads is ReadWhole.reads

    def plan(self, phase: StepPhase, number: int) -> FilePlan:
        """Return the plan of file `number` of a phase, counting from 0."""
        return self.data_files.plan(
            number if phase is StepPhase.TRAIN else len(self.data_files.train) + number
        )

    def block_samples(self) -> int:
        """Return the number of samples that are read together; 1 if the data set has no files."""
        return self.data_files.plan(0).block_samples if len(self.data_files) else 1

    @property
    def are_stored(self) -> bool:
        """True if the run reads files at all."""
        return self.dataset.format is not DataFormat.SYNTHETIC

    def keys_of(self, phase: StepPhase, number: int) -> Iterator[str]:
        """Yield the keys of all parts of file `number` of a phase."""
        plan = self.plan(phase, number)
        for part in plan.parts:
            yield part.key(plan.name)


def open_files(
    dataset: Dataset,
    storage: Storage,
    *,
    seed: int,
    evaluates: bool,
    reader: OpenFormat = open_format,
) -> TrainingFiles:
    """Open the files at `storage` for a run of `dataset`; `UsageError` if they are too few or do not match.

    Reads the manifest that generation wrote, if there is one. Without a manifest, `seed` draws the sizes.
    """
    manifest = None if dataset.format is DataFormat.SYNTHETIC else read_manifest(storage)
    recipe = None if manifest is None else _stored_recipe(dataset, storage, manifest)
    stored = dataset if recipe is None else recipe.dataset
    return TrainingFiles(
        dataset=dataset,
        data_files=DataFiles(
            kind=reader(dataset, seed if recipe is None else recipe.seed),
            train=training_files(stored),
            evaluation=evaluation_files(stored),
        ),
        num_train=dataset.num_files_train,
        num_eval=dataset.num_files_eval if evaluates else 0,
        recipe=recipe,
    )


def _stored_recipe(dataset: Dataset, storage: Storage, manifest: dict[str, Any]) -> DatasetRecipe:
    """Return the recipe of the stored data set, with its own file counts, because file names contain them.

    Raises `UsageError` if the data set has fewer files than the workload needs, or was generated differently.
    """
    recipe = manifest["recipe"]
    stored = recipe["dataset"]
    for name in ("num_files_train", "num_files_eval"):
        if stored[name] < (num_files := getattr(dataset, name)):
            raise UsageError(
                f"The data set has {stored[name]:,} files, but dataset.{name} is {num_files:,}",
                where=storage.uri,
                fix=f"Generate all of them into an empty location, or set dataset.{name}={stored[name]}.",
            )
    existing = DatasetRecipe(
        dataset=replace(
            dataset,
            num_files_train=int(stored["num_files_train"]),
            num_files_eval=int(stored["num_files_eval"]),
            num_subfolders_train=int(stored["num_subfolders_train"]),
            num_subfolders_eval=int(stored["num_subfolders_eval"]),
        ),
        seed=int(recipe["seed"]),
        reduction=Reduction(**recipe["reduction"]),
    )
    require_same(storage, existing)
    return existing


@contextmanager
def explained_absence(files: TrainingFiles) -> Iterator[None]:
    """If a file turns out to be missing during a run, explain why no earlier check noticed it."""
    try:
        yield
    except ObjectNotFound as error:
        interval = files.dataset.listing_validation_interval
        if files.num_found is not None:
            why = "It was there when the run listed its files: does something delete them?"
        else:
            source = "dataset.skip_listing" if files.recipe is None else "the manifest"
            looks = f"one in {interval:,}" if interval else "none"
            why = (
                f"Its name follows from {source}, and a run looks up {looks} of these names beforehand "
                "(dataset.listing_validation_interval). Generate the data set again, which writes what is "
                "missing, or correct dataset.num_files_train, num_subfolders_train and file_prefix"
            )
            why += "." if files.recipe else "; dataset.skip_listing=false lists the files that exist."
        raise ObjectNotFound("A file of the data set is missing", uri=error.uri, fix=why) from error


_NAMED: Final = 3
_LOOKED_UP_TOGETHER: Final = 1024


def validate(files: TrainingFiles, storage: Storage, *, comm: Comm, progress: Progress) -> tuple[int, float]:
    """Look up the files that `listing_validation_interval` selects; `ObjectNotFound` if any is missing.

    Collective. Returns the number of files looked up over all ranks, and the time. Nothing is looked up if
    the interval is 0, or if the run has just listed its files. A file whose index is missing counts as
    missing.
    """
    interval = 0 if files.num_found is not None else files.dataset.listing_validation_interval
    places = choose_checked_files(files, interval)[comm.rank :: comm.size]
    began_s = time.monotonic()
    progress.begin("validating files", len(places))
    look_ups = all_gather_results(
        comm,
        lambda: _look_up(files, storage, places, progress),
        awaiting="all ranks to validate their files",
    )
    elapsed_s = time.monotonic() - began_s
    num_files = sum(looked_up for looked_up, *_ in look_ups)
    num_missing = sum(missing for _, missing, _ in look_ups)
    if num_missing:
        named = sorted(pair for *_, missing_files in look_ups for pair in missing_files)[:_NAMED]
        names = ", ".join(key for _, key in named)
        raise ObjectNotFound(
            f"{num_missing:,} of {num_files:,} files looked up in {elapsed_s:.1f} s are missing: {names}",
            uri=f"{storage.uri}/{named[0][1]}",
            fix="Generate the data set (`penstock training generate`) or correct --data and "
            "dataset.num_files_train; dataset.listing_validation_interval=0 looks up none, "
            "dataset.listing_threads sets how many are looked up at once.",
        )
    return num_files, elapsed_s


def choose_checked_files(files: TrainingFiles, interval: int) -> list[int]:
    """Return the first file of each phase, every `interval`-th after it, and the last."""
    if interval == 0:
        return []
    train, total = files.num_train, files.num_train + files.num_eval
    places = {*range(0, train, interval), *range(train, total, interval)}
    places.update(end - 1 for end in (train, total) if end)
    return sorted(places)


def _look_up(
    files: TrainingFiles, storage: Storage, places: list[int], progress: Progress
) -> tuple[int, int, list[tuple[int, str]]]:
    """Look up files. Returns how many were looked up and how many are missing, and the first missing ones."""
    missing: list[tuple[int, str]] = []
    num_missing = 0

    def missing_key(place: int) -> str | None:
        """Return the first missing key of a file, or None.

        Places count the training files first, then the evaluation files.
        """
        is_training = place < files.num_train
        phase = StepPhase.TRAIN if is_training else StepPhase.EVAL
        found = None
        for key in files.keys_of(phase, place if is_training else place - files.num_train):
            try:
                storage.stat(key)
            except ObjectNotFound:
                found = key
                break
        progress.advance(1)
        return found

    with ThreadPoolExecutor(files.dataset.listing_threads, thread_name_prefix="penstock-validate") as pool:
        for start in range(0, len(places), _LOOKED_UP_TOGETHER):
            chunk = places[start : start + _LOOKED_UP_TOGETHER]
            for place, key in zip(chunk, pool.map(missing_key, chunk), strict=True):
                if key is not None:
                    num_missing += 1
                    missing.append((place, key))
            del missing[_NAMED:]
    return len(places), num_missing, missing
