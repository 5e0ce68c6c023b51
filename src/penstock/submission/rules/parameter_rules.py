"""Rules on what a division lets a run change: by what was set, and by what the run then had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Final

from penstock.submission.finding import Finding
from penstock.submission.parsed_file import Unknown
from penstock.submission.rules.rule import ALL, BOTH, LATER, JobRule, division_of, judged, verdict_of
from penstock.submission.tree_layout import Benchmark
from penstock.workload.dlio_keys import our_path
from penstock.workload.shipped_catalog import families, shipped_card

if TYPE_CHECKING:
    from penstock.submission.edition import Edition, Parameters
    from penstock.submission.result_files import Job, Result
    from penstock.workload.layered_settings import Path

_ABSENT: Final = object()


class AllowedParameters(JobRule):
    """The division's keys."""

    editions = ALL
    benchmarks = BOTH
    id = "parameters.allowed"
    title = "A run sets only what its division leaves free"
    source = "v1.0 rules, CLOSED and OPEN; 3.6.2, 3.6.3 and 4.6.3 of later editions"
    formula = (
        "keys in overrides.yaml are a part of the division's list and of what the benchmark's script sets"
    )
    passes = "closed, ++workload.reader.read_threads=16"
    fails = "closed, ++workload.reader.batch_size=1"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for a job."""
        division = division_of(result)
        changed = job.settings().keys() - {"workload"}
        forbidden = sorted(changed - _parameters(job, edition).allowed(division))
        yield Finding(
            verdict=verdict_of(not forbidden),
            evidence=job.overrides.file,
            value=", ".join(forbidden),
            limit=f"the free keys of {division.value}",
            proof=(
                f"{', '.join(forbidden)}: not free in {division.value}"
                if forbidden
                else f"all {len(changed)} keys are free in {division.value}"
            ),
            fix="Repeat the runs without these." if forbidden else "",
        )


class Configuration(JobRule):
    """The run's whole configuration."""

    editions = ALL
    benchmarks = BOTH
    id = "parameters.configuration"
    title = "A run's configuration is the workload's, but for what its division leaves free"
    source = "v1.0 rules, CLOSED and OPEN; the workload's published parameters"
    formula = (
        "the edition's compared keys in config.yaml == the workload's, unless the division leaves them free"
    )
    passes = "closed, unet3d, config.yaml with batch_size 7"
    fails = "closed, unet3d, config.yaml with batch_size 1, whatever overrides.yaml says"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:
        """One finding for a job."""
        division = division_of(result)
        family, accelerator = job.workload()
        reference = _reference(family, accelerator, job)
        free = _parameters(job, edition).allowed(division)
        given = {our_path(path): value for path, value in _leaves(job.config.value("workload"), ())}
        paths = {
            key: our_path(tuple(key.split(".")))
            for key in _parameters(job, edition).compared
            if key not in free
        }
        compared = {
            key: (given.get(path, _ABSENT), reference[path])
            for key, path in paths.items()
            if path in reference
        }
        missing = [f"workload.{key}" for key, (value, _) in compared.items() if value is _ABSENT]
        if missing:
            raise Unknown(f"there is no field {', '.join(missing)}", where=job.config.file)
        changed = [
            f"{key} is {value!r}, not {wanted!r}"
            for key, (value, wanted) in compared.items()
            if not _is_same(value, wanted)
        ]
        yield Finding(
            verdict=verdict_of(not changed),
            evidence=job.config.file,
            value=f"{len(changed)} changed",
            limit="0 changed",
            proof="; ".join(changed) or f"{len(compared)} values are those of {family} on {accelerator}",
            fix="Repeat the runs with the workload as it is." if changed else "",
        )


class Odirect(JobRule):
    """Direct reads."""

    editions = LATER
    id = "parameters.odirect"
    title = "Only workloads whose reader has a way past the page cache set reader.odirect"
    source = "checks of a run, odirect"
    formula = "reader.odirect is set for workloads of the edition's list alone"
    passes = "unet3d, ++workload.reader.odirect=True"
    fails = "retinanet, ++workload.reader.odirect=True"

    def judge_job(self, job: Job, result: Result, edition: Edition) -> Iterator[Finding]:  # noqa: ARG002
        """One finding for a job."""
        family, _ = job.workload()
        allowed = edition.of_time().odirect_workloads
        asked = job.settings().get("reader.odirect", "false").lower() == "true"
        yield judged(
            not asked or family in allowed,
            evidence=job.overrides.file,
            value=f"{family}, odirect {'on' if asked else 'off'}",
            limit=", ".join(sorted(allowed)),
            proof=f"reader.odirect is {'set' if asked else 'not set'} for {family}",
            fix="Repeat the runs without reader.odirect.",
        )


def _parameters(job: Job, edition: Edition) -> Parameters:
    return edition.of_checkpoints().parameters if _is_checkpoint(job) else edition.parameters


def _is_checkpoint(job: Job) -> bool:
    return job.benchmark is Benchmark.CHECKPOINTING


def _reference(family: str, accelerator: str, job: Job) -> Mapping[Path, object]:
    """The workload's values by our paths; what an accelerator sets goes over what all share."""
    values = _of_model(family) if _is_checkpoint(job) else _of_workload(family, accelerator)
    if values is None:
        where = job.metadata.file if _is_checkpoint(job) else job.overrides.file
        what = family if _is_checkpoint(job) else f"{family} on {accelerator}"
        raise Unknown(f"{what} has no parameters that are known", where=where)
    return values


@cache
def _of_model(name: str) -> Mapping[Path, object] | None:
    card = shipped_card(name)
    return None if card is None else _values((card.sections,))


@cache
def _of_workload(family: str, accelerator: str) -> Mapping[Path, object] | None:
    shipped = families().get(family)
    if shipped is None or accelerator not in shipped.variants:
        return None
    return _values((shipped.shared, shipped.variants[accelerator]))


def _values(trees: tuple[Mapping[str, object], ...]) -> Mapping[Path, object]:
    return {our_path(path): value for tree in trees for path, value in _leaves(tree, ())}


def _leaves(tree: object, above: Path) -> Iterator[tuple[Path, object]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*above, str(key)))
    elif above:
        yield above, tree


def _is_same(given: object, reference: object) -> bool:
    """Numbers by value, so that 0.9 is 0.90; all else as it stands."""
    return (type(given) in (int, float) and given == reference) or str(given) == str(reference)
