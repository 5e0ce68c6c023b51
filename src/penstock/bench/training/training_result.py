"""The result of a training run for its caller, and `stages.json`: the times outside the score.

Utilization is in percent.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from penstock.bench.loader.loader_protocol import LoaderOptions
from penstock.bench.own_loader.user_code import DescribedLoader
from penstock.bench.own_loader.waits import LoaderWaits
from penstock.bench.recorded_run import RunSettings
from penstock.errors import StorageError
from penstock.results import counter_files, event_files, phase_figures, published_files, run_folder
from penstock.results.active_run import ActiveRun
from penstock.results.counter_files import IoReconciliation
from penstock.results.phase_figures import (
    Bottleneck,
    BottleneckVerdict,
    EpochRate,
    PhaseFigures,
    counted_ceiling,
    judge,
)
from penstock.results.step_events import StepPhase
from penstock.storage import Counters
from penstock.storage.protocol import OptionValue
from penstock.workload.spec import Workload

SLOW_START_S: Final = 10.0
"""If workers take longer to start, a remark says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Everything that a run did outside its score, over all ranks that took part.

    `files_found` is None if no listing was needed; `remarks` are about the files, `checkpoints` about the
    checkpoints saved during training. `survey_bytes` were read to find samples, and count in no step. `waits`
    are the waits for a user's own loader, by stage.

    Each entry of `epochs` has the page cache eviction as `cache`, the rest of the time since the previous
    epoch as `change_s`, and, if `reader.read_type` is memory, the bytes and the time that its `preload` took.
    `ceiling` has the figures of the same run on storage that costs no time.
    """

    loader: LoaderOptions | DescribedLoader
    storage_uri: str
    storage_options: Mapping[str, OptionValue]
    epochs: tuple[Mapping[str, Any], ...]
    opening_s: float = 0.0
    files_found: int | None = None
    remarks: tuple[str, ...] = ()
    validated_files: int = 0
    validation_s: float = 0.0
    planning_s: float = 0.0
    loader_start_s: float = 0.0
    ceiling: Mapping[str, Any] | None = None
    ceiling_s: float = 0.0
    checkpoints: Mapping[str, Any] | None = None
    survey_bytes: int = 0
    counters: Counters = field(default_factory=Counters)
    deliveries: tuple[IoReconciliation, ...] = ()
    waits: LoaderWaits | None = None

    @property
    def advice(self) -> tuple[str, ...]:
        """Changes that would make the next run of this kind faster."""
        started_s = self.loader_start_s + self.ceiling_s
        if self.loader.document().get("context") != "spawn" or started_s < SLOW_START_S:
            return ()
        advice = (
            f"Starting worker processes again took most of {started_s:.0f} s before the first step: "
            "reader.multiprocessing_context=fork starts them in a fraction of that, and forkserver in less "
            "where the storage's library does not survive a fork"
        )
        return (advice,)

    def sentences(self) -> tuple[str, ...]:
        """Return lines for the log: what was done outside the score, and how long it took."""
        found = "" if self.files_found is None else f": {self.files_found:,} files listed"
        looked_up = f"{self.validated_files:,} files looked up in {self.validation_s:.2f} s"
        return (
            f"Data set opened in {self.opening_s:.2f} s{found}; {looked_up}",
            f"Order of all epochs planned in {self.planning_s:.2f} s",
            f"Loader started in {self.loader_start_s:.2f} s",
            f"Harness limit measured in {self.ceiling_s:.2f} s",
            *map(_describe_change, self.epochs),
        )

    def document(self) -> dict[str, Any]:
        """Return the content of `stages.json`."""
        return {
            "opening_s": self.opening_s,
            "files_found": self.files_found,
            "validation": {"num_files": self.validated_files, "elapsed_s": self.validation_s},
            "planning_s": self.planning_s,
            "loader": self.loader.document(),
            "loader_start_s": self.loader_start_s,
            "ceiling": self.ceiling,
            "ceiling_s": self.ceiling_s,
            "epochs": self.epochs,
            "checkpoints": dict(self.checkpoints) if self.checkpoints else None,
            "survey_bytes": self.survey_bytes,
            "deliveries": [asdict(delivery) for delivery in self.deliveries],
            "waits": self.waits.document() if self.waits else None,
            "storage": {
                "uri": self.storage_uri,
                "options": dict(self.storage_options),
                "counters": self.counters.record(),
            },
        }


def _describe_change(epoch: Mapping[str, Any]) -> str:
    dropped = f", page cache dropped in {epoch['cache']['elapsed_s']:.2f} s" if epoch["cache"] else ""
    return f"Change to epoch {epoch['epoch']} in {epoch['change_s']:.2f} s{dropped}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a finished run."""

    workload: str
    ranks: int
    results_dir: str
    train: PhaseFigures
    evaluation: PhaseFigures | None
    stages: Stages

    @property
    def verdict(self) -> str:
        """The verdict of the page, the terminal, `--json` and the exit code; see `phase_figures.judge`."""
        return judge(self.train, self.stages.deliveries, self.stages.epochs)

    @property
    def ceiling(self) -> Mapping[str, Any] | None:
        """The figures on storage that costs no time; None if unknown, or disproved by this run."""
        return counted_ceiling(self.stages.ceiling, self.train.au_compat_percent.mean)

    def document(self) -> dict[str, Any]:
        """Return the document of `--json`. AU is in percent; `read_bytes` counts training epochs."""
        verdict = self.train.verdict
        return {
            "workload": self.workload,
            "accelerators": self.ranks,
            "verdict": self.verdict,
            **_phase(self.train),
            "meets_threshold": self.train.meets_threshold,
            "notes": list(self.train.notes),
            "bottleneck": verdict.bottleneck.value if verdict else None,
            "evidence": list(verdict.evidence) if verdict else [],
            "ceiling": self.stages.ceiling,
            "epochs": [_epoch(rate) for rate in self.train.epochs],
            "evaluation": _phase(self.evaluation) if self.evaluation else None,
            "trace": self.stages.storage_options.get("trace"),
            "outside_of_score": self.stages.document(),
            "results_dir": self.results_dir,
        }


