"""`penstock submission run`: everything that a result needs, one leaf after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.gates import CLOSED_GATES, SkipGate
from penstock.cli.handing_in import Closed, Open, System, Tree, division_of, series_of
from penstock.cli.ranks import ranked
from penstock.cli.submission.checkpointing import checkpointing
from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cli.training.asking import RunWords, asked_of, inspected
from penstock.cli.training.words import (
    Accelerator,
    Data,
    ReadThreads,
    Settings,
    StorageOption,
    WorkloadName,
)
from penstock.cluster.comm import Comm
from penstock.submission.tree_layout import SubmissionPhase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from penstock.cli.training.asking import Asked
    from penstock.results.host import HostFacts
    from penstock.submission.authoring.result_dir import Series
    from penstock.submission.authoring.run_sequence import RunSequence
    from penstock.workflows.submission.session import Session

app = typer.Typer(no_args_is_help=True, help="Make a whole result: all its leaves, and go on after a break.")

_Only = Annotated[
    str | None,
    typer.Option("--only", metavar="PHASE", help="One leaf alone: datagen, by any number of ranks, or run."),
]
_WriteThreads = Annotated[
    int, typer.Option("--write-threads", min=1, help="Files under way at once while data is generated.")
]


@app.callback()
def run() -> None:
    """Group the benchmarks."""


app.command()(checkpointing)


@app.command()
@ranked
def training(
    comm: Comm,
    workload: WorkloadName,
    *,
    data: Data,
    submission: Tree,
    system: System,
    accelerator: Accelerator = "",
    closed: Closed = False,
    open_: Open = False,
    settings: Settings = None,
    threads: ReadThreads = None,
    write_threads: _WriteThreads = 4,
    only: _Only = None,
    option: StorageOption = None,
    skip_gate: SkipGate = None,
    as_json: JsonFlag = False,
) -> int:
    """Make a whole training result: size and make the data set, then a warm-up and five runs.

    One rank is one accelerator. The data set is as large as the memory of all hosts asks for. Runs follow one
    another without a pause; after Ctrl-C or a failure the same command goes on, as long as the rules let the
    runs that are there count. Gates come first: a closed one ends this with exit code 3.

    Examples:

      penstock submission run training unet3d --accelerator b200 --data /mnt/data --ranks 8 --hosts a:4,b:4
      --closed --submission ~/results --system fast
    """
    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    words = RunWords(
        workload=workload,
        accelerator=accelerator,
        settings=settings,
        data=data,
        option=option,
        results=submission,
        submitted=division_of(closed=closed, open_=open_),
        tree=submission,
        system=system,
        threads=threads,
    )
    hosts, phase = _hosts(comm), _phase(only)
    words = words if phase is SubmissionPhase.DATAGEN else _sized(words, hosts, comm=comm)
    asked = asked_of(words, comm=comm, terminal=terminal)
    asked = inspected(asked, words, skip_gate, comm=comm, terminal=terminal)
    if asked.is_stopped:
        return CLOSED_GATES
    _make(asked, hosts, write_threads, phase, comm=comm, terminal=terminal)
    return 0


def _phase(text: str | None) -> SubmissionPhase | None:
    from penstock.errors import UsageError

    if text in (None, SubmissionPhase.DATAGEN, SubmissionPhase.RUN):
        return SubmissionPhase(text) if text else None
    raise UsageError(f"{text!r} is made by no one alone", where="--only", fix="Choose datagen or run.")


def _hosts(comm: Comm) -> Sequence[HostFacts]:
    from penstock.results.host import one_per_host, read_host

    return one_per_host(comm.gather(read_host(comm.host), awaiting="facts of all hosts"))


def _sized(words: RunWords, hosts: Sequence[HostFacts], *, comm: Comm) -> RunWords:
    """The words with a data set that is large enough; one that is there already is kept if it is."""
    from dataclasses import replace

    from penstock.submission.tree_layout import Benchmark
    from penstock.workload import dataset_size
    from penstock.workload.loading import load
    from penstock.workload.overrides import parse_settings

    overrides = parse_settings(words.settings or ())
    workload = load(words.workload, accelerator=words.accelerator, overrides=overrides).workload
    series = series_of(
        words.tree or "",
        words.system,
        words.submitted,
        benchmark=Benchmark.TRAINING,
        model=workload.name,
    )
    found = dataset_size.size(
        dataset_size.sizing_request(
            workload, num_accelerators=comm.size, host_memory_bytes=[host.memory_bytes for host in hosts]
        )
    )
    is_given = any(each.path == ("dataset", "num_files_train") for each in overrides)
    num_files = workload.dataset.num_files_train if is_given else _files_there(series, found)
    _require_enough(found, num_files)
    settings = [*(words.settings or ()), f"dataset.num_files_train={num_files}"]
    if found.num_subfolders and not workload.dataset.num_subfolders_train:
        settings.append(f"dataset.num_subfolders_train={found.num_subfolders}")
    return replace(words, settings=settings)


def _files_there(series: Series, found: Any) -> int:
    """As many as an earlier datasize asked for, if they are enough; else as many as are needed now."""
    from penstock.submission.authoring.series_state import read_series_state

    there = [leaf.num_files for leaf in read_series_state(series).datasizes]
    enough = [num_files for num_files in there if found.judge(num_files).passed]
    return int(enough[-1] if enough else found.min_files)


def _require_enough(found: Any, num_files: int) -> None:
    from penstock.errors import UsageError

    verdict = found.judge(num_files)
    if not verdict.passed:
        raise UsageError(
            f"The data set is too small (rule 3.1.2): {verdict.proof}; {'; '.join(found.proof)}",
            where="dataset.num_files_train",
            fix="Leave it out: it is then as large as it must be.",
        )


def _make(
    asked: Asked,
    hosts: Sequence[HostFacts],
    write_threads: int,
    phase: SubmissionPhase | None,
    *,
    comm: Comm,
    terminal: Terminal,
) -> None:
    from penstock.cli.training.run import said_of
    from penstock.submission.edition import load_edition
    from penstock.workflows.submission.cadence import Onlooker, TrainingResultPlan, make_part, make_training

    session = asked.session
    assert session is not None
    plan = TrainingResultPlan(
        request=asked.request,
        edition=load_edition("v3.0"),
        num_accelerators=comm.size,
        hosts=hosts,
        generates_with=write_threads,
    )
    with terminal.progress() as progress:
        onlooker = Onlooker(
            progress=progress,
            note=terminal.note,
            tell=lambda result: said_of(result, asked.request.remarks),
        )
        storage = asked.reopen()
        if phase is None:
            cadence = make_training(session, plan, storage, comm=comm, onlooker=onlooker)
        else:
            cadence = make_part(session, plan, storage, phase=phase, comm=comm, onlooker=onlooker)
    terminal.result(_document(session, cadence), lambda console: _draw(console, session, cadence))


def _document(session: Session, cadence: RunSequence) -> dict[str, Any]:
    return {
        "folder": str(session.series.claim.root / session.series.folder),
        "is_complete": cadence.is_complete,
        "runs": [
            {"folder": str(leaf.folder), "duration_s": leaf.duration.total_seconds()} for leaf in cadence.kept
        ],
    }


def _draw(console: Console, session: Session, cadence: RunSequence) -> None:
    rows = [
        {"run": leaf.folder.name, "took": f"{leaf.duration.total_seconds():,.0f} s"} for leaf in cadence.kept
    ]
    series = session.series
    state = "whole" if cadence.is_complete else f"{len(cadence.phases)} leaves are missing"
    table(f"{series.model} on {series.system}: {state}", rows)(console)
    verb = "check" if cadence.is_complete else "status"
    console.print(f"Next: penstock submission {verb} {series.claim.root}", markup=False)
