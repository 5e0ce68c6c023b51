"""`penstock training run --loader MODULE:FACTORY`: the options of a user's own loader, and its run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cli.option_groups import DataOptions, WorkloadOptions, parse_overrides
from penstock.cli.options import command_line, group, option, optional_argument, repeated
from penstock.cli.parsers import NAME, TEXT, TIME, URI, WORKLOAD, whole
from penstock.cli.run_reports import view_training
from penstock.cli.terminal import Terminal, View, bold
from penstock.cli.training_request import TrainingRunOptions
from penstock.cluster.comm import Comm
from penstock.environment import process_environment
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.bench.own_loader.own_loader_run import OwnLoaderRequest
    from penstock.bench.training.training_result import TrainingResult
    from penstock.workload.spec import Workload


@dataclass(frozen=True, kw_only=True)
class _MaybeWorkload(WorkloadOptions):
    """A workload, which a user's own loader can do without."""

    name: str = optional_argument(
        "WORKLOAD",
        WORKLOAD,
        "Shipped workload (see `penstock workloads`) or a YAML file; a loader of your own needs none.",
        default="",
    )


@dataclass(frozen=True, kw_only=True)
class _MaybeData(DataOptions):
    """A data set's storage, which a user's own loader may not name."""

    uri: str = option(
        "--data",
        URI,
        "Data set: a directory, direct:///directory or s3://bucket/prefix. With your own loader: what it "
        "reads, so that it is evicted from the page cache before each epoch.",
        default="",
    )


@dataclass(frozen=True, kw_only=True)
class OwnLoaderOptions:
    """The options of a user's own loader."""

    batch_time_s: float | None = option("--batch-time", TIME, "Time that a step computes.")
    step: str | None = option(
        "--step", NAME, "Your own step, called with each batch.", metavar="MODULE:FUNCTION"
    )
    epochs: int | None = option("--epochs", whole(1), "Number of epochs over the loader.")
    max_steps: int | None = option("--steps", whole(1), "Maximum batches of an epoch.")
    batch_size: int | None = option(
        "--batch-size", whole(1), "Samples per batch (default: found in the batch)."
    )
    trials: tuple[str, ...] = repeated(
        "--try", TEXT, "Run again with workers=N, prefetch=N or persistent=1, and compare."
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(TrainingRunOptions):
    """All options of `penstock training run`, with a loader of the user's or without."""

    workload: WorkloadOptions = group(_MaybeWorkload)
    data: DataOptions = group(_MaybeData)
    own: OwnLoaderOptions = group(OwnLoaderOptions, panel="Your own loader")

    @property
    def has_own_loader(self) -> bool:
        """True if the loader is the user's own; raises UsageError for options that do not fit."""
        if self.loader is not None and ":" in self.loader:
            return True
        for what, given in (("argument 'WORKLOAD'", self.workload.name), ("option '--data'", self.data.uri)):
            if not given:
                raise UsageError(
                    f"Missing {what}", fix="Give it, or a loader of your own: --loader MODULE:FACTORY."
                )
        defaults = OwnLoaderOptions()
        if self.own != defaults:
            raise UsageError(
                "Batch times, steps, epochs and trials of this kind belong to a loader of your own",
                where="--loader",
                fix="Add --loader MODULE:FACTORY; for Penstock's own loaders --set changes the workload.",
            )
        return False


def run_users_loader(options: RunOptions, *, comm: Comm, terminal: Terminal) -> TrainingResult:
    """Run the user's loader and print what it was waited for."""
    from penstock.bench.own_loader.own_loader_run import run_own_loader

    request = _plan(options, comm=comm, terminal=terminal)
    with terminal.progress() as progress:
        result = run_own_loader(request, comm=comm, progress=progress)
    terminal.notes(result.stages.remarks)
    terminal.result(result.document(), view_own_loader(result))
    return result


def view_own_loader(result: TrainingResult) -> View:
    """The answer first, then what every training run prints."""
    waits = result.stages.waits
    assert waits is not None
    yield bold(waits.sentence)
    for title, text in waits.lines:
        yield f"  {title:<10}{text}"
    yield from view_training(result)


def _plan(options: RunOptions, *, comm: Comm, terminal: Terminal) -> OwnLoaderRequest:
    from penstock.bench.own_loader.own_loader_run import OwnLoaderRequest
    from penstock.bench.own_loader.user_code import DescribedLoader, load_user_code
    from penstock.bench.training.training_run import choose_seed

    _refuse_unfitting(options)
    own, name = options.own, options.loader or ""
    workload = _load_workload(options, terminal)
    opener = options.data.opener(rank=comm.rank)
    return OwnLoaderRequest(
        results=options.results.folder,
        workload=workload,
        loader=DescribedLoader(name=name, step=own.step, batch_size=own.batch_size),
        factory=load_user_code(name, where="--loader"),
        step=load_user_code(own.step, where="--step") if own.step else None,
        max_steps=own.max_steps,
        seed=choose_seed(comm, workload, options.seed),
        data=opener() if options.data.uri else None,
        trials=own.trials,
        command=command_line(),
        environment=process_environment(),
        overrides=tuple(f"++workload.{text}" for text in options.workload.settings),
    )


def _refuse_unfitting(options: RunOptions) -> None:
    """Refuse what only a loader of Penstock's own can do."""
    given = {
        "--submission": options.results.tree,
        "--closed": options.results.rules.closed,
        "--open": options.results.rules.open,
        "--reader": options.reader,
        "--threads": options.threads,
        "--decode": options.decode,
        "--division": options.division,
        "--checkpoints": options.checkpoints,
    }
    for name, value in given.items():
        if value:
            raise UsageError(
                f"{name} does not go with a loader of your own", where="--loader", fix=f"Leave {name} out."
            )
    own = options.own
    if own.batch_time_s is not None and own.step is not None:
        raise UsageError("--batch-time and --step are mutually exclusive", fix="Give one of them.")


def _load_workload(options: RunOptions, terminal: Terminal) -> Workload:
    """The workload that the options name, or one of nothing but a loader and a step."""
    from penstock.workload.load_workload import load_sections
    from penstock.workload.quantities import Duration

    if options.workload.name:
        workload = options.workload.load(terminal).workload
    else:
        name = (options.loader or "").replace(":", ".")
        overrides = parse_overrides(options.workload.settings)
        workload = load_sections({}, name=name, source="--loader", overrides=overrides).workload
    train = workload.train
    own = options.own
    if own.epochs is not None or not options.workload.name:
        train = replace(train, epochs=own.epochs or train.epochs)
    if own.batch_time_s is not None:
        train = replace(train, computation_time=Duration(mean_s=own.batch_time_s))
    return replace(workload, train=train)
