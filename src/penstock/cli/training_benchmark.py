"""`penstock training run` and `sweep`: one measured run, and the search for the largest number of ranks.

`penstock submission run training` plans its runs with `plan_training`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.option_groups import (
    CLOSED_GATES,
    PAGE,
    SKIPPED_GATES,
    DataOptions,
    WorkloadOptions,
    inspect_gates,
    parse_overrides,
    write_page,
)
from penstock.cli.options import (
    arguments,
    command_line,
    flag,
    group,
    option,
    optional_argument,
    refuse_ignored,
    repeated,
    required,
    verb,
)
from penstock.cli.parsers import CONTENT_CHECK, DIVISION, FOLDER_URI, NAME, TEXT, TIME, URI, WORKLOAD, whole
from penstock.cli.rank_options import followed
from penstock.cli.run_reports import capture_training_output, reconciliation_notes, view_training
from penstock.cli.submission_options import ResultOptions, open_session
from penstock.cli.terminal import Terminal, bold, table
from penstock.cluster.comm import Comm
from penstock.cluster.gates.gate_model import Gate, PreflightRequest
from penstock.environment import process_environment
from penstock.errors import UsageError
from penstock.submission.tree_layout import Benchmark
from penstock.workload import entry_points, mlperf_divisions
from penstock.workload.shipped_catalog import families

if TYPE_CHECKING:
    from penstock.bench.epoch_order import Remainder
    from penstock.bench.loader.loader_protocol import ContentCheck
    from penstock.bench.training.training_files import OpenFormat
    from penstock.bench.training.training_result import TrainingResult
    from penstock.bench.training.training_run import TrainingRequest
    from penstock.workflows.submission_results import ResultWriter

_OWN = "Your own loader"
_NOT_OWN = (
    "--submission", "--system", "--closed", "--open", "--reader", "--threads", "--decode", "--remainder",
    "--check", "--checkpoints", "--skip-gate",
)  # fmt: skip
"""Options of `training run` that do not apply to a loader of the user's own."""


@dataclass(frozen=True, kw_only=True)
class _MaybeWorkload(WorkloadOptions):
    """A workload; not required with the user's own loader."""

    name: str = optional_argument(
        "[WORKLOAD]",
        WORKLOAD,
        "Shipped workload (see `penstock workloads`) or a YAML file; optional with your own loader.",
        default="",
    )


@dataclass(frozen=True, kw_only=True)
class _MaybeData(DataOptions):
    """The location of a data set; not required with the user's own loader."""

    uri: str = option(
        "--data",
        URI,
        "Data set: a directory, direct:///directory or s3://bucket/prefix. If you use your own loader, give "
        "the data it reads, so that it can be evicted from the page cache before each epoch.",
        default="",
    )


@dataclass(frozen=True, kw_only=True)
class TrainingRunOptions:
    """All options of a training run, with Penstock's loader or the user's own."""

    workload: WorkloadOptions = group(_MaybeWorkload)
    data: DataOptions = group(_MaybeData)
    results: ResultOptions = group(ResultOptions)
    loader: str | None = option(
        "--loader",
        NAME,
        "Data loader: native, pytorch, an extension's, or your own as MODULE:FACTORY (default: native).",
    )
    reader: str | None = option(
        "--reader", NAME, "Read all files with this reader, which an installed extension provides."
    )
    threads: int | None = option(
        "--threads",
        whole(1),
        "Maximum reads in flight per rank (default: the workload's reader.read_threads).",
    )
    seed: int | None = option(
        "--seed", whole(0), "Seed of the sample order (default: the workload's train.seed)."
    )
    remainder: Remainder | None = option(
        "--remainder",
        DIVISION,
        "If samples do not divide evenly among ranks, skip different ones each epoch (rotate), skip the last "
        "(drop), repeat the first (pad) or fail (error) (default: rotate).",
    )
    decode: bool = flag("--decode", "Decode samples, as real training does.")
    check: ContentCheck = option(
        "--check",
        CONTENT_CHECK,
        "Compare what is read with what was generated: never (off), 1 block in 16 (sample) or all (full).",
        default="off",
    )
    checkpoints: str | None = option(
        "--checkpoints", URI, "Save checkpoints here (default: the workload's checkpoint_folder)."
    )
    skipped_gates: tuple[Gate, ...] = SKIPPED_GATES
    batch_time_s: float | None = option(
        "--batch-time", TIME, "Emulated computation time of a step (default: WORKLOAD's, or 0).", panel=_OWN
    )
    step: str | None = option(
        "--step",
        NAME,
        "Your own training step, called with each batch (default: emulate computation).",
        metavar="MODULE:FUNCTION",
        panel=_OWN,
    )
    epochs: int | None = option(
        "--epochs", whole(1), "Number of epochs to run (default: WORKLOAD's, or 1).", panel=_OWN
    )
    max_steps: int | None = option(
        "--steps", whole(1), "Maximum number of batches per epoch (default: no limit).", panel=_OWN
    )
    batch_size: int | None = option(
        "--batch-size", whole(1), "Samples per batch (default: inferred from the batch).", panel=_OWN
    )
    trials: tuple[str, ...] = repeated(
        "--try",
        TEXT,
        "Run again with this change (workers=N, prefetch=N or persistent=1); compare with the first run.",
        panel=_OWN,
    )


