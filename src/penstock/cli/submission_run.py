"""`penstock submission run training` and `checkpointing`: every run that a benchmark result needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from penstock.cli import option_groups
from penstock.cli.checkpoint_request import CheckpointRunOptions, run_checkpoint_benchmark
from penstock.cli.options import argument, flag, group, option, required
from penstock.cli.parsers import MODEL, TEXT, URI, choice, whole
from penstock.cli.rank_options import ranked
from penstock.cli.run_reports import capture_training_output, view_checkpoints
from penstock.cli.submission_options import ResultOptions, TreeOptions
from penstock.cli.terminal import Terminal, TextTable, View
from penstock.cli.training_request import PlannedTraining, TrainingRunOptions, plan_training
from penstock.cluster.comm import Comm
from penstock.errors import UsageError
from penstock.submission.authoring import preflight
from penstock.submission.edition import load_edition
from penstock.submission.tree_layout import Benchmark, SubmissionPhase

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
    from penstock.results.provenance import HostFacts
    from penstock.submission.authoring.result_dir import RunSeries
    from penstock.submission.authoring.run_sequence import RunSequence
    from penstock.workload.sizing import DatasetSizing
    from penstock.workload.spec import Workload

WRONG_BYTES = 1
REHEARSED_STEPS = 2
"""Steps of each accelerator in an epoch of a rehearsal, at least: the first one counts in no figure."""


@dataclass(frozen=True, kw_only=True)
class CheckpointingOptions:
    """All options of a checkpointing result."""

    model: str = argument("MODEL", MODEL, "Shipped model (see `penstock checkpoint models`) or a YAML file.")
    destination: str = required(
        "--to", URI, "Save checkpoints here: a directory, direct:///directory or s3://bucket/prefix."
    )
    storage: option_groups.BackendOptions = group(option_groups.BackendOptions)
    target: TreeOptions = group(TreeOptions)
    accelerator: str = required(
        "--accelerator", TEXT, "Name the accelerator whose memory is saved: b200 or mi355."
    )
    writes: int = option("--writes", whole(0), "Write this many checkpoints.", default="10")
    reads: int = option("--reads", whole(0), "Read back this many checkpoints.", default="10")
    is_subset: bool = flag("--subset", "Run on fewer ranks than the model needs; they carry a subset of it.")
    gates: option_groups.GateOptions = group(option_groups.GateOptions)


@ranked(CheckpointingOptions, is_followed=True)
def checkpointing(options: CheckpointingOptions, comm: Comm, terminal: Terminal) -> int:
    r"""Run a whole checkpointing result: write ten checkpoints and read ten back.

    Caches are evicted, and verified to be cold, before each read. If the storage is mounted by other hosts
    between writing and reading, run this twice, with `--reads 0` and then with `--writes 0`. A closed
    preflight gate ends the command with exit code 3.

    Examples:

      penstock submission run checkpointing llama3-8b --accelerator b200 --to /mnt/ckpt --ranks 8 --closed \
        --submission ~/results --system fast
    """
    missing = find_missing_checkpoints(options, comm=comm)
    if not missing["writes"] and not missing["reads"]:
        terminal.note("All checkpoints were written and read already.")
        return 0
    result = run_checkpointing_result(options, comm=comm, terminal=terminal)
    if result is None:
        return option_groups.CLOSED_GATES
    terminal.result(result.document(), view_checkpoints(result))
    return 0 if result.is_right else WRONG_BYTES


def find_missing_checkpoints(options: CheckpointingOptions, *, comm: Comm) -> Mapping[str, int]:
    """The numbers of writes and reads that the result lacks; the same on all ranks. Collective."""
    from penstock.submission.authoring.run_sequence import missing_checkpoints, read_series_state

    series = ResultOptions.in_tree(options.target).find_series(
        benchmark=Benchmark.CHECKPOINTING, model=options.model
    )
    assert series is not None
    missing = None if comm.rank else missing_checkpoints(read_series_state(series), load_edition("v3.0"))
    shared = comm.broadcast(missing, awaiting="rank 0 to read the tree")
    assert shared is not None
    return shared


def run_checkpointing_result(
    options: CheckpointingOptions, *, comm: Comm, terminal: Terminal
) -> CheckpointResult | None:
    """Write and read the checkpoints of a result; None if a closed gate stopped it."""
    return run_checkpoint_benchmark(
        CheckpointRunOptions(
            model=option_groups.ModelOptions(name=options.model),
            destination=options.destination,
            storage=options.storage,
            results=ResultOptions.in_tree(options.target),
            writes=options.writes,
            reads=options.reads,
            is_subset=options.is_subset,
            gates=options.gates,
            accelerator=options.accelerator,
            scale=options.target.rehearsed_at or Fraction(1),
        ),
        comm=comm,
        terminal=terminal,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """All options of a training result."""

    workload: option_groups.WorkloadOptions = group(option_groups.WorkloadOptions)
    data: option_groups.DataOptions = group(option_groups.DataOptions)
    target: TreeOptions = group(TreeOptions)
    only: str | None = option(
        "--only",
        choice("datagen", "run"),
        "Run only this phase: datagen (on any number of ranks) or one run (default: all phases).",
    )
    gates: option_groups.GateOptions = group(option_groups.GateOptions)


@ranked(TrainingOptions, is_followed=True)
def training(options: TrainingOptions, comm: Comm, terminal: Terminal) -> int:
    r"""Run a whole training result: size and generate the data set, then a warm-up and five runs.

    One rank is one accelerator. The data set is as large as the memory of all hosts requires. Runs follow one
    another without a pause; after Ctrl-C or a failure, run the same command again to continue, as long as the
    rules let the finished runs count. A closed preflight gate ends the command with exit code 3.

    Examples:

      penstock submission run training unet3d --accelerator b200 --data /mnt/data --ranks 8 --hosts a:4,b:4 \
        --closed --submission ~/results --system fast
    """
    made = make_training_result(options, comm=comm, terminal=terminal)
    if made is None:
        return option_groups.CLOSED_GATES
    terminal.result(_document(made), _view(made))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeTraining:
    """The present part of a training result, and the size that its data set has to have."""

    workload: Workload
    series: RunSeries
    sequence: RunSequence
    required_size: DatasetSizing


def make_training_result(options: TrainingOptions, *, comm: Comm, terminal: Terminal) -> MadeTraining | None:
    """Make what a training result lacks; None if a closed gate stopped it. Collective."""
    from penstock.results.provenance import read_host, unique_hosts
    from penstock.workload import sizing

    hosts = unique_hosts(comm.gather(read_host(comm.host), awaiting="facts of all hosts"))
    requested, edition = _load_workload(options.workload), load_edition("v3.0")
    results = ResultOptions.in_tree(options.target)
    series = results.find_series(benchmark=Benchmark.TRAINING, model=requested.name)
    assert series is not None
    breaches = preflight.training_breaches(
        edition,
        series,
        accelerator=requested.accelerator,
        # Data may be generated on any number of ranks.
        num_accelerators=comm.size if options.only != "datagen" else len(hosts),
        num_hosts=len(hosts),
        data=options.data.uri,
    )
    preflight.require_none(breaches, f"edition {edition.edition}")
    request = sizing.make_sizing_request(
        requested, num_accelerators=comm.size, host_memory_bytes=[host.memory_bytes for host in hosts]
    )
    required_size = sizing.size_dataset(request)
    sized = options.workload
    if options.only != "datagen":
        sized = _sized_workload(options, series, requested, required_size)
    workload = _load_workload(sized)
    missing_bytes = comm.broadcast(
        None if comm.rank else _count_missing_bytes(workload, series, options.data),
        awaiting="rank 0 to look at the data set",
    )
    assert missing_bytes is not None
    plan = plan_training(
        TrainingRunOptions(workload=sized, data=options.data, results=results, gates=options.gates),
        comm=comm,
        terminal=terminal,
        written_bytes=0 if comm.rank else missing_bytes,
    )
    if plan.is_stopped:
        return None
    sequence = _make_sequence(plan, options, hosts, comm=comm, terminal=terminal)
    return MadeTraining(workload=workload, series=series, sequence=sequence, required_size=required_size)


def _load_workload(options: option_groups.WorkloadOptions) -> Workload:
    """The workload without its remarks, which `plan_training` prints."""
    from penstock.workload.load_workload import load

    overrides = option_groups.parse_overrides(options.settings)
    return load(options.name, accelerator=options.accelerator, overrides=overrides).workload


def _count_missing_bytes(workload: Workload, series: RunSeries, data: option_groups.DataOptions) -> int:
    """The bytes still to be generated into a local folder; object services report no free space."""
    from penstock.dataset.generate import missing_bytes
    from penstock.storage.capabilities import find_local_root
    from penstock.submission.authoring.run_sequence import read_series_state
    from penstock.workflows.submission.draft_training_result import dataset_recipe

    storage = data.opener(rank=0, is_traced=False)()
    if read_series_state(series).datagens or find_local_root(storage) is None:
        return 0
    return missing_bytes(dataset_recipe(workload), storage)


def _sized_workload(
    options: TrainingOptions, series: RunSeries, workload: Workload, required_size: DatasetSizing
) -> option_groups.WorkloadOptions:
    """The workload with a data set that is large enough; an existing one that is large enough is kept."""
    from penstock.submission.authoring.run_sequence import read_series_state

    overrides = option_groups.parse_overrides(options.workload.settings)
    request, scale = required_size.request, options.target.rehearsed_at
    if any(override.path == ("dataset", "num_files_train") for override in overrides):
        num_files = workload.dataset.num_files_train  # a number that the user gives is never replaced
    elif scale is not None:  # a share of the required files, but enough for some steps of all accelerators
        least = Fraction(REHEARSED_STEPS * request.batch_size * request.num_accelerators)
        num_files = max(ceil(scale * required_size.min_files), ceil(least / request.num_samples_per_file))
    else:
        earlier = [result_dir.num_files for result_dir in read_series_state(series).datasizes]
        enough = [number for number in earlier if required_size.check_files(number)[0]]
        num_files = enough[-1] if enough else required_size.min_files
    is_enough, comparison = required_size.check_files(num_files)
    if scale is None and not is_enough:
        raise UsageError(
            f"The data set is too small (rule 3.1.2): {comparison}; {'; '.join(required_size.proof)}",
            where="dataset.num_files_train",
            fix="Leave it out: the command then chooses the smallest size that is enough.",
        )
    settings = [*options.workload.settings, f"dataset.num_files_train={num_files}"]
    if required_size.num_subfolders and not workload.dataset.num_subfolders_train:
        settings.append(f"dataset.num_subfolders_train={required_size.num_subfolders}")
    return replace(options.workload, settings=tuple(settings))


def _make_sequence(
    plan: PlannedTraining,
    options: TrainingOptions,
    hosts: Sequence[HostFacts],
    *,
    comm: Comm,
    terminal: Terminal,
) -> RunSequence:
    from penstock.workflows.submission.draft_training_result import (
        TrainingResultPlan,
        make_part,
        make_training,
    )
    from penstock.workflows.submission.result_draft import RunObserver

    session = plan.session
    assert session is not None
    result_plan = TrainingResultPlan(
        request=plan.request,
        edition=load_edition("v3.0"),
        num_accelerators=comm.size,
        hosts=hosts,
        # At a small scale the start of an epoch counts more than it would in earnest.
        stops_below_minimum=options.target.rehearsed_at is None,
    )
    with terminal.progress() as progress:
        observer = RunObserver(
            progress=progress,
            note=terminal.note,
            format_logs=partial(capture_training_output, remarks=plan.request.remarks),
        )
        storage = plan.open_storage()
        if options.only is None:
            return make_training(session, result_plan, storage, comm=comm, observer=observer)
        phase = SubmissionPhase(options.only)
        return make_part(session, result_plan, storage, phase=phase, comm=comm, observer=observer)


def _document(made: MadeTraining) -> dict[str, Any]:
    series, sequence = made.series, made.sequence
    return {
        "folder": str(series.tree.root / series.folder),
        "is_complete": sequence.is_complete,
        "runs": [
            {"folder": str(result_dir.folder), "duration_s": result_dir.duration.total_seconds()}
            for result_dir in sequence.counted
        ],
    }


def _view(made: MadeTraining) -> View:
    series, sequence = made.series, made.sequence
    rows = [
        {"run": run.folder.name, "took": f"{run.duration.total_seconds():,.0f} s"} for run in sequence.counted
    ]
    state = "complete" if sequence.is_complete else f"{len(sequence.phases)} runs are missing"
    yield TextTable(f"{series.model} on {series.system}: {state}", rows)
    next_verb = "check" if sequence.is_complete else "status"
    yield f"Next: penstock submission {next_verb} {series.tree.root}"
