"""Options that several verbs share: workload, data set, storage, pages, gates, display."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.options import argument, flag, option, repeated, required
from penstock.cli.parsers import ASSIGNMENT, FOLDER, GATE, NEW_PAGE, SETTING, TEXT, URI, WORKLOAD
from penstock.cli.terminal import Terminal
from penstock.environment import process_environment, untraced

if TYPE_CHECKING:
    from penstock.bench.loader.loader_protocol import OpenStorage
    from penstock.cluster.comm import Comm
    from penstock.cluster.gates.gate_model import Gate, PreflightRequest
    from penstock.cluster.gates.preflight import PreflightResult
    from penstock.reports.report import Report
    from penstock.results.run_status import Follower
    from penstock.workload.load_workload import LoadedWorkload
    from penstock.workload.settings import Override


def parse_overrides(settings: Iterable[str]) -> Sequence[Override]:
    """Parse the values of `--set` options as overrides of a workload's settings."""
    from penstock.workload.settings import parse_settings

    return parse_settings(settings)


ACCELERATOR: Final = option(
    "--accelerator",
    TEXT,
    "Emulate this accelerator: h100, b200, ... (default: the one named in WORKLOAD).",
    default="",
)
SETTINGS: Final = repeated("--set", SETTING, "Override a setting of the workload, e.g. reader.batch_size=14.")


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """A training workload and the settings that override its own."""

    name: str = argument("WORKLOAD", WORKLOAD, "Shipped workload (see `penstock workloads`) or a YAML file.")
    accelerator: str = ACCELERATOR
    settings: tuple[str, ...] = SETTINGS

    def load(self, terminal: Terminal, *, is_data_set: bool = False) -> LoadedWorkload:
        """Load the workload and print its remarks. With `is_data_set`, no accelerator has to be named."""
        from penstock.workload.load_workload import load

        overrides = parse_overrides(self.settings)
        loaded = load(self.name, accelerator=self.accelerator, overrides=overrides, is_data_set=is_data_set)
        terminal.notes(loaded.remarks)
        return loaded


STORAGE: Final = repeated(
    "--option",
    ASSIGNMENT,
    "Set an option of the storage back end (see `penstock docs storage`).",
    short="-O",
)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The location of a data set."""

    uri: str = required(
        "--data", URI, "Location of the data set: a directory, direct:///directory or s3://bucket/prefix."
    )
    storage: tuple[tuple[str, str], ...] = STORAGE

    def opener(self, *, rank: int, is_traced: bool = True) -> OpenStorage:
        """Make a function that opens the storage and can be pickled for another process."""
        from penstock.storage import open_storage

        environment = process_environment() if is_traced else untraced(process_environment())
        return partial(open_storage, self.uri, environment, options=dict(self.storage), rank=rank)


RUNS_FOLDER: Final = option(
    "--results", FOLDER, "Look up runs by name in this results directory.", default="runs"
)
PAGE: Final = option("--page", NEW_PAGE, "Write a page with the result and its charts to this file.")


def write_page(path: Path | None, draw: Callable[[], Report], terminal: Terminal) -> None:
    """Write the page that `draw` returns to `path`, on rank 0 only; without a path, do nothing."""
    if path is None or not terminal.speaks:
        return
    from penstock.reports.page import write_report

    write_report(draw(), path)
    terminal.note(f"wrote {path}")


CLOSED_GATES: Final = 3
"""The exit code of a run that a gate stopped."""
SKIPPED_GATES: Final = repeated(
    "--skip-gate", GATE, "Skip a preflight gate (see `penstock cluster check`); run.json records the skip."
)


def inspect_gates(
    request: PreflightRequest, skips: Sequence[Gate], *, is_strict: bool, comm: Comm, terminal: Terminal
) -> PreflightResult:
    """Inspect all gates, and print those that do not pass. With `is_strict`, a closed gate stops the run."""
    from penstock.cluster.gates.preflight import run_preflight

    inspection = run_preflight(request, comm, skips=skips, is_strict=is_strict, is_private=not is_strict)
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


METRICS_FOLDER: Final = option(
    "--metrics-dir",
    FOLDER,
    "Keep the current figures in DIR/penstock-RUN.prom, for node exporter's textfile collector.",
)


def follow_by_metrics(folder: Path | None) -> list[Follower]:
    """Return the follower that keeps a metrics file in `folder`, or no follower if `folder` is None."""
    if folder is None:
        return []
    from penstock.results.run_status import TextCollectorFile

    return [TextCollectorFile(folder)]


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """The display of a run in progress, and its metrics for monitoring."""

    shows_figures: bool = flag("--watch", "Show live figures in place of a progress bar.")
    metrics_folder: Path | None = METRICS_FOLDER

    def followers(self) -> list[Follower]:
        """Return the metrics file, if one is requested, and the display on the terminal."""
        from penstock.cli.live_display import make_display

        # A missing folder for metrics causes an error before any bar is drawn.
        return [*follow_by_metrics(self.metrics_folder), make_display(shows_figures=self.shows_figures)]