@followed
def run(
    comm: Comm,
    terminal: Terminal,
    *,
    options: TrainingRunOptions = group(TrainingRunOptions),
) -> int:
    r"""Run a training workload with emulated computation and report accelerator utilization (AU).

    One rank is one accelerator. The data set is evicted from the page cache before each epoch. With --loader
    MODULE:FACTORY, your own loader runs unchanged, and the result shows why steps waited for it. Exits with 1
    if the AU is below the workload's metric.au.

    Examples:

      penstock training run unet3d --accelerator h100 --data direct:///data/unet3d --results runs --ranks 4

      penstock training run retinanet_b200 --data s3://bucket/retinanet --results runs --threads 32 --json

      penstock training run unet3d_b200 --data /data/unet3d --ranks 8 --closed --submission tree --system fast

      penstock training run unet3d --accelerator h100 --data /data/unet3d --results runs \
        --set workflow.checkpoint=true --set checkpoint.steps_between_checkpoints=10 --checkpoints /data/saves

      penstock training run --loader my_data:make_loader --batch-time 250ms --results runs --epochs 2

      penstock training run --loader my_data:make_loader --step my_model:train --results runs --try workers=8
    """
    if options.loader is not None and ":" in options.loader:
        return _exit_code(_run_own_loader(options, options.loader, comm=comm, terminal=terminal))
    for what, given in (
        ("argument 'WORKLOAD'", options.workload.name),
        ("option '--data'", options.data.uri),
    ):
        if not given:
            raise UsageError(
                f"Missing {what}", fix="Give it, or a loader of your own: --loader MODULE:FACTORY."
            )
    refuse_ignored(
        ("--batch-time", "--step", "--epochs", "--steps", "--batch-size", "--try"),
        "only a loader of your own takes it",
        fix="Add --loader MODULE:FACTORY; for Penstock's own loaders --set changes the workload.",
    )
    planned = plan_training(options, comm=comm, terminal=terminal)
    if planned is None:
        return CLOSED_GATES
    request, session = planned
    storage = options.data.opener(rank=comm.rank)()
    with terminal.progress() as progress:
        if session is None:
            from penstock.bench.training.training_run import train

            result = train(request, storage, comm=comm, progress=progress)
        else:
            from penstock.workflows.submission_results import add_run

            format_logs = partial(capture_training_output, remarks=request.remarks)
            result = add_run(session, request, storage, comm=comm, progress=progress, format_logs=format_logs)
    stages = result.stages
    terminal.notes((*stages.remarks, *reconciliation_notes(stages.deliveries), *stages.advice))
    terminal.result(result.document(), view_training(result))
    return _exit_code(result)


def _exit_code(result: TrainingResult) -> int:
    from penstock.results.phase_figures import HOLDING

    return 0 if result.verdict in HOLDING else 1


