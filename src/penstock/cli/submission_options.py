"""The options that make a run part of a submission, and the session that writes its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.option_groups import parse_overrides
from penstock.cli.options import command_line, flag, group, option, refuse_ignored, required
from penstock.cli.parsers import FOLDER_URI, NAME
from penstock.cluster.comm import Comm
from penstock.errors import UsageError
from penstock.workload.dlio_keys import canonical_path
from penstock.workload.mlperf_divisions import SubmissionDivision
from penstock.workload.settings import dotted

if TYPE_CHECKING:
    from penstock.submission.authoring.owned_tree import RunSeries
    from penstock.submission.authoring.preflight import DataLocation
    from penstock.submission.tree_layout import Benchmark
    from penstock.workflows.submission_results import ResultWriter


@dataclass(frozen=True, kw_only=True)
class DivisionOptions:
    """The MLPerf Storage division whose rules a run follows, if any."""

    closed: bool = flag(
        "--closed",
        "Choose the CLOSED division of MLPerf Storage and enforce its rules. In training, it implies "
        "--loader pytorch and --remainder drop.",
    )
    open: bool = flag("--open", "Choose the OPEN division of MLPerf Storage and enforce its rules.")

    @property
    def division(self) -> SubmissionDivision | None:
        """The division named by the options. Raises `UsageError` if both are named."""
        if self.closed and self.open:
            raise UsageError("--closed and --open are mutually exclusive", fix="Leave one of them out.")
        if self.closed:
            return SubmissionDivision.CLOSED
        return SubmissionDivision.OPEN if self.open else None

    def require_division(self) -> SubmissionDivision:
        """Return the division named by the options. Raises `UsageError` if none is named."""
        if (division := self.division) is None:
            raise UsageError(
                "A submission needs a division", where="--submission", fix="Add --closed or --open."
            )
        return division


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """The destination of a run's results: a separate directory, or a submission tree.

    `rehearsed_at` is not an option: it is the scale of a rehearsal, or None for a real result.
    """

    parent: str | None = option("--results", FOLDER_URI, "Create this run's directory below DIR.")
    tree: str | None = option(
        "--submission", FOLDER_URI, "Add the run to this submission tree (see `penstock submission init`)."
    )
    system: str | None = option(
        "--system", NAME, "Name of the system under test; required with --submission."
    )
    rules: DivisionOptions = group(DivisionOptions)
    rehearsed_at: Fraction | None = None

    @property
    def folder(self) -> Path:
        """The directory for results. Raises `UsageError` unless exactly one option names it."""
        if self.parent is not None and self.tree is not None:
            raise UsageError(
                "--results and --submission are mutually exclusive", fix="Leave one of them out."
            )
        if (folder := self.parent if self.tree is None else self.tree) is None:
            raise UsageError(
                "No directory is named for the results",
                fix="Give --results DIR, or --submission DIR for a run that will be submitted.",
            )
        return Path(folder)

    @property
    def folder_option(self) -> str:
        """The option that names the directory."""
        return "--results" if self.tree is None else "--submission"

    def find_series(self, *, benchmark: Benchmark, model: str) -> RunSeries | None:
        """Return the series of runs to which this run belongs, or None if the run is not submitted."""
        from penstock.submission.authoring.owned_tree import RunSeries, require_owned_tree

        if self.tree is None:
            refuse_ignored(
                ("--system",), "the run is not submitted", fix="Leave it out, or add --submission DIR."
            )
            return None
        division = self.rules.require_division()
        if self.system is None:
            raise UsageError(
                "A submission needs a system under test", where="--submission", fix="Add --system NAME."
            )
        tree = require_owned_tree(Path(self.tree))
        tree.require_purpose(is_rehearsal=self.rehearsed_at is not None)
        return RunSeries(
            tree=tree,
            division=division,
            system=self.system,
            benchmark=benchmark,
            model=model,
        )


@dataclass(frozen=True, kw_only=True)
class TreeOptions(ResultOptions):
    """The submission tree to which a result belongs, and the system under test."""

    parent: None = None
    tree: str = required(
        "--submission", FOLDER_URI, "Use this submission tree, created by `penstock submission init`."
    )
    system: str = required("--system", NAME, "Name of the system under test; systems/NAME.yaml describes it.")


def open_session(
    series: RunSeries,
    located: DataLocation,
    settings: Sequence[str],
    *,
    rehearsed_at: Fraction | None,
    comm: Comm,
) -> ResultWriter:
    """Capture the program's code image, and return the writer of result directories. Collective."""
    from penstock.workflows.submission_results import ResultWriter, capture_image

    return ResultWriter(
        series=series,
        program=capture_image(series.tree, comm=comm),
        data_path=located.data_path,
        changed={**parse_changes(settings), **located.changes},
        command=command_line(),
        rehearsed_at=rehearsed_at,
    )


def parse_changes(settings: Iterable[str]) -> Mapping[str, Any]:
    """Map DLIO's key of each `--set` option to its value."""
    return {dotted(canonical_path(setting.path)): setting.value for setting in parse_overrides(settings)}
