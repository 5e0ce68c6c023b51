"""Rules about what a division lets a run change: by what was set, and by the configuration it then had."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Final

from penstock.submission.finding import Finding, pass_if
from penstock.submission.parsed_file import MissingFact
from penstock.submission.rules import rule
from penstock.workload.dlio_keys import canonical_path, canonical_values
from penstock.workload.layered_settings import KeyPath
from penstock.workload.shipped_catalog import families, shipped_card

_ABSENT: Final = object()


@rule.run_rule(
    id="parameters.allowed",
    title="A run sets only what its division leaves free",
    editions=rule.ALL,
    benchmarks=rule.BOTH,
    source="v1.0 rules, CLOSED and OPEN; 3.6.2, 3.6.3 and 4.6.3 of later editions",
    formula="keys in overrides.yaml are in the division's list or set by the benchmark's own script",
    passes="closed, ++workload.reader.read_threads=16",
    fails="closed, ++workload.reader.batch_size=1",
)
def _check_allowed_parameters(case: rule.RunCase) -> Iterator[Finding]:
    division = case.division
    changed = case.run.settings().keys() - {"workload"}
    forbidden = ", ".join(sorted(changed - case.parameters.allowed(division)))
    yield pass_if(
        not forbidden,
        evidence=case.run.overrides.file,
        value=forbidden,
        limit=f"the free keys of {division.value}",
        proof=(
            f"{forbidden}: not free in {division.value}"
            if forbidden
            else f"all {len(changed)} keys are free in {division.value}"
        ),
        fix="Repeat the runs without these.",
    )


@rule.run_rule(
    id="parameters.odirect",
    title="Only workloads whose reader can bypass the page cache set reader.odirect",
    editions=rule.LATER,
    source="checks of a run, odirect",
    formula="reader.odirect is set only for workloads of the edition's list",
    passes="unet3d, ++workload.reader.odirect=True",
    fails="retinanet, ++workload.reader.odirect=True",
)
def _check_odirect(case: rule.RunCase) -> Iterator[Finding]:
    family, _ = case.run.workload()
    allowed = case.timed.odirect_workloads
    is_set = case.run.settings().get("reader.odirect", "false").lower() == "true"
    yield pass_if(
        not is_set or family in allowed,
        evidence=case.run.overrides.file,
        value=f"{family}, odirect {'on' if is_set else 'off'}",
        limit=", ".join(sorted(allowed)),
        proof=f"reader.odirect is {'set' if is_set else 'not set'} for {family}",
        fix="Repeat the runs without reader.odirect.",
    )


@rule.run_rule(
    id="parameters.configuration",
    title="A run's configuration is the workload's, except for what its division leaves free",
    editions=rule.ALL,
    benchmarks=rule.BOTH,
    source="v1.0 rules, CLOSED and OPEN; the workload's published parameters",
    formula="compared keys of config.yaml == the workload's, unless the division leaves them free",
    passes="closed, unet3d, config.yaml with batch_size 7",
    fails="closed, unet3d, config.yaml with batch_size 1, whatever overrides.yaml says",
)
def _check_configuration(case: rule.RunCase) -> Iterator[Finding]:
    run, parameters = case.run, case.parameters
    free = parameters.allowed(case.division)
    family, accelerator = run.workload()
    reference = _require_reference(case, family, accelerator)
    given = canonical_values(run.config.value("workload"))
    # Compared by our own paths, because configurations spell some keys in two ways.
    compared = {
        key: (given.get(path, _ABSENT), reference[path])
        for key in parameters.compared
        if key not in free and (path := canonical_path(tuple(key.split(".")))) in reference
    }
    missing = [f"workload.{key}" for key, (value, _) in compared.items() if value is _ABSENT]
    if missing:
        raise MissingFact(f"there is no field {', '.join(missing)}", where=run.config.file)
    changed = [
        f"{key} is {value!r}, not {wanted!r}"
        for key, (value, wanted) in compared.items()
        if not _is_same(value, wanted)
    ]
    yield pass_if(
        not changed,
        evidence=run.config.file,
        value=f"{len(changed)} changed",
        limit="0 changed",
        proof="; ".join(changed) or f"{len(compared)} values are those of {family} on {accelerator}",
        fix="Repeat the runs with the workload as it is.",
    )


def _require_reference(case: rule.RunCase, family: str, accelerator: str) -> Mapping[KeyPath, object]:
    """The workload's values by our paths."""
    run = case.run
    if case.is_checkpointing:
        values, name, where = _model_values(family), family, run.metadata.file
    else:
        values = _workload_values(family, accelerator)
        name, where = f"{family} on {accelerator}", run.overrides.file
    if values is None:
        raise MissingFact(f"{name} has no known parameters", where=where)
    return values


@cache
def _model_values(name: str) -> Mapping[KeyPath, object] | None:
    card = shipped_card(name)
    return None if card is None else _merge((card.sections,))


@cache
def _workload_values(family: str, accelerator: str) -> Mapping[KeyPath, object] | None:
    shipped = families().get(family)
    if shipped is None or accelerator not in shipped.variants:
        return None
    return _merge((shipped.shared, shipped.variants[accelerator]))


def _merge(trees: tuple[Mapping[str, object], ...]) -> Mapping[KeyPath, object]:
    """The values of all trees; what an accelerator sets replaces what all share."""
    return {path: value for tree in trees for path, value in canonical_values(tree).items()}


def _is_same(given: object, reference: object) -> bool:
    """Numbers by value, so that 0.9 is 0.90; everything else as text."""
    return (type(given) in (int, float) and given == reference) or str(given) == str(reference)