def _phase(figures: PhaseFigures) -> dict[str, Any]:
    strict = figures.au_strict_percent
    return {
        "au_compat": figures.au_compat_percent.mean,
        "au_strict": strict.mean if strict else None,
        "samples_per_s": figures.samples_per_s_strict,
        "samples_per_s_compat": figures.samples_per_s_compat.mean,
        "read_bytes": figures.read_bytes,
        "read_bytes_per_s": figures.read_bytes_per_s,
    }


def _epoch(rate: EpochRate) -> dict[str, Any]:
    return {
        "epoch": rate.epoch,
        "au_compat": rate.au_compat_percent,
        "au_strict": rate.au_strict_percent,
        "samples": rate.samples,
        "samples_per_s": rate.samples_per_s_strict,
        "read_bytes": rate.read_bytes,
        "elapsed_s": rate.elapsed_s,
    }


def write_results(
    run: ActiveRun, stages: Stages, settings: RunSettings, workload: Workload, *, is_judged: bool
) -> TrainingResult:
    """Close the run once all ranks have written their last event; one that `is_judged` may have failed."""
    event_files.gather_events(run.folder, run.record.ranks)
    counter_files.gather_counters(run.folder)
    events = event_files.read_events(run.folder)
    # Without computation, every harness limit is near 0 and says nothing about this client.
    ceiling = None if workload.train.computation_time.is_zero else stages.ceiling
    train = phase_figures.compute_phase_figures(events, workload, ceiling=ceiling)
    if train is None:
        raise StorageError("The run left no completed epoch", uri=str(run.folder))
    if stages.waits is not None:
        train = replace(train, verdict=_judge_loader(stages.waits, train.verdict))
    evaluation = phase_figures.compute_phase_figures(events, workload, phase=StepPhase.EVAL)
    published_files.write_json(run.folder, run_folder.STAGES_FILE, stages.document())
    settings.write_dlio_files(
        run,
        workload,
        events=events,
        train=train,
        evaluation=evaluation,
        preparation=() if stages.waits else stages.sentences(),
    )
    result = TrainingResult(
        workload=workload.full_name,
        ranks=run.record.ranks,
        results_dir=str(run.folder),
        train=train,
        evaluation=evaluation,
        stages=stages,
    )
    run.finish(
        train=train,
        evaluation=evaluation,
        deliveries=stages.deliveries,
        workload=workload,
        is_right=not is_judged or result.verdict in phase_figures.HOLDING,
    )
    return result


def _judge_loader(waits: LoaderWaits, usual: BottleneckVerdict | None) -> BottleneckVerdict:
    """Return the verdict on a user's loader; the usual one treats the loader as storage."""
    if usual is not None and usual.bottleneck is Bottleneck.BARRIER:
        return usual
    kinds = {"storage": Bottleneck.STORAGE, "consumer": Bottleneck.NONE}
    return BottleneckVerdict(
        bottleneck=kinds.get(waits.bottleneck, Bottleneck.CLIENT_CPU),
        evidence=(f"{waits.sentence}.", *(usual.evidence[:1] if usual else ())),
    )
