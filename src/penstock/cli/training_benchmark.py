"""`penstock training run` and `sweep`: one measured run, and the search for the largest number of ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from penstock.cli.option_groups import CLOSED_GATES, DataOptions, PageOption, WorkloadOptions
from penstock.cli.options import arguments, group, required, verb
from penstock.cli.own_loader import RunOptions, run_users_loader
from penstock.cli.parsers import FOLDER_URI, TEXT, whole
from penstock.cli.rank_options import ranked
from penstock.cli.run_reports import view_training
from penstock.cli.terminal import Terminal, table
from penstock.cli.training_request import plan_training, run_training
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from penstock.reports.report import Report
    from penstock.workflows.accelerator_sweep import SweepResult


@ranked(RunOptions, is_followed=True)
def run(options: RunOptions, comm: Comm, terminal: Terminal) -> int:
    r"""Run a training workload with emulated computation and report accelerator utilization (AU).

    One rank is one accelerator. The data set is evicted from the page cache before each epoch. With --loader
    MODULE:FACTORY the loader is your own, as it is: the result says where each second of waiting goes.

    Examples:

      penstock training run unet3d --accelerator h100 --data direct:///data/unet3d --results runs --ranks 4

      penstock training run retinanet_b200 --data s3://bucket/retinanet --results runs --threads 32 --json

      penstock training run unet3d_b200 --data /data/unet3d --ranks 8 --closed --submission tree --system fast

      penstock training run unet3d --accelerator h100 --data /data/unet3d --results runs \
        --set workflow.checkpoint=true --set checkpoint.steps_between_checkpoints=10 --checkpoints /data/saves

      penstock training run --loader my_data:make_loader --batch-time 250ms --results runs --epochs 2

      penstock training run --loader my_data:make_loader --step my_model:train --results runs --try workers=8
    """
    if options.has_own_loader:
        run_users_loader(options, comm=comm, terminal=terminal)
        return 0
    plan = plan_training(options, comm=comm, terminal=terminal)
    if plan.is_stopped:
        return CLOSED_GATES
    result = run_training(plan, comm=comm, terminal=terminal)
    terminal.result(result.document(), view_training(result))
    return 0


@dataclass(frozen=True, kw_only=True)
class _SweepOptions:
    workload: WorkloadOptions = group(WorkloadOptions)
    run_words: tuple[str, ...] = arguments(
        "[-- OPTIONS]", TEXT, "More options for each `penstock training run`.", is_required=False
    )
    data: DataOptions = group(DataOptions)
    results: str = required("--results", FOLDER_URI, "Directory below which each run has its own.")
    max_accelerators: int = required("--most", whole(1), "Maximum number of accelerators to try.")
    page: PageOption = group(PageOption)


@verb(_SweepOptions)
def sweep(options: _SweepOptions, terminal: Terminal) -> int:
    """Find the largest number of accelerators that the storage feeds: 1, 2, 4, ..., then in between.

    Each attempt is a whole run with results of its own. Exits with 1 if not even one accelerator is fed.

    Examples:

      penstock training sweep unet3d --accelerator h100 --data /data/unet3d --results runs --most 16

      penstock training sweep retinanet_b200 --data /data/r --results runs --most 64 -- --hosts a:32,b:32
    """
    from penstock.workflows import accelerator_sweep

    result = accelerator_sweep.find_most_accelerators(
        accelerator_sweep.run_command(_run_words(options)), most=options.max_accelerators
    )
    rows = [
        {
            "accelerators": str(attempt.accelerators),
            "AU %": f"{attempt.au_compat:.2f}",
            "samples/s": f"{attempt.samples_per_s:,.1f}",
            "fed": "yes" if attempt.meets_threshold else "no",
            "limit": attempt.bottleneck or "-",
        }
        for attempt in result.tries
    ]
    options.page.write(lambda: _draw_sweep(result, options), terminal)
    more = ", and perhaps more" if result.is_most else ""
    terminal.result(asdict(result), table(f"{result.accelerators} accelerators are fed{more}", rows))
    return 0 if result.accelerators else 1


def _draw_sweep(result: SweepResult, options: _SweepOptions) -> Report:
    from penstock.workflows.accelerator_sweep import make_sweep_page

    return make_sweep_page(result, options.workload.name, options.data.uri)


def _run_words(options: _SweepOptions) -> list[str]:
    workload, data = options.workload, options.data
    words = [workload.name, "--data", data.uri, "--results", options.results]
    words += ["--accelerator", workload.accelerator] if workload.accelerator else []
    words += [word for setting in workload.settings for word in ("--set", setting)]
    words += [word for name, value in data.storage.assignments for word in ("--option", f"{name}={value}")]
    return [*words, *options.run_words]
