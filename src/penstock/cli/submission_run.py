"""`penstock submission run training` and `checkpointing`: every run that a benchmark result needs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from penstock.cli.checkpoint_benchmark import (
    MODEL_NAME,
    WRONG_BYTES,
    CheckpointRunOptions,
    run_checkpoint_benchmark,
)
from penstock.cli.option_groups import (
    CLOSED_GATES,
    SKIPPED_GATES,
    STORAGE,
    DataOptions,
    WorkloadOptions,
    parse_overrides,
)
from penstock.cli.options import flag, group, option, required
from penstock.cli.parsers import TEXT, URI, choice, whole
from penstock.cli.rank_options import followed
from penstock.cli.run_reports import capture_training_output, view_checkpoints
from penstock.cli.submission_options import TreeOptions
from penstock.cli.terminal import Terminal, table
from penstock.cli.training_benchmark import TrainingRunOptions, choose_reading, plan_training
from penstock.cluster.comm import Comm, held_on_rank0
from penstock.cluster.gates.gate_model import Gate
from penstock.errors import UsageError
from penstock.submission.authoring import preflight
from penstock.submission.edition import load_edition
from penstock.submission.tree_layout import Benchmark, SubmissionPhase

if TYPE_CHECKING:
    from penstock.results.provenance import HostFacts
    from penstock.submission.authoring.owned_tree import RunSeries
    from penstock.submission.authoring.run_sequence import RunSequence
    from penstock.workload.sizing import DatasetSizing
    from penstock.workload.spec import Workload

REHEARSED_STEPS = 2
"""The fewest steps per accelerator and epoch of a rehearsal, because no figure includes the first step."""


@followed
def checkpointing(
    comm: Comm,
    terminal: Terminal,
    *,
    model: str = MODEL_NAME,
    destination: str = required(
        "--to", URI, "Location of the checkpoints: a directory, direct:///directory or s3://bucket/prefix."
    ),
    storage: tuple[tuple[str, str], ...] = STORAGE,
    target: TreeOptions = group(TreeOptions),
    accelerator: str = required(
        "--accelerator", TEXT, "Accelerator that each rank stands for: b200 or mi355."
    ),
    writes: int = option("--writes", whole(0), "Write this many checkpoints.", default="10"),
    reads: int = option("--reads", whole(0), "Read back this many checkpoints.", default="10"),
    is_subset: bool = flag("--subset", "With --ranks N, write only the files of the model's first N ranks."),
    skipped_gates: tuple[Gate, ...] = SKIPPED_GATES,
) -> int:
    r"""Run a whole checkpointing result: write ten checkpoints and read ten back.

    Before each read, caches are evicted and verified to be cold. If you remount the storage on other hosts
    between writing and reading, run the command twice: with `--reads 0`, then with `--writes 0`. If a
    preflight check does not pass, the command exits with 3.

    Examples:

      penstock submission run checkpointing llama3-8b --accelerator b200 --to /mnt/ckpt --ranks 8 --closed \
        --submission ~/results --system fast
    """
    missing = find_missing_checkpoints(target, model, comm=comm)
    if not missing["writes"] and not missing["reads"]:
        terminal.note("All checkpoints are already written and read.")
        return 0
    result = run_checkpoint_benchmark(
        CheckpointRunOptions(
            model=model,
            destination=destination,
            storage=storage,
            results=target,
            writes=writes,
            reads=reads,
            is_subset=is_subset,
            skipped_gates=skipped_gates,
            accelerator=accelerator,
        ),
        comm=comm,
        terminal=terminal,
    )
    if result is None:
        return CLOSED_GATES
    terminal.result(result.document(), view_checkpoints(result))
    return 0 if result.is_right else WRONG_BYTES


def find_missing_checkpoints(target: TreeOptions, model: str, *, comm: Comm) -> Mapping[str, int]:
    """Return how many writes and reads the result lacks, the same on all ranks. Collective."""
    from penstock.submission.authoring.run_sequence import missing_checkpoints, read_series_state

    series = target.find_series(benchmark=Benchmark.CHECKPOINTING, model=model)
    assert series is not None
    missing = None if comm.rank else missing_checkpoints(read_series_state(series), load_edition("v3.0"))
    shared = comm.broadcast(missing, awaiting="rank 0 to read the tree")
    assert shared is not None
    return shared


@followed
def training(
    comm: Comm,
    terminal: Terminal,
    *,
    workload: WorkloadOptions = group(WorkloadOptions),
    data: DataOptions = group(DataOptions),
    target: TreeOptions = group(TreeOptions),
    only: str | None = option(
        "--only",
        choice("datagen", "run"),
        "Run only one phase (default: all): datagen (on any number of ranks) or run (a single run).",
    ),
    skipped_gates: tuple[Gate, ...] = SKIPPED_GATES,
) -> int:
    r"""Run a whole training result: size and generate the data set, then a warm-up and five runs.

    One rank is one accelerator. The data set is sized from the total memory of all hosts. Runs follow one
    another without a pause. After Ctrl-C or a failure, run the same command again to continue, as long as the
    rules still accept the finished runs. If a preflight check does not pass, the command exits with 3.

    Examples:

      penstock submission run training unet3d --accelerator b200 --data /mnt/data --ranks 8 --hosts a:4,b:4 \
        --closed --submission ~/results --system fast
    """
    options = TrainingRunOptions(workload=workload, data=data, results=target, skipped_gates=skipped_gates)
    made = make_training_result(options, only=only, comm=comm, terminal=terminal)
    if made is None:
        return CLOSED_GATES
    series, sequence = made.series, made.sequence
    is_complete = not sequence.phases
    document = {
        "folder": str(series.tree.root / series.folder),
        "is_complete": is_complete,
        "runs": [
            {"folder": str(run.folder), "duration_s": run.duration.total_seconds()}
            for run in sequence.counted
        ],
    }
    rows = [
        {"run": run.folder.name, "took": f"{run.duration.total_seconds():,.0f} s"} for run in sequence.counted
    ]
    state = "complete" if is_complete else f"{len(sequence.phases)} runs are missing"
    next_verb = "check" if is_complete else "status"
    view = [
        *table(f"{series.model} on {series.system}: {state}", rows),
        f"Next: penstock submission {next_verb} {shlex.quote(str(series.tree.root))}",
    ]
    terminal.result(document, view)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeTraining:
    """A training result in its present state, and the size that its data set must have."""

    workload: Workload
    series: RunSeries
    sequence: RunSequence
    required_size: DatasetSizing


def make_training_result(
    options: TrainingRunOptions, *, only: str | None = None, comm: Comm, terminal: Terminal
) -> MadeTraining | None:
    """Make the missing parts of a training result; return None if a closed gate stopped it. Collective."""
    from penstock.dataset.generate import missing_bytes
    from penstock.storage.capabilities import find_local_root
    from penstock.storage.volumes import locked_folder
    from penstock.submission.authoring.run_sequence import read_series_state
    from penstock.workflows.submission_results import TrainingSequence, dataset_recipe
    from penstock.workload import sizing

    silent = replace(terminal, speaks=False)  # `plan_training` prints the workload's remarks
    rehearsed_at = options.results.rehearsed_at
    requested, hosts = require_valid_training(options, only=only, comm=comm, terminal=silent)
    edition = load_edition("v3.0")
    series = options.results.find_series(benchmark=Benchmark.TRAINING, model=requested.name)
    assert series is not None
    required_size = sizing.size_dataset(
        sizing.make_sizing_request(
            requested, num_accelerators=comm.size, host_memory_bytes=[host.memory_bytes for host in hosts]
        )
    )
    if only != "datagen":
        settings = _sized_settings(options, series, requested, required_size)
        options = replace(options, workload=replace(options.workload, settings=settings))
    workload = options.workload.load(silent).workload
    still_missing = 0
    if comm.rank == 0:
        storage = options.data.opener(rank=0, is_traced=False)()
        # Object stores report no free space.
        if not read_series_state(series).datagens and find_local_root(storage) is not None:
            still_missing = missing_bytes(dataset_recipe(workload), storage)
    comm.barrier(awaiting="rank 0 to look at the data set")
    planned = plan_training(options, comm=comm, terminal=terminal, written_bytes=still_missing)
    if planned is None:
        return None
    request, session = planned
    assert session is not None
    # A second command would plan from a tree whose next run this one is making.
    lock = locked_folder(series.tree.root)
    with held_on_rank0(comm, lock, awaiting="rank 0 to lock the tree"), terminal.progress() as progress:
        training = TrainingSequence(
            writer=session,
            request=request,
            storage=options.data.opener(rank=comm.rank)(),
            comm=comm,
            edition=edition,
            num_accelerators=comm.size,
            hosts=hosts,
            progress=progress,
            note=terminal.note,
            format_logs=partial(capture_training_output, remarks=request.remarks),
            # At a small scale, the start of an epoch weighs more than in a real run.
            stops_below_minimum=rehearsed_at is None,
        )
        sequence = training.make_all() if only is None else training.make_part(SubmissionPhase(only))
    return MadeTraining(workload=workload, series=series, sequence=sequence, required_size=required_size)


def require_valid_training(
    options: TrainingRunOptions, *, only: str | None = None, comm: Comm, terminal: Terminal
) -> tuple[Workload, tuple[HostFacts, ...]]:
    """Return the requested workload and all hosts; refuse what the edition or the division forbids."""
    from penstock.results.provenance import read_host, unique_hosts

    hosts = unique_hosts(comm.gather(read_host(comm.host), awaiting="facts of all hosts"))
    requested, edition = options.workload.load(terminal).workload, load_edition("v3.0")
    breaches = preflight.training_breaches(
        edition,
        options.results.folder,
        model=requested.name,
        accelerator=requested.accelerator,
        # Data may be generated on any number of ranks.
        num_accelerators=comm.size if only != "datagen" else len(hosts),
        num_hosts=len(hosts),
        data=options.data.uri,
    )
    preflight.require_none(breaches, f"edition {edition.edition}")
    choose_reading(options)
    return requested, hosts


def _sized_settings(
    options: TrainingRunOptions, series: RunSeries, workload: Workload, required_size: DatasetSizing
) -> tuple[str, ...]:
    """Return the settings with the number of files added; an existing data set is used if large enough."""
    from penstock.submission.authoring.run_sequence import read_series_state

    settings = options.workload.settings
    request, scale = required_size.request, options.results.rehearsed_at
    if any(override.path == ("dataset", "num_files_train") for override in parse_overrides(settings)):
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
    settings = (*settings, f"dataset.num_files_train={num_files}")
    if required_size.num_subfolders and not workload.dataset.num_subfolders_train:
        return (*settings, f"dataset.num_subfolders_train={required_size.num_subfolders}")
    return settings
