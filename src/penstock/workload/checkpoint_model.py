"""The model of a checkpoint, found by name: a shipped card, a workload with a model, or a YAML file.

A name means the same model here as in `workload=NAME` of DLIO's command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import UsageError
from penstock.suggest import did_you_mean
from penstock.workload.loading import LoadedWorkload, is_file_name, load, load_sections, read_text
from penstock.workload.shipped_catalog import ModelCard, cards, families, read_card, shipped_card
from penstock.workload.strict_yaml import parse_yaml

if TYPE_CHECKING:
    from penstock.workload.dlio_keys import Remark
    from penstock.workload.overrides import Override
    from penstock.workload.shipped_catalog import FileRule
    from penstock.workload.spec import Workload


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
