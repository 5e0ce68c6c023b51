"""Loads a `Workload` from a name, a YAML file and overrides, with remarks on keys that DLIO treats otherwise.

The only way in: catalog or file, then overrides, become layers of settings, which are normalized
(`dlio_keys`), parsed (`workload_schema`) and checked. All problems are reported in one error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.did_you_mean import did_you_mean, nearest
from penstock.errors import UsageError
from penstock.workload.dataset_size import parquet_row_bytes
from penstock.workload.dlio_keys import (
    ALIASES,
    EXPLAINED,
    SECTION_ALIASES,
    Remark,
    apply_dlio_rules,
    read_layer,
)
from penstock.workload.enums import CheckpointMode
from penstock.workload.layered_settings import KeyPath, LayeredSettings, SettingProblem, dotted
from penstock.workload.overrides import Override
from penstock.workload.shipped_catalog import (
    FileRule,
    ModelCard,
    WorkloadFamily,
    cards,
    dlio_workloads,
    families,
    read_card,
    shipped_card,
)
from penstock.workload.spec import Workload
from penstock.workload.strict_yaml import parse_yaml
from penstock.workload.workload_schema import known_paths, read_workload


def suggest_key(path: KeyPath) -> str:
    """What to write instead of `path`, or which keys there are beside it."""
    steps = tuple(step for step in path if not step.isdecimal())  # elements of a list share their keys
    meant = _namesake(steps) or _sibling(steps) or _lookalike(steps)
    if meant:
        return f"did you mean {meant}?"
    beside = sorted(_children(steps[:-1])) or sorted(_children(()))
    return f"known here: {', '.join(beside)}"


@cache
def _all_paths() -> tuple[KeyPath, ...]:
    return (*known_paths(), *ALIASES, *EXPLAINED, *((section,) for section in SECTION_ALIASES))


def _children(section: KeyPath) -> set[str]:
    depth = len(section)
    return {path[depth] for path in _all_paths() if path[:depth] == section and len(path) > depth}


def _sibling(path: KeyPath) -> str:
    meant = nearest(path[-1], sorted(_children(path[:-1])))
    return _ours((*path[:-1], meant)) if meant else ""


def _namesake(path: KeyPath) -> str:
    return next((_ours(known) for known in _all_paths() if known[-1] == path[-1]), "")


def _lookalike(path: KeyPath) -> str:
    meant = nearest(dotted(path), sorted(map(dotted, _all_paths())), cutoff=0.8)
    return _ours(tuple(meant.split("."))) if meant else ""


def _ours(path: KeyPath) -> str:
    """An old spelling is understood, but not recommended."""
    return dotted(ALIASES.get(path, path))


_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorkload:
    """A workload, and remarks on keys that DLIO reads otherwise or that mean nothing here."""

    workload: Workload
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """Where a workload's values come from, before overrides."""

    name: str
    accelerator: str
    source: str
    layers: tuple[Mapping[str, Any], ...]
    is_ours: bool
    remarks: tuple[Remark, ...] = ()


def load(
    name: str,
    *,
    accelerator: str = "",
    overrides: Sequence[Override] = (),
    config_dir: Path | None = None,
    prefers_dlio: bool = False,
) -> LoadedWorkload:
    """The workload of this name: shipped (`unet3d` with an accelerator, `unet3d_h100`), or a YAML file.

    A file `NAME.yaml` of `config_dir`, or of its folder `workload`, comes before a shipped one. Names that
    only DLIO gives are known, too; `prefers_dlio` decides about those that mean another workload here.
    """
    origin = _file_origin(name, accelerator, config_dir) or _model_origin(name)
    if origin is None and not accelerator and (prefers_dlio or name not in families()):
        origin = _dlio_origin(name)
    return _finish(origin or _shipped_origin(name, accelerator), overrides)


def load_sections(
    sections: Mapping[str, Any], *, name: str, source: str, overrides: Sequence[Override] = ()
) -> LoadedWorkload:
    """The workload of these sections, which were read from `source`."""
    origin = _Origin(name=name, accelerator="", source=source, layers=(sections,), is_ours=False)
    return _finish(origin, overrides)


def load_data_set(
    name: str,
    *,
    accelerator: str = "",
    overrides: Sequence[Override] = (),
    config_dir: Path | None = None,
) -> LoadedWorkload:
    """As `load`, for those who look only at the data set: without an accelerator, what all of them share."""
    origin = _file_origin(name, accelerator, config_dir)
    if origin is None and not accelerator and name in families():
        origin = _shared_origin(families()[name])
    return _finish(origin or _shipped_origin(name, accelerator), overrides)


def shipped() -> tuple[LoadedWorkload, ...]:
    """Every workload of the catalog, one for each accelerator."""
    names = [name for family in families().values() for name in family.full_names()]
    return tuple(load(name) for name in names)


