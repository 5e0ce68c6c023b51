"""Everything that DLIO leaves in its output folder, written from a finished run.

Place in the flow: the last act of a run, on rank 0; `[METRIC]` lines come back to whoever prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from penstock.results.dlio.ranks import rank_output, rank_per_epoch_stats
from penstock.results.dlio.run import checkpoint_sizes, dlio_date
from penstock.results.dlio.summary import metric_lines, summary
from penstock.results.durable import write_json, write_text
from penstock.results.events import Phase, SpanKind
from penstock.results.layout import SUMMARY_FILE
from penstock.results.spec import spec_values

if TYPE_CHECKING:
    from penstock.results.dlio.run import DlioRun
    from penstock.results.utilization import EpochRate
    from penstock.workload.spec import Workload

HYDRA_FOLDER: Final = ".hydra"


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraFacts:
    """What the sub-folder of configuration tells: DLIO's words, and where the run wrote.

    `overrides` are redacted words such as `++workload.dataset.num_files_train=42`. Without a `subfolder`
    ("") nothing of it is written.
    """

    subfolder: str = HYDRA_FOLDER
    workload_name: str
    overrides: Sequence[str] = ()
    working_folder: str
    run_folder: str


def write_dlio_files(
    folder: Path, run: DlioRun, hydra: HydraFacts, *, log_before: Sequence[str] = ()
) -> list[str]:
    """Write the whole set into `folder`; the `[METRIC]` lines, which are in the log as well.

    `log_before` are the log's lines about what was done before the run.
    """
    found = summary(run)
    lines = metric_lines(found)
    write_configuration(folder, run.workload, hydra)
    sizes = checkpoint_sizes(run.ranks)
    for rank in run.ranks:
        number = rank.clock.rank
        write_json(folder, f"{number}_output.json", rank_output(run, rank))
        write_json(folder, f"{number}_per_epoch_stats.json", rank_per_epoch_stats(rank, sizes))
    write_log(folder, run.workload, [*log_before, *_log(run, lines)])
    write_json(folder, SUMMARY_FILE, found)
    return lines


def write_configuration(folder: Path, workload: Workload, hydra: HydraFacts) -> None:
    """Write the sub-folder of configuration alone."""
    if hydra.subfolder:
        for name, text in _configuration(workload, hydra).items():
            write_text(folder / hydra.subfolder, name, text)


def write_log(folder: Path, workload: Workload, lines: Sequence[str]) -> None:
    """Write the log alone, under the name that the workload gives it."""
    write_text(folder, workload.output.log_file, "".join(f"{line}\n" for line in lines))


def log_line(moment: datetime, text: str) -> str:
    """One line of the log, as DLIO dates it."""
    return f"[OUTPUT] {dlio_date(moment)} {text}"


def _configuration(workload: Workload, hydra: HydraFacts) -> dict[str, str]:
    task = [f"workload={hydra.workload_name}", *hydra.overrides]
    tree = {
        "hydra": {
            "run": {"dir": hydra.run_folder},
            "mode": "RUN",
            "output_subdir": hydra.subfolder,
            "overrides": {
                "hydra": [f"hydra.run.dir={hydra.run_folder}", f"hydra.output_subdir={hydra.subfolder}"],
                "task": task,
            },
            "job": {"name": "main", "config_name": "config", "override_dirname": ",".join(sorted(task))},
            "runtime": {
                "cwd": hydra.working_folder,
                "output_dir": hydra.run_folder,
                "choices": {"workload": hydra.workload_name},
            },
        }
    }
    return {
        "config.yaml": _yaml({"workload": spec_values(workload)}),
        "overrides.yaml": _yaml(task),
        "hydra.yaml": _yaml(tree),
    }


def _log(run: DlioRun, lines: Sequence[str]) -> Iterator[str]:
    """What DLIO tells while it runs, told afterwards from rank 0's events."""
    first = run.ranks[0]
    yield log_line(run.started, f"Running with {len(run.ranks)} process(es)")
    for phase, title in ((Phase.TRAIN, "Training"), (Phase.EVAL, "Evaluation")):
        figures = run.figures(phase)
        for epoch in figures.epochs if figures else ():
            blocks = first.blocks(phase, epoch.epoch)
            date = first.clock.date(blocks[-1].end_ns)
            num_steps = sum(len(block.steps) for block in blocks)
            yield from (log_line(date, text) for text in _epoch_texts(epoch, title, num_steps))
    for kind, verb in ((SpanKind.SAVE, "Saved"), (SpanKind.LOAD, "Loaded")):
        for span in first.spans_of(kind):
            date, elapsed_s = first.clock.date(span.end_ns), (span.end_ns - span.start_ns) / 1e9
            yield log_line(
                date, f"{verb} the checkpoint of epoch {span.epoch}, step {span.step} in {elapsed_s:.4f} s"
            )
    yield from lines


def _epoch_texts(epoch: EpochRate, title: str, num_steps: int) -> tuple[str, ...]:
    return (
        f"Ending epoch {epoch.epoch} [{title}] - {num_steps} steps completed in {epoch.elapsed_s:.2f} s",
        f"Epoch {epoch.epoch} [{title}] Accelerator Utilization [AU] (%): {epoch.au_compat_percent:.4f}",
        f"Epoch {epoch.epoch} [{title}] Throughput (samples/second): {epoch.samples_per_s_compat:.4f}",
    )


def _yaml(document: Any) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False)
    return text
