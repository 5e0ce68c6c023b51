"""`penstock checkpoint study`: the same checkpoints by eight configurations of levels, traced."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from penstock.bench.state_layout import StateLayout
from penstock.cli.option_groups import load_model, plan_model_layout
from penstock.cli.options import command_line, option, repeated, required
from penstock.cli.parsers import FOLDER, RATE, SCALE, SETTING, TEXT, TIME, choice, several, whole
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal, TextTable, View
from penstock.cli.trace_options import comparison_document, view_answer, view_findings
from penstock.cluster.comm import Comm
from penstock.environment import process_environment
from penstock.units import format_bytes, format_seconds
from penstock.workflows.levels_study.study_plan import SaveMode, StudyRequest, default_scale
from penstock.workload.load_workload import CheckpointModel

if TYPE_CHECKING:
    from penstock.workflows.levels_study.study import StudyResult
    from penstock.workflows.levels_study.study_records import RowRecord

DEFAULT_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class _StudyOptions:
    model: str = option(
        "--model",
        TEXT,
        "Save the state of this model, shipped (see `penstock checkpoint models`) or in a YAML file.",
        default="llama3-8b",
        metavar="MODEL",
    )
    settings: tuple[str, ...] = repeated("--set", SETTING, "Change a value, e.g. model.num_layers=4.")
    fast: Path = required("--fast", FOLDER, "Put caches into this directory, on a node's own disk.")
    slow: Path = required(
        "--slow", FOLDER, "Put durable checkpoints into this directory, shared by all nodes."
    )
    out: Path = required(
        "--out",
        FOLDER,
        "Write traces, runs.yaml and the report into DIR; finished rows in it are kept.",
        short="-o",
    )
    scale: Fraction | None = option(
        "--scale", SCALE, "Write only this share of every file (default: 512 MiB a checkpoint)."
    )
    slow_bytes_per_s: float | None = option(
        "--slow-bandwidth", RATE, "Limit the bandwidth of --slow, of all ranks together, e.g. 1GiB/s."
    )
    configurations: tuple[tuple[str, ...], ...] = repeated(
        "--configurations", several(TEXT), "Run only these configurations (default: all eight).", short="-c"
    )
    num_checkpoints: int = option(
        "--checkpoints", whole(1), "Save this many checkpoints in each configuration.", default="6"
    )
    num_steps: int = option(
        "--steps", whole(0), "Emulate this many training steps after each checkpoint.", default="10"
    )
    step_s: float = option(
        "--step-time", TIME, "Emulate a computation of this time in each step.", default="100ms"
    )
    saves: str = option(
        "--saves",
        choice("blocking", "background"),
        "Let training wait for the commit, or only for the copy.",
        default="blocking",
    )
    parity_every: int = option(
        "--parity-every",
        whole(2),
        "Protect every N-th checkpoint in the configuration interval_flushed.",
        default="3",
    )


@ranked(_StudyOptions, default_ranks=DEFAULT_RANKS)
def study(options: _StudyOptions, comm: Comm, terminal: Terminal) -> None:
    r"""Save the same checkpoints by eight configurations of levels, trace each, and compare them.

    direct_slow and direct_fast write plain files; bypass saves past the cache; single and cached save to it,
    in one copy and protected by parity; single_flushed and cached_flushed also flush in the background, and
    interval_flushed protects only some. On one machine each rank (4, unless --ranks says otherwise) plays a
    host with a cache of its own. Run the same command again to continue after an interruption.

    Examples:

      penstock checkpoint study --fast /local/ssd --slow /pfs/me --out study

      penstock checkpoint study --model llama3-8b --scale 1/1000 --fast /local/ssd --slow /pfs/me \
        --slow-bandwidth 256MiB/s -c direct_slow,bypass,cached_flushed --out study --json
    """
    from penstock.workflows.levels_study.study import run_study

    model = load_model(options.model, options.settings)
    layout, scale = _scaled_layout(model, comm.size, options.scale)
    request = StudyRequest(
        model=model.name,
        layout=layout,
        scale=scale,
        fast=options.fast.resolve(),
        slow=options.slow.resolve(),
        out=options.out.resolve(),
        names=tuple(name for names in options.configurations for name in names if name),
        slow_bytes_per_s=options.slow_bytes_per_s,
        num_checkpoints=options.num_checkpoints,
        num_steps=options.num_steps,
        step_s=options.step_s,
        saving=SaveMode(options.saves),
        parity_every=options.parity_every,
    )
    with terminal.progress() as progress:
        result = run_study(
            request,
            comm=comm,
            environment=process_environment(),
            command=command_line(),
            progress=progress,
        )
    if result is not None:  # on rank 0
        for path in result.report:
            terminal.note(f"wrote {path}")
        terminal.result(_document(result), _view(result))


def _scaled_layout(
    model: CheckpointModel, ranks: int, scale: Fraction | None
) -> tuple[StateLayout, Fraction]:
    """The model's files on these ranks, and the share of their bytes that is written."""
    full = plan_model_layout(model, ranks=ranks, scale=Fraction(1), is_subset=False)
    share = default_scale(full.total_bytes) if scale is None else scale
    return full.scaled(share), share


def _document(result: StudyResult) -> dict[str, Any]:
    return {
        "study": result.record.identity,
        "rows": [row.model_dump() for row in result.rows],
        "comparison": comparison_document(result.compared),
    }


def _view(result: StudyResult) -> View:
    identity = result.record.identity
    size = format_bytes(float(identity["checkpoint_bytes"]))
    title = (
        f"{identity['checkpoints']} checkpoints of {identity['model']}, {size} on {identity['ranks']} ranks"
    )
    yield TextTable(title, [_row(row) for row in result.rows])
    for name in ("t1_measures", "t2"):
        yield from view_answer(result.compared.table(name))
    yield from view_findings(result.compared)
    yield "All tables: report.html in --out, or --json."


def _row(row: RowRecord) -> dict[str, str]:
    return {
        "row": row.name,
        "training waited": format_seconds(sum(row.blocked_s)),
        "for one": format_seconds(median(row.blocked_s)),
        "drain": format_seconds(row.drain_s),
        "took": format_seconds(row.took_s),
    }