def plan_training(
    options: TrainingRunOptions, *, comm: Comm, terminal: Terminal, written_bytes: int = 0
) -> tuple[TrainingRequest, ResultWriter | None] | None:
    """Plan the requested run; return the plan, and the submission's result writer if the run is submitted.

    Prints the workload's remarks and inspects the gates. Returns None if a closed gate forbids the run.
    `written_bytes` is the amount that this rank will write to the data set's storage.
    """
    from penstock.bench.loader import loader_options
    from penstock.bench.training.training_checkpoints import plan_checkpoints
    from penstock.bench.training.training_run import TrainingRequest, choose_seed, list_unsupported
    from penstock.submission.authoring.preflight import locate_data

    loaded = options.workload.load(terminal)
    if not loaded.workload.workflow.checkpoint:
        refuse_ignored(
            ("--checkpoints",),
            "the workload saves no checkpoints",
            fix="Leave it out, or add --set workflow.checkpoint=true.",
        )
    loader, remainder = choose_reading(options)
    unsupported = list_unsupported(loaded.workload)
    terminal.notes(unsupported)
    workload = loaded.workload
    series = options.results.find_series(benchmark=Benchmark.TRAINING, model=workload.name)
    located = None
    if series is not None:
        located = locate_data(workload, options.data.uri)
        paths = [tuple(key.split(".")) for key in located.changes]
        mlperf_divisions.require_allowed(series.division, paths, workload=workload.name)
        workload = located.workload
    environment = process_environment()
    inspection = inspect_gates(
        PreflightRequest(
            environment=environment,
            uri=options.data.uri,
            reopen=options.data.opener(rank=comm.rank, is_traced=False),
            results=options.results.folder,
            results_option=options.results.folder_option,
            written_bytes=written_bytes,
        ),
        options.skipped_gates,
        is_strict=options.results.rules.division is not None,
        comm=comm,
        terminal=terminal,
    )
    if inspection.preflight.is_stopped:
        return None
    reader: OpenFormat | None = None
    if options.reader is not None:
        reader = entry_points.load_extension(entry_points.Extension.READER, options.reader, where="--reader")
    request = TrainingRequest(
        workload=workload,
        results=options.results.folder,
        seed=choose_seed(comm, workload, options.seed),
        division=DIVISION(remainder),
        loader=loader_options(loader, workload, options.threads),
        reopen=options.data.opener(rank=comm.rank),
        decodes=options.decode,
        check=options.check,
        reader=reader,
        is_judged=True,
        command=command_line(),
        environment=environment,
        overrides=tuple(f"++workload.{text}" for text in options.workload.settings),
        remarks=(*loaded.remarks, *unsupported),
        checkpoints=plan_checkpoints(
            workload, options.checkpoints, num_ranks=comm.size, rank=comm.rank, environment=environment
        ),
        inspection=inspection,
    )
    if series is None or located is None:
        return request, None
    session = open_session(
        series,
        located,
        options.workload.settings,
        rehearsed_at=options.results.rehearsed_at,
        comm=comm,
    )
    return request, session


def choose_reading(options: TrainingRunOptions) -> tuple[str, str]:
    """Return the loader and the handling of remainders; refuse what the division forbids."""
    return mlperf_divisions.choose_reading(
        options.results.rules.division,
        options.workload.name,
        [override.path for override in parse_overrides(options.workload.settings)],
        families=families(),
        loader=options.loader,
        remainder=options.remainder.value if options.remainder else None,
    )


