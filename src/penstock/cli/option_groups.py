"""Options that several commands share: workload, model, data set, storage, gates, following."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.options import argument, flag, group, option, repeated, required
from penstock.cli.parsers import ASSIGNMENT, FILE, FOLDER, MODEL, SETTING, TEXT, URI, WORKLOAD, choice
from penstock.cli.terminal import Terminal
from penstock.environment import process_environment, untraced

if TYPE_CHECKING:
    from penstock.bench.loader.loader_protocol import OpenStorage
    from penstock.bench.state_layout import StateLayout
    from penstock.cluster.comm import Comm
    from penstock.cluster.gates.gate_model import Gate, PreflightRequest
    from penstock.cluster.gates.preflight import PreflightResult
    from penstock.reports.report import Report
    from penstock.results.run_status import Follower
    from penstock.workload.load_workload import CheckpointModel, LoadedWorkload
    from penstock.workload.settings import Override


def parse_overrides(settings: Iterable[str]) -> Sequence[Override]:
    """The changes that `--set` options make to a workload."""
    from penstock.workload.settings import parse_settings

    return parse_settings(settings)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """A training workload and its changed values."""

    name: str = argument("WORKLOAD", WORKLOAD, "Shipped workload (see `penstock workloads`) or a YAML file.")
    accelerator: str = option(
        "--accelerator",
        TEXT,
        "Emulate this accelerator: h100, b200, ... (default: part of WORKLOAD).",
        default="",
    )
    settings: tuple[str, ...] = repeated("--set", SETTING, "Change a value, e.g. reader.batch_size=14.")

    def load(self, terminal: Terminal, *, is_data_set: bool = False) -> LoadedWorkload:
        """Load the workload and print its remarks; a data set needs no accelerator."""
        from penstock.workload.load_workload import load

        overrides = parse_overrides(self.settings)
        loaded = load(self.name, accelerator=self.accelerator, overrides=overrides, is_data_set=is_data_set)
        terminal.notes(loaded.remarks)
        return loaded


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options of a storage back end."""

    assignments: tuple[tuple[str, str], ...] = repeated(
        "--option",
        ASSIGNMENT,
        "Set an option of the storage back end (see `penstock docs storage`).",
        short="-O",
    )

    @property
    def values(self) -> Mapping[str, str]:
        """The options by name; the last value of a name counts."""
        return dict(self.assignments)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """A data set's storage."""

    uri: str = required(
        "--data", URI, "Use the data set here: a directory, direct:///directory or s3://bucket/prefix."
    )
    storage: BackendOptions = group(BackendOptions)

    def opener(self, *, rank: int, is_traced: bool = True) -> OpenStorage:
        """A function that opens the storage; it can be pickled for another process."""
        from penstock.storage import open_storage

        environment = process_environment() if is_traced else untraced(process_environment())
        return partial(open_storage, self.uri, environment, options=self.storage.values, rank=rank)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model whose checkpoints are measured, and its changed values."""

    name: str = argument("MODEL", MODEL, "Shipped model (see `penstock checkpoint models`) or a YAML file.")
    settings: tuple[str, ...] = repeated("--set", SETTING, "Change a value, e.g. model.num_layers=4.")

    def load(self) -> CheckpointModel:
        """Load the model."""
        return load_model(self.name, self.settings)


def load_model(name: str, settings: tuple[str, ...]) -> CheckpointModel:
    """The model of this name with changed values."""
    from penstock.workload import load_workload

    return load_workload.load_model(name, overrides=parse_overrides(settings))


def plan_model_layout(
    model: CheckpointModel, *, ranks: int | None, scale: Fraction, is_subset: bool
) -> StateLayout:
    """The model's files on a number of ranks; None: on as many as it is laid out for."""
    from penstock.bench.state_layout import LayoutRequest, plan_layout
    from penstock.workload.enums import CheckpointMode

    mode = CheckpointMode.SUBSET if is_subset else model.workload.checkpoint.mode
    return plan_layout(LayoutRequest(model=model, num_processes=ranks, scale=scale, mode=mode))


@dataclass(frozen=True, kw_only=True)
class ParentOption:
    """The results directory in which runs are looked up."""

    path: Path = option(
        "--results", FOLDER, "Look up runs by name in this results directory.", default="runs"
    )


@dataclass(frozen=True, kw_only=True)
class PageOption:
    """A file for the result as a page with charts."""

    path: Path | None = option("--page", FILE, "Write the result as a page with charts to this file.")

    def write(self, draw: Callable[[], Report], terminal: Terminal) -> None:
        """Write the page that `draw` makes, if one is asked for; on rank 0 only."""
        if self.path is None or not terminal.speaks:
            return
        from penstock.reports.page import write_report

        write_report(draw(), self.path)
        terminal.note(f"wrote {self.path}")


CLOSED_GATES: Final = 3
"""The exit code of a run that a gate stopped."""
GATE: Final = choice("cluster", "versions", "clock", "limits", "ipc", "apart", "space", "storage")


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Which preflight gates a run skips."""

    skipped: tuple[str, ...] = repeated(
        "--skip-gate",
        GATE,
        "Skip a preflight gate, which run.json records (see `penstock cluster check`).",
    )


def inspect_gates(
    request: PreflightRequest, options: GateOptions, *, is_strict: bool, comm: Comm, terminal: Terminal
) -> PreflightResult:
    """Inspect all gates and print those that do not pass; `is_strict` makes a closed one stop the run."""
    from penstock.cluster.gates.preflight import run_preflight

    inspection = run_preflight(
        request, comm, skips=parse_gates(options.skipped), is_strict=is_strict, is_private=not is_strict
    )
    preflight = inspection.preflight
    if not preflight.is_stopped:
        for finding in preflight.findings:
            if finding.is_closed or finding.verdict == "warning":
                terminal.note(f"gate {finding.gate}: {finding.verdict}: {finding.found}")
        return inspection
    for finding in preflight.closed:
        terminal.note(f"gate {finding.gate}: {finding.verdict}: {finding.found}. {finding.fix}")
    terminal.note(
        "Nothing was started: a run for a submission must pass all gates. Fix the problems above, or skip a "
        "gate with --skip-gate NAME, which the record of the run shows."
    )
    return inspection


def parse_gates(names: Iterable[str]) -> Sequence[Gate]:
    """The gates of these names."""
    from penstock.cluster.gates.gate_model import parse_gate

    return tuple(parse_gate(name) for name in names)


@dataclass(frozen=True, kw_only=True)
class MetricsOption:
    """A file of metrics for monitoring."""

    folder: Path | None = option(
        "--metrics-dir",
        FOLDER,
        "Keep the figures in DIR/penstock-RUN.prom, for node exporter's text collector.",
    )

    def followers(self) -> list[Follower]:
        """The follower that keeps the file, if one is wanted."""
        if self.folder is None:
            return []
        from penstock.results.run_status import TextCollectorFile

        return [TextCollectorFile(self.folder)]


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """How a run is followed while it lasts."""

    shows_figures: bool = flag("--watch", "Show live figures in place of a progress bar.")
    metrics: MetricsOption = group(MetricsOption)

    def followers(self) -> list[Follower]:
        """The terminal's display, and monitoring."""
        from penstock.cli.live_display import make_display

        # A folder of metrics that does not exist is refused before a bar is drawn.
        return [*self.metrics.followers(), make_display(shows_figures=self.shows_figures)]
