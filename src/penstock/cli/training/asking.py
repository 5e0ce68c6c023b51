"""From the words of a command line to a training run's request, and to where its leaf goes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import values
from penstock.cli.gates import look_at_gates
from penstock.cli.handing_in import Entry, locate, open_session, series_of
from penstock.cli.training.reading import (
    asks_to_decode,
    choose_seed,
    left_undone,
    loader_options,
    reader_of,
    rules_of,
)
from penstock.cli.training.saving import checkpoint_wish
from penstock.cli.training.words import data_at, load_workload
from penstock.environment import process_environment

if TYPE_CHECKING:
    from penstock.bench.loader.loader_protocol import OpenStorage
    from penstock.bench.training.training_request import TrainingRequest
    from penstock.cli.terminal import Terminal
    from penstock.cluster.comm import Comm
    from penstock.workflows.submission.session import Session
    from penstock.workload.division_rules import SubmissionDivision
    from penstock.workload.spec import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWords:
    """What a command line says of a run. `tree` and `system` say where it is handed in, None if nowhere."""

    workload: str
    accelerator: str
    settings: list[str] | None
    data: str
    option: list[str] | None
    results: str
    submitted: SubmissionDivision | None = None
    tree: str | None = None
    system: str | None = None
    loader: str | None = None
    reader: str | None = None
    threads: int | None = None
    seed: int | None = None
    division: str | None = None
    decode: bool = False
    check: str = "off"
    checkpoints: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The request, how its storage is opened, and the session of its leaf; None if it is not handed in."""

    request: TrainingRequest
    reopen: OpenStorage
    session: Session | None

    @property
    def is_stopped(self) -> bool:
        """Whether a gate is closed that the run must pass."""
        inspection = self.request.inspection
        return inspection is not None and inspection.preflight.is_stopped


def asked_of(words: RunWords, *, comm: Comm, terminal: Terminal) -> Asked:
    """The run that the words ask for; what people should know of it is said."""
    from penstock.bench.training.training_request import TrainingRequest

    loaded = load_workload(terminal, words.workload, words.accelerator, words.settings)
    rules = rules_of(words.submitted, words.workload, words.settings, words.loader, words.division)
    undone = left_undone(loaded.workload)
    for remark in undone:
        terminal.note(remark)
    entry = entry_of(words, loaded.workload)
    workload = entry.located.workload if entry else loaded.workload
    reopen = data_at(words.data, words.option, rank=comm.rank)
    request = TrainingRequest(
        workload=workload,
        results=Path(words.results),
        seed=choose_seed(comm, workload, words.seed),
        division=rules.division,
        loader=loader_options(rules.loader, workload, words.threads),
        reopen=reopen,
        decodes=words.decode or asks_to_decode(workload),
        check=values.content_check("--check", words.check),
        reader=reader_of(words.reader),
        command=("penstock", *sys.argv[1:]),
        environment=process_environment(),
        overrides=tuple(f"++workload.{text}" for text in words.settings or ()),
        remarks=(*map(str, loaded.remarks), *undone),
        checkpoints=checkpoint_wish(
            workload, words.checkpoints, comm=comm, environment=process_environment()
        ),
    )
    session = open_session(entry, words.settings, comm=comm) if entry else None
    return Asked(request=request, reopen=reopen, session=session)


def inspected(
    asked: Asked, words: RunWords, skips: list[str] | None, *, comm: Comm, terminal: Terminal
) -> Asked:
    """The same, once its gates were looked at; those of a result that is handed in must stand open."""
    from penstock.cluster.gates.gate_model import PreflightRequest

    doing = PreflightRequest(
        environment=asked.request.environment,
        uri=words.data,
        reopen=data_at(words.data, words.option, rank=comm.rank, is_traced=False),
        results=Path(words.tree or words.results),
    )
    inspection = look_at_gates(
        doing, skips=skips, is_strict=words.submitted is not None, comm=comm, terminal=terminal
    )
    return replace(asked, request=replace(asked.request, inspection=inspection))


def entry_of(words: RunWords, workload: Workload) -> Entry | None:
    """Where the run's leaf goes; None for a run that is not handed in."""
    from penstock.submission.tree_layout import Benchmark

    if words.tree is None:
        return None
    series = series_of(
        words.tree, words.system, words.submitted, benchmark=Benchmark.TRAINING, model=workload.name
    )
    return Entry(series=series, located=locate(series, workload, words.data))