def _run_own_loader(
    options: TrainingRunOptions, name: str, *, comm: Comm, terminal: Terminal
) -> TrainingResult:
    """Run the user's loader, and print what its steps waited for."""
    from penstock.bench.own_loader.own_loader_run import OwnLoaderRequest, run_own_loader
    from penstock.bench.own_loader.user_code import DescribedLoader, load_user_code
    from penstock.bench.training.training_run import choose_seed
    from penstock.workload.load_workload import load_sections
    from penstock.workload.quantities import Duration

    refuse_ignored(_NOT_OWN, "a loader of your own does not take it")
    if not options.data.uri:
        refuse_ignored(
            ("--option",), "no storage is named", fix="Leave it out, or name the data with --data."
        )
    if not options.workload.name:
        refuse_ignored(("--accelerator",), "no workload is named", fix="Leave it out, or name a WORKLOAD.")
    if options.batch_time_s is not None and options.step is not None:
        raise UsageError("--batch-time and --step are mutually exclusive", fix="Give one of them.")
    settings = options.workload.settings
    if options.workload.name:
        workload = options.workload.load(terminal).workload
    else:  # the user gave only a loader, and maybe a step
        workload = load_sections(
            {}, name=name.replace(":", "."), source="--loader", overrides=parse_overrides(settings)
        ).workload
    train = workload.train
    if options.epochs is not None or not options.workload.name:
        train = replace(train, epochs=options.epochs or train.epochs)
    if options.batch_time_s is not None:
        train = replace(train, computation_time=Duration(mean_s=options.batch_time_s))
    workload = replace(workload, train=train)
    request = OwnLoaderRequest(
        results=options.results.folder,
        workload=workload,
        loader=DescribedLoader(name=name, step=options.step, batch_size=options.batch_size),
        factory=load_user_code(name, where="--loader"),
        step=load_user_code(options.step, where="--step") if options.step else None,
        max_steps=options.max_steps,
        seed=choose_seed(comm, workload, options.seed),
        data=options.data.opener(rank=comm.rank)() if options.data.uri else None,
        trials=options.trials,
        command=command_line(),
        environment=process_environment(),
        overrides=tuple(f"++workload.{text}" for text in settings),
    )
    with terminal.progress() as progress:
        result = run_own_loader(request, comm=comm, progress=progress)
    terminal.notes(result.stages.remarks)
    waits = result.stages.waits
    assert waits is not None
    # The answer comes first, then what every training run prints.
    answer = [bold(waits.sentence), *(f"  {title:<10}{text}" for title, text in waits.lines)]
    terminal.result(result.document(), [*answer, *view_training(result)])
    return result


@verb
def sweep(
    terminal: Terminal,
    *,
    workload: WorkloadOptions = group(WorkloadOptions),
    run_words: tuple[str, ...] = arguments(
        "[-- OPTIONS]", TEXT, "Options to pass to each `penstock training run`.", is_required=False
    ),
    data: DataOptions = group(DataOptions),
    results: str = required("--results", FOLDER_URI, "Create each run's directory below DIR."),
    max_accelerators: int = required("--most", whole(1), "Maximum number of accelerators to try."),
    page: Path | None = PAGE,
) -> int:
    """Find the largest number of accelerators that the storage can feed.

    Tries 1, 2, 4, ..., then numbers in between; each attempt is a complete run with its own results. Exits
    with 1 if the storage cannot feed even one accelerator.

    Examples:

      penstock training sweep unet3d --accelerator h100 --data /data/unet3d --results runs --most 16

      penstock training sweep retinanet_b200 --data /data/r --results runs --most 64 -- --hosts a:32,b:32
    """
    from penstock.workflows import accelerator_sweep

    own = {"--accelerator", "--data", "--json", "--ranks", "--results"}
    if twice := sorted(own & {word.partition("=")[0] for word in run_words}):
        raise UsageError(
            f"{' and '.join(twice)} would be ignored: the sweep sets it for each run",
            where="--",
            fix="Leave it out after --; before it, give --accelerator, --data, --results and --most.",
        )
    words = [workload.name, "--data", data.uri, "--results", results]
    words += ["--accelerator", workload.accelerator] if workload.accelerator else []
    words += [word for setting in workload.settings for word in ("--set", setting)]
    words += [word for name, value in data.storage for word in ("--option", f"{name}={value}")]
    fed, tries = accelerator_sweep.find_most_accelerators(
        accelerator_sweep.run_command([*words, *run_words]), most=max_accelerators
    )
    at_least, limit = accelerator_sweep.sum_up(fed, tries)
    document = {
        "accelerators": fed,
        "is_most": fed == max_accelerators,
        "fed_by_storage": at_least,
        "limit": limit,
        "tries": [asdict(attempt) for attempt in tries],
    }
    rows = accelerator_sweep.try_rows(tries)
    terminal.result(document, table(accelerator_sweep.say_answer(fed, tries), rows))
    write_page(page, lambda: accelerator_sweep.make_sweep_page(fed, tries, workload.name, data.uri), terminal)
    return 0 if fed else 1
