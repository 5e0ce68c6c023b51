"""Loads a `Workload` from a name, a YAML file and overrides; remarks on keys that DLIO treats differently.

A catalog entry or a file, and then overrides, become layers of settings, which are normalized (`dlio_keys`),
parsed (`spec.read_workload`) and checked. There is no other way to load a workload. All problems are
reported in one error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.did_you_mean import did_you_mean, nearest
from penstock.errors import UsageError
from penstock.storage.files.local_files import read_document
from penstock.units import SIZE_LIMITS
from penstock.workload.dlio_keys import ALIASES, EXPLAINED, SECTION_ALIASES, apply_dlio_rules, read_layer
from penstock.workload.enums import CheckpointMode
from penstock.workload.quantities import LARGEST, read_exact_bytes
from penstock.workload.settings import LayeredSettings, Override, Setting, dotted
from penstock.workload.shipped_catalog import (
    FileRule,
    ModelCard,
    cards,
    dlio_workloads,
    families,
    full_names,
    read_card,
    shipped_card,
)
from penstock.workload.sizing import parquet_row_bytes, record_bytes
from penstock.workload.spec import KeyPath, Workload, known_paths, read_workload
from penstock.workload.strict_yaml import parse_yaml

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedWorkload:
    """A workload, and remarks on keys that DLIO reads differently or that have no effect here."""

    workload: Workload
    remarks: tuple[str, ...] = ()


def load(
    name: str,
    *,
    accelerator: str = "",
    overrides: Sequence[Override] = (),
    config_dir: Path | None = None,
    prefers_dlio: bool = False,
    is_data_set: bool = False,
) -> LoadedWorkload:
    """Return the workload `name`: shipped (`unet3d` with an accelerator, `unet3d_h100`), or a YAML file.

    A file `NAME.yaml` in `config_dir`, or in its folder `workload`, takes precedence over a shipped one.
    Names that only DLIO uses are recognized as well; with `prefers_dlio`, so are those that otherwise mean a
    different workload here. A data set needs no accelerator: `is_data_set` loads the values that all
    accelerators share.
    """
    if (path := _find_file(name, config_dir)) is not None:
        tree, source = parse_yaml(read_text(path), source=str(path)), str(path)
        return _load_layers([tree], path.stem, overrides, accelerator=accelerator, source=source)
    is_family = name in families()
    if is_data_set:
        if is_family and not accelerator:
            return _load_shared(name, overrides)
    elif (card := shipped_card(name)) is not None:  # the model's checkpoints, without training
        return _load_layers([card.sections], card.name, overrides, is_ours=True)
    elif not accelerator and (prefers_dlio or not is_family) and name in dlio_workloads():
        own = dict(dlio_workloads()[name])
        base = dlio_workloads().get(own.pop("like", ""), {})
        return _load_layers([base, own], name, overrides, is_ours=True)
    family, chosen = _choose_member(name, accelerator)
    variants = families()[family]["accelerators"]
    layers = [families()[family]["workload"], *([variants[chosen]] if chosen else ())]
    source = f"{family}_{chosen}" if chosen else family
    return _load_layers(layers, family, overrides, accelerator=chosen, source=source, is_ours=True)


def _load_shared(family: str, overrides: Sequence[Override]) -> LoadedWorkload:
    """Return the values that all accelerators of a family share."""
    tree, given = families()[family], {override.path for override in overrides}
    otherwise = [
        f"{variant} sets {', '.join(keys)}"
        for variant, changes in tree["accelerators"].items()
        if (keys := sorted(key for key in changes.get("dataset", ()) if ("dataset", key) not in given))
    ]
    note = f"dataset: values shared by all accelerators; {'; '.join(otherwise)} differently"
    loaded = _load_layers([tree["workload"]], family, overrides, is_ours=True)
    return replace(loaded, remarks=(*([note] if otherwise else ()), *loaded.remarks))


def load_sections(
    sections: Mapping[str, Any], *, name: str, source: str, overrides: Sequence[Override] = ()
) -> LoadedWorkload:
    """Return the workload of these sections, which were read from `source`."""
    return _load_layers([sections], name, overrides, source=source)


def shipped() -> tuple[LoadedWorkload, ...]:
    """Return every workload of the catalog, one for each accelerator."""
    return tuple(load(name) for family in families() for name in full_names(family))


def read_text(path: Path) -> str:
    """Return the text of a file that a user has named."""
    try:
        return read_document(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"Cannot read the workload: {error}",
            where=str(path),
            fix="Name a YAML file, or see `penstock workloads`.",
        ) from error


def is_file_name(name: str) -> bool:
    """Return True if the word names a file rather than something shipped."""
    return name.endswith(_SUFFIXES) or "/" in name


def _find_file(name: str, config_dir: Path | None) -> Path | None:
    if is_file_name(name):
        return Path(name)
    folders = (config_dir, config_dir / "workload") if config_dir else ()
    candidates = (folder / f"{name}{suffix}" for folder in folders for suffix in _SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def _choose_member(name: str, accelerator: str) -> tuple[str, str]:
    """Return the family and accelerator of a shipped workload; `name` is the family, or both in one word."""
    stem, _, named = name.rpartition("_")
    family, named = (name, "") if name in families() else (stem, named)
    if family not in families():
        known = [full for known_family in families() for full in full_names(known_family)]
        meant = did_you_mean(name, [*families(), *known], cutoff=0.5)
        raise UsageError(
            f"No workload is called {name!r}",
            fix=f"{meant}`penstock workloads` lists those that are shipped; a file's name ends with .yaml.",
        )
    if named and accelerator and named != accelerator:
        raise UsageError(
            f"{name} is for {named}, but --accelerator says {accelerator}",
            fix=f"Write {family} --accelerator {accelerator}.",
        )
    variants, chosen = families()[family]["accelerators"], named or accelerator
    if not chosen and len(variants) > 1:
        raise UsageError(
            f"{family} differs from accelerator to accelerator",
            fix=f"Choose one: --accelerator {', '.join(variants)}.",
        )
    if chosen and chosen not in variants:
        known_ones = ", ".join(variants) or "none: it is the same for all"
        raise UsageError(f"There is no {family} for {chosen!r}", fix=f"Its accelerators: {known_ones}.")
    return family, chosen or next(iter(variants), "")


def _load_layers(
    layers: Sequence[Mapping[str, Any]],
    name: str,
    overrides: Sequence[Override],
    *,
    accelerator: str = "",
    source: str = "",
    is_ours: bool = False,
) -> LoadedWorkload:
    """Return the workload of these layers and overrides. Messages name `source` (default: the name)."""
    source = source or name
    stack = LayeredSettings()
    remarks = []
    for tree in layers:
        values, layer_remarks = read_layer(tree, source)
        stack.add_layer(values, source=source, is_ours=is_ours)
        remarks += layer_remarks
    shipped_length = stack.settings.get(_LENGTH)
    for override in overrides:
        values, layer_remarks = read_layer(override.tree(), override.source)
        stack.add_layer(values, source=override.source)
        remarks += layer_remarks
    remarks += _scale_deviation(stack, shipped_length)
    rule_remarks, problems = apply_dlio_rules(stack)
    remarks += rule_remarks
    workload, refused = read_workload(stack.tree(), name=name, accelerator=accelerator)
    problems += refused if workload is None else _contradictions(workload)
    if problems or workload is None:
        lines = []
        for path, text in problems:
            asked = stack.source_of(path)
            where = f" ({asked})" if asked not in ("", source) else ""
            what = f"{text}{where}" if text else f"is not a key{where}; {suggest_key(path)}"
            lines.append(f"{dotted(path)} {what}")
        if len(lines) == 1:
            raise UsageError(f"{source}: {lines[0]}")
        raise UsageError("\n  ".join((f"{source}: {len(lines)} values are not understood:", *lines)))
    row_bytes = parquet_row_bytes(workload.dataset)
    if row_bytes not in (None, workload.dataset.record_length_bytes) and _LENGTH in stack.settings:
        remarks.append(f"{dotted(_LENGTH)}: the columns make rows of {row_bytes} B, which count instead")
    return LoadedWorkload(workload=workload, remarks=tuple(remarks))


_LENGTH: Final = ("dataset", "record_length_bytes")
_DEVIATION: Final = ("dataset", "record_length_bytes_stdev")


def _scale_deviation(stack: LayeredSettings, shipped: Setting | None) -> Iterator[str]:
    """Scale a shipped standard deviation along with a mean that --set changed, to keep their proportion."""
    length, deviation = stack.settings.get(_LENGTH), stack.settings.get(_DEVIATION)
    if not (shipped and length and deviation and deviation.is_ours and deviation.value):
        return
    try:
        mean, wanted = read_exact_bytes(shipped.value), read_exact_bytes(length.value)
    except UsageError:  # the workload's types report this together with the key
        return
    if length.source.startswith("--set") and mean and mean != wanted <= LARGEST:
        scaled = round(read_exact_bytes(deviation.value) * wanted / mean)
        stack.add_layer({_DEVIATION: scaled}, source=length.source)
        yield (
            f"{dotted(_DEVIATION)}: scaled with the mean, from {deviation.value} to {scaled} bytes; "
            "set it for a different one"
        )


def _contradictions(workload: Workload) -> Iterator[tuple[KeyPath, str]]:
    """Yield values that are valid individually but contradict each other."""
    dataset, model = workload.dataset, workload.model
    if dataset.record_dims and dataset.record_length_bytes_stdev:
        why = "cannot go with record_dims, which fix every record's size; set one of them"
        yield ("dataset", "record_length_bytes_stdev"), why
    if workload.workflow.evaluation and not workload.evaluation.epochs_between_evals:
        why = "is 0, which fits workflow.evaluation=false only; 1 evaluates after every epoch"
        yield ("evaluation", "epochs_between_evals"), why
    if workload.checkpoint.mode is CheckpointMode.SUBSET and model.parallelism.data is None:
        why = "is 'subset', which needs model.parallelism.data: the number of replicas that it is a subset of"
        yield ("checkpoint", "mode"), why
    if record_bytes(dataset) > LARGEST:
        yield ("dataset",), f"makes records of more than {SIZE_LIMITS[1]}"
    names = [column.name for column in dataset.parquet.columns]
    for twice in sorted({name for name in names if names.count(name) > 1}):
        yield ("dataset", "parquet", "columns"), f"name {twice!r} more than once"


def suggest_key(path: KeyPath) -> str:
    """Return the key that `path` probably means, or the keys next to it."""
    known = (*known_paths(), *ALIASES, *EXPLAINED, *((section,) for section in SECTION_ALIASES))

    def children(section: KeyPath) -> list[str]:
        depth = len(section)
        return sorted({path[depth] for path in known if path[:depth] == section and len(path) > depth})

    steps = tuple(step for step in path if not step.isdecimal()) or path  # elements of a list share keys
    siblings = children(steps[:-1])
    namesake = next((one for one in known if one[-1] == steps[-1]), ())
    sibling = nearest(steps[-1], siblings)
    lookalike = nearest(dotted(steps), sorted(map(dotted, known)), cutoff=0.8)
    meant = namesake or ((*steps[:-1], sibling) if sibling else tuple(filter(None, lookalike.split("."))))
    if meant:
        # An old spelling is understood, but not recommended.
        return f"did you mean {dotted(ALIASES.get(meant, meant))}?"
    return f"known here: {', '.join(siblings or children(()))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointModel:
    """A model with the workload that configures its checkpoints.

    `num_ranks` is the number of ranks for which it is laid out, None if any number will do; `files` is empty
    unless the layout is known file by file.
    """

    about: str
    num_ranks: int | None
    workload: Workload
    files: tuple[FileRule, ...] = ()
    remarks: tuple[str, ...] = ()


def load_model(name: str, *, overrides: Sequence[Override] = ()) -> CheckpointModel:
    """Return the model `name`: `llama3-8b`, DLIO's `llama_8b_zero3`, `unet3d_h100`, or a YAML file."""
    if is_file_name(name):
        path = Path(name)
        card = read_card(parse_yaml(read_text(path), source=name), name=path.stem, source=name)
        return _model(card, load_sections(card.sections, name=path.stem, source=name, overrides=overrides))
    shipped_one = shipped_card(name)
    if shipped_one is None and not any(
        name == family or name.startswith(f"{family}_") for family in families()
    ):
        known = [*cards(), *(alias for card in cards().values() for alias in card.aliases), *families()]
        meant = did_you_mean(name, known, cutoff=0.5)
        raise UsageError(
            f"No model is called {name!r}",
            fix=f"{meant}`penstock checkpoint models` lists the shipped ones; a file's name ends with .yaml.",
        )
    return _model(shipped_one, load(name, overrides=overrides))


def model_of_workload(name: str, workload: Workload) -> CheckpointModel:
    """Return the model of a workload loaded as `name`, with the facts from its card, if it has one."""
    return _model(shipped_card(name), LoadedWorkload(workload=workload))


def _model(card: ModelCard | None, loaded: LoadedWorkload) -> CheckpointModel:
    return CheckpointModel(
        about=card.about if card else "",
        num_ranks=card.ranks if card else None,
        workload=loaded.workload,
        files=tuple(card.files) if card else (),
        remarks=loaded.remarks,
    )