def _file_origin(name: str, accelerator: str, config_dir: Path | None) -> _Origin | None:
    path = _find_file(name, config_dir)
    if path is None:
        return None
    tree = parse_yaml(read_text(path), source=str(path))
    return _Origin(name=path.stem, accelerator=accelerator, source=str(path), layers=(tree,), is_ours=False)


def read_text(path: Path) -> str:
    """The text of a file that a user named."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"Cannot read the workload: {error}",
            where=str(path),
            fix="Name a YAML file, or see `penstock workloads`.",
        ) from error


def is_file_name(name: str) -> bool:
    """Whether a word names a file rather than something shipped."""
    return name.endswith(_SUFFIXES) or "/" in name


def _model_origin(name: str) -> _Origin | None:
    """A shipped model card: its checkpoints, without any training."""
    card = shipped_card(name)
    if card is None:
        return None
    return _Origin(name=card.name, accelerator="", source=card.name, layers=(card.sections,), is_ours=True)


def _dlio_origin(name: str) -> _Origin | None:
    """A workload that DLIO ships and that is not one of our families."""
    tree = dlio_workloads().get(name)
    if tree is None:
        return None
    own = {section: values for section, values in tree.items() if section != "like"}
    base = dlio_workloads()[tree["like"]] if "like" in tree else {}
    return _Origin(name=name, accelerator="", source=name, layers=(base, own), is_ours=True)


def _find_file(name: str, config_dir: Path | None) -> Path | None:
    if is_file_name(name):
        return Path(name)
    folders = (config_dir, config_dir / "workload") if config_dir else ()
    candidates = (folder / f"{name}{suffix}" for folder in folders for suffix in _SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def _shipped_origin(name: str, accelerator: str) -> _Origin:
    family, named = _family_of(name)
    if named and accelerator and named != accelerator:
        raise UsageError(
            f"{name} is for {named}, but --accelerator says {accelerator}",
            fix=f"Write {family.name} --accelerator {accelerator}.",
        )
    chosen = named or accelerator or _only(family)
    if chosen and chosen not in family.variants:
        known = ", ".join(family.variants) or "none: it is the same for all"
        raise UsageError(f"{family.name} is not known for {chosen!r}", fix=f"Its accelerators: {known}.")
    return _Origin(
        name=family.name,
        accelerator=chosen,
        source=f"{family.name}_{chosen}" if chosen else family.name,
        layers=(family.shared, family.variants[chosen]) if chosen else (family.shared,),
        is_ours=True,
    )


def _family_of(name: str) -> tuple[WorkloadFamily, str]:
    if name in families():
        return families()[name], ""
    for family in families().values():
        for accelerator in family.variants:
            if name == f"{family.name}_{accelerator}":
                return family, accelerator
    known = [full for family in families().values() for full in family.full_names()]
    stem, _, suffix = name.rpartition("_")
    if stem in families():
        return families()[stem], suffix
    meant = did_you_mean(name, [*families(), *known], cutoff=0.5)
    raise UsageError(
        f"No workload is called {name!r}",
        fix=f"{meant}`penstock workloads` lists those that are shipped; a file's name ends with .yaml.",
    )


def _only(family: WorkloadFamily) -> str:
    if len(family.variants) > 1:
        raise UsageError(
            f"{family.name} differs from accelerator to accelerator",
            fix=f"Choose one: --accelerator {', '.join(family.variants)}.",
        )
    return next(iter(family.variants), "")


def _shared_origin(family: WorkloadFamily) -> _Origin:
    otherwise = [
        f"{accelerator} sets {', '.join(sorted(changes['dataset']))}"
        for accelerator, changes in family.variants.items()
        if "dataset" in changes
    ]
    note = (
        Remark("dataset", f"values shared by all accelerators; {'; '.join(otherwise)} differently")
        if otherwise
        else None
    )
    return _Origin(
        name=family.name,
        accelerator="",
        source=family.name,
        layers=(family.shared,),
        is_ours=True,
        remarks=(note,) if note else (),
    )


def _finish(origin: _Origin, overrides: Sequence[Override]) -> LoadedWorkload:
    stack = LayeredSettings()
    remarks = list(origin.remarks)
    for tree in origin.layers:
        values, layer_remarks = read_layer(tree, origin.source)
        stack.add_layer(values, source=origin.source, is_ours=origin.is_ours)
        remarks += layer_remarks
    for override in overrides:
        values, layer_remarks = read_layer(override.tree(), override.source)
        stack.add_layer(values, source=override.source)
        remarks += layer_remarks
    rule_remarks, problems = apply_dlio_rules(stack)
    workload, refused = read_workload(stack.tree(), name=origin.name, accelerator=origin.accelerator)
    problems += refused if workload is None else _contradictions(workload)
    if problems or workload is None:
        raise _complaint(problems, stack, origin.source)
    return LoadedWorkload(workload=workload, remarks=(*remarks, *rule_remarks, *_mismatches(workload, stack)))


def _contradictions(workload: Workload) -> Iterator[SettingProblem]:
    """Values that are right each, and make no sense together."""
    dataset, model = workload.dataset, workload.model
    if dataset.record_dims and dataset.record_length_bytes_stdev:
        yield SettingProblem(
            path=("dataset", "record_length_bytes_stdev"),
            kind="refused",
            text="cannot go with record_dims, which fix every record's size; set one of them",
        )
    if workload.workflow.evaluation and not workload.evaluation.epochs_between_evals:
        yield SettingProblem(
            path=("evaluation", "epochs_between_evals"),
            kind="refused",
            text="is 0, which fits workflow.evaluation=false only; 1 evaluates after every epoch",
        )
    if workload.checkpoint.mode is CheckpointMode.SUBSET and model.parallelism.data is None:
        yield SettingProblem(
            path=("checkpoint", "mode"),
            kind="refused",
            text="is 'subset', which needs model.parallelism.data: of how many replicas it is a subset",
        )
    names = [column.name for column in dataset.parquet.columns]
    for twice in sorted({name for name in names if names.count(name) > 1}):
        yield SettingProblem(
            path=("dataset", "parquet", "columns"), kind="refused", text=f"name {twice!r} more than once"
        )


def _mismatches(workload: Workload, stack: LayeredSettings) -> Iterator[Remark]:
    row_bytes = parquet_row_bytes(workload.dataset)
    is_asked = ("dataset", "record_length_bytes") in stack.settings
    if row_bytes is not None and is_asked and row_bytes != workload.dataset.record_length_bytes:
        yield Remark("dataset.record_length_bytes", f"the columns make rows of {row_bytes} B, and they count")


def _complaint(problems: Sequence[SettingProblem], stack: LayeredSettings, source: str) -> UsageError:
    lines = [_sentence(problem, stack, source) for problem in problems]
    if len(lines) == 1:
        return UsageError(f"{source}: {lines[0]}")
    return UsageError("\n  ".join((f"{source}: {len(lines)} values are not understood:", *lines)))


def _sentence(problem: SettingProblem, stack: LayeredSettings, source: str) -> str:
    asked = stack.source_of(problem.path)
    where = f" ({asked})" if asked not in ("", source) else ""
    if problem.kind == "unknown":
        return f"{dotted(problem.path)} is not a key{where}; {suggest_key(problem.path)}"
    return f"{dotted(problem.path)} {problem.text}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointModel:
    """A model with the workload that asks for its checkpoints.

    `num_ranks` is the number that it is laid out for, None if any will do; `files` is empty unless the
    layout is known file by file.
    """

    about: str
    num_ranks: int | None
    workload: Workload
    files: tuple[FileRule, ...] = ()
    remarks: tuple[Remark, ...] = ()

    @property
    def name(self) -> str:
        """What the card or the workload is called."""
        return self.workload.full_name


def load_model(name: str, *, overrides: Sequence[Override] = ()) -> CheckpointModel:
    """The model of this name: `llama3-8b`, DLIO's `llama_8b_zero3`, `unet3d_h100`, or a YAML file."""
    if is_file_name(name):
        path = Path(name)
        tree = parse_yaml(read_text(path), source=name)
        card = read_card(tree, name=path.stem, source=name)
        return _of_card(card, load_sections(card.sections, name=path.stem, source=name, overrides=overrides))
    card_found = shipped_card(name)
    if card_found is not None:
        return _of_card(card_found, load(name, overrides=overrides))
    if not any(name == family or name.startswith(f"{family}_") for family in families()):
        raise _unknown(name)
    loaded = load(name, overrides=overrides)
    return CheckpointModel(about="", num_ranks=None, workload=loaded.workload, remarks=loaded.remarks)


def model_of_workload(name: str, workload: Workload) -> CheckpointModel:
    """The model of a workload that was loaded by `name`; what its card says beside it is added."""
    card = shipped_card(name)
    if card is None:
        return CheckpointModel(about="", num_ranks=None, workload=workload)
    return CheckpointModel(about=card.about, num_ranks=card.ranks, workload=workload, files=tuple(card.files))


def _of_card(card: ModelCard, loaded: LoadedWorkload) -> CheckpointModel:
    return CheckpointModel(
        about=card.about,
        num_ranks=card.ranks,
        workload=loaded.workload,
        files=tuple(card.files),
        remarks=loaded.remarks,
    )


def _unknown(name: str) -> UsageError:
    known = [*cards(), *(alias for card in cards().values() for alias in card.aliases), *families()]
    meant = did_you_mean(name, known, cutoff=0.5)
    return UsageError(
        f"No model is called {name!r}",
        fix=f"{meant}`penstock checkpoint models` lists the shipped ones; a file's name ends with .yaml.",
    )
