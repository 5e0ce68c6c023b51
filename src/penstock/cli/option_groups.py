"""Options that several commands share, as groups: the workload, the model, the data set, its storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.options import argument, group, option, repeated, required
from penstock.cli.parsers import ASSIGNMENT, FOLDER, SETTING, TEXT, URI
from penstock.cli.terminal import Terminal
from penstock.environment import process_environment, untraced

if TYPE_CHECKING:
    from penstock.bench.loader.loader_protocol import OpenStorage
    from penstock.bench.model_state import StateLayout
    from penstock.workload.checkpoint_model import CheckpointModel
    from penstock.workload.loading import LoadedWorkload


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """A training workload and its changed values."""

    name: str = argument("WORKLOAD", TEXT, "Shipped workload (see `penstock workloads`) or a YAML file.")
    accelerator: str = option(
        "--accelerator",
        TEXT,
        "Accelerator that is emulated: h100, b200, ... (default: part of WORKLOAD).",
        default="",
    )
    settings: tuple[str, ...] = repeated("--set", SETTING, "Change a value, e.g. reader.batch_size=14.")

    def load(self, terminal: Terminal, *, is_data_set: bool = False) -> LoadedWorkload:
        """Load the workload and print its remarks; a data set needs no accelerator."""
        from penstock.workload.loading import load, load_data_set
        from penstock.workload.overrides import parse_settings

        overrides = parse_settings(self.settings)
        loaded = (load_data_set if is_data_set else load)(
            self.name, accelerator=self.accelerator, overrides=overrides
        )
        for remark in loaded.remarks:
            terminal.note(str(remark))
        return loaded


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options of a storage back end."""

    assignments: tuple[tuple[str, str], ...] = repeated(
        "--option", ASSIGNMENT, "Set an option of the storage back end (docs/storage.md).", short="-o"
    )

    @property
    def values(self) -> Mapping[str, str]:
        """The options by name; the last value of a name counts."""
        return dict(self.assignments)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """A data set's storage."""

    uri: str = required("--data", URI, "Data set: a directory, direct:///directory or s3://bucket/prefix.")
    storage: BackendOptions = group(BackendOptions)

    def opener(self, *, rank: int, is_traced: bool = True) -> OpenStorage:
        """A function that opens the storage; it can be pickled for another process."""
        from penstock.storage import open_storage

        environment = process_environment() if is_traced else untraced(process_environment())
        return partial(open_storage, self.uri, environment, options=self.storage.values, rank=rank)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model whose checkpoints are measured, and its changed values."""

    name: str = argument("MODEL", TEXT, "Shipped model (see `penstock checkpoint models`) or a YAML file.")
    settings: tuple[str, ...] = repeated("--set", SETTING, "Change a value, e.g. model.num_layers=4.")

    def load(self) -> CheckpointModel:
        """Load the model."""
        return load_model(self.name, self.settings)


def load_model(name: str, settings: tuple[str, ...]) -> CheckpointModel:
    """The model of this name with changed values."""
    from penstock.workload import checkpoint_model
    from penstock.workload.overrides import parse_settings

    return checkpoint_model.load_model(name, overrides=parse_settings(settings))


def plan_model_layout(
    model: CheckpointModel, *, ranks: int | None, scale: Fraction, is_subset: bool
) -> StateLayout:
    """The model's files on a number of ranks; None: on as many as it is laid out for."""
    from penstock.bench.model_state import LayoutRequest, plan_layout
    from penstock.workload.choices import CheckpointMode

    mode = CheckpointMode.SUBSET if is_subset else model.workload.checkpoint.mode
    return plan_layout(LayoutRequest(model=model, num_processes=ranks, scale=scale, mode=mode))


@dataclass(frozen=True, kw_only=True)
class ParentOption:
    """The results directory in which runs are looked up."""

    path: Path = option(
        "--results", FOLDER, "Results directory in which runs are looked up by name.", default="results"
    )
