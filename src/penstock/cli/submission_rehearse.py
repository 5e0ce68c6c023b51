"""`penstock submission rehearse`: a whole submission at a small scale, and what a real one still needs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock import __version__
from penstock.cli import option_groups
from penstock.cli.options import argument, group, option, repeated
from penstock.cli.parsers import FOLDER, NAME, SCALE, SETTING, TEXT, URI, WORKLOAD
from penstock.cli.rank_options import ranked
from penstock.cli.submission_options import DivisionOptions, TreeOptions
from penstock.cli.submission_run import (
    CheckpointingOptions,
    ThreadOptions,
    TrainingOptions,
    find_missing_checkpoints,
    make_training_result,
    run_checkpointing_result,
)
from penstock.cli.terminal import Terminal, View
from penstock.cluster.comm import Comm
from penstock.environment import process_environment
from penstock.errors import UsageError, name_some
from penstock.submission.authoring import tree_owner
from penstock.submission.authoring.result_dir import HIDDEN
from penstock.submission.check import RehearsalAssessment, assess_rehearsal, check
from penstock.submission.edition import CheckpointLimits, load_edition
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.cli.submission_run import MadeTraining
    from penstock.cluster.facts.host_facts import ClusterFacts
    from penstock.submission.check import CheckedResult

EDITION: Final = "v3.0"
NOT_READY: Final = 1
_REHEARSED: Final = "rehearsal"
"""The name of an organization and a system that nobody named."""
_MOST_LOCAL_RANKS: Final = 8
"""Ranks that are started without being asked for: one host's accelerators."""


@dataclass(frozen=True, kw_only=True)
class _RehearseOptions:
    workload: str = argument(
        "WORKLOAD", WORKLOAD, "Training workload (unet3d) or checkpointing model (llama3-8b)."
    )
    folder: Path = argument("DIR", FOLDER, "New or empty directory, or that of a rehearsal to continue.")
    scale: Fraction = option(
        "--scale", SCALE, "Use this share of the data set's files, or of each checkpoint.", default="0.001"
    )
    accelerator: str = option(
        "--accelerator", TEXT, "Emulate this accelerator: b200 or mi355.", default="b200"
    )
    data: str | None = option(
        "--data", URI, "Put the data set or the checkpoints on this storage (default: DIR/.mlps/storage)."
    )
    storage: option_groups.BackendOptions = group(option_groups.BackendOptions)
    settings: tuple[str, ...] = repeated("--set", SETTING, "Change a value, e.g. reader.read_threads=8.")
    organisation: str = option("--organization", NAME, "Name of your organization.", default=_REHEARSED)
    system: str = option("--system", NAME, "Name the system under test.", default=_REHEARSED)
    rules: DivisionOptions = group(DivisionOptions)
    threads: ThreadOptions = group(ThreadOptions)
    gates: option_groups.GateOptions = group(option_groups.GateOptions)

    @property
    def target(self) -> TreeOptions:
        """The tree, and the system in it; the closed division unless the open one is named."""
        rules = self.rules if self.rules.division else DivisionOptions(closed=True)
        return TreeOptions(tree=str(self.folder), system=self.system, rules=rules, rehearsed_at=self.scale)

    @property
    def place(self) -> str:
        """Where the data set or the checkpoints are."""
        return self.data or str(self.folder.absolute() / HIDDEN / "storage" / self.workload)

    @property
    def applied_gates(self) -> option_groups.GateOptions:
        """In one folder, data and results cannot be apart; in the end this is on the list."""
        return self.gates if self.data else replace(self.gates, skipped=(*self.gates.skipped, "apart"))


def _limits() -> CheckpointLimits:
    edition = load_edition(EDITION)
    return edition.require(edition.checkpoints)


def _usual_ranks(values: Mapping[str, Any]) -> int | None:
    """As many ranks as the model takes, where one host has so many accelerators."""
    model = _limits().models.get(values["workload"])
    is_small = model is not None and model.closed_processes <= _MOST_LOCAL_RANKS
    return model.closed_processes if model is not None and is_small else None


@ranked(_RehearseOptions, default_ranks=_usual_ranks)
def rehearse(options: _RehearseOptions, comm: Comm, terminal: Terminal) -> int:
    r"""Rehearse a whole submission in minutes: everything but sizes is done as in earnest.

    Creates the tree, describes the system (with placeholders for what only you know), sizes and generates
    data, runs all runs, writes the report, checks the tree, and lists what a real submission still needs.
    After Ctrl-C or a failure, run the same command again to continue. Its results are marked as a rehearsal
    in their own metadata, and no check calls them valid. Exits with 0 if it is valid but for size (and the
    place of results that are in one folder with the data, and utilization), with 1 otherwise.

    Examples:

      penstock submission rehearse retinanet ~/rehearsal

      penstock submission rehearse unet3d ~/rehearsal --scale 0.01 --data /mnt/data --hosts a:4,b:4

      penstock submission rehearse llama3-8b ~/rehearsal --scale 0.0005 --accelerator mi355 --json
    """
    if options.scale >= 1:
        raise UsageError(
            "A rehearsal is smaller than the real thing",
            where="--scale",
            fix="Name a share below 1, or use `penstock submission run`.",
        )
    _prepare_tree(options, comm, terminal)
    if options.workload in _limits().models:
        is_done, size = _rehearse_checkpointing(options, comm, terminal)
    else:
        is_done, size = _rehearse_training(options, comm, terminal)
    if not is_done:
        return option_groups.CLOSED_GATES
    is_ready = False
    if comm.rank == 0:
        is_ready = _report(options, size, terminal)
    return 0 if comm.broadcast(is_ready, awaiting="rank 0 to check the rehearsal") else NOT_READY


def _prepare_tree(options: _RehearseOptions, comm: Comm, terminal: Terminal) -> None:
    """`init` and `describe`: what is there already stays as it is. Collective."""
    from penstock.cluster.facts.collect_facts import collect_from_ranks

    facts = collect_from_ranks(comm, process_environment(), now=lambda: datetime.now(UTC))
    if comm.rank == 0:
        tree = tree_owner.claim_tree(
            options.folder,
            options.organisation,
            now=datetime.now(UTC),
            by=f"penstock {__version__}",
            is_rehearsal=True,
        )
        terminal.note(f"init: {tree.root} {'is new' if tree.is_new else 'is continued'}")
        path = _description(options)
        if _describe(path, facts, options.system):
            terminal.note(f"describe: {path}, with placeholders")
    comm.barrier(awaiting="rank 0 to prepare the tree")


def _description(options: _RehearseOptions) -> Path:
    division = options.target.rules.require_division()
    name = tree_owner.require_plain_name(options.system, what="system's name")
    folder = options.folder.absolute() / division.value / options.organisation
    return folder / "systems" / f"{name}.yaml"


def _describe(path: Path, facts: ClusterFacts, system: str) -> bool:
    """Write the description and its picture where there are none; whether one was written."""
    from penstock.results.published_files import write_file, write_text
    from penstock.submission.authoring import description_draft

    draft = description_draft.draft_description(facts, system)
    if len(facts.present) > 1:
        draft["system_under_test"]["solution"]["capabilities"]["multi_host"] = True
    is_new = not path.exists()
    if is_new:
        write_text(path.parent, path.name, description_draft.rehearsed_text(draft))
    picture = path.with_suffix(".pdf")
    if not picture.exists():
        write_file(picture.parent, picture.name, description_draft.rehearsed_picture())
    return is_new


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """What the rehearsal scaled down: in words, as it was, as it has to be, and how long that will take."""

    rehearsed: str
    required: str
    duration: str = ""


def _rehearse_training(options: _RehearseOptions, comm: Comm, terminal: Terminal) -> tuple[bool, _Size]:
    made = make_training_result(
        TrainingOptions(
            workload=option_groups.WorkloadOptions(
                name=options.workload, accelerator=options.accelerator, settings=options.settings
            ),
            data=option_groups.DataOptions(uri=options.place, storage=options.storage),
            target=options.target,
            threads=options.threads,
            gates=options.applied_gates,
        ),
        comm=comm,
        terminal=terminal,
    )
    if made is None:
        return False, _Size(rehearsed="", required="")
    return True, _training_size(made)


def _training_size(made: MadeTraining) -> _Size:
    from penstock.dataset.generate import expected_bytes

    workload, required = made.workload, made.required_size
    num_files = workload.dataset.num_files_train
    num_samples = required.min_files * workload.dataset.num_samples_per_file
    num_steps = num_samples // (workload.reader.batch_size * required.request.num_accelerators)
    num_runs = load_edition(EDITION).num_runs
    # The slowest that is valid: longer than this means that the minimum is missed.
    run_s = num_steps * workload.train.epochs * float(required.request.computation_s) / workload.metric.au
    return _Size(
        rehearsed=f"{num_files:,} files, {format_bytes(expected_bytes(workload.dataset))}",
        required=f"{required.min_files:,} files, {format_bytes(required.dataset_bytes)}",
        duration=f"{num_runs} runs of at most {format_seconds(run_s)} each",
    )


def _rehearse_checkpointing(options: _RehearseOptions, comm: Comm, terminal: Terminal) -> tuple[bool, _Size]:
    asked = CheckpointingOptions(
        model=options.workload,
        destination=options.place,
        storage=options.storage,
        target=options.target,
        accelerator=options.accelerator,
        gates=options.applied_gates,
    )
    if any(find_missing_checkpoints(asked, comm=comm).values()):
        terminal.note("run: ten checkpoints are written, and ten read back")
        if run_checkpointing_result(asked, comm=comm, terminal=terminal) is None:
            return False, _Size(rehearsed="", required="")
    edition = _limits()
    full_bytes = edition.models[options.workload].architecture_gib * 2**30
    count = edition.num_checkpoints
    return True, _Size(
        rehearsed=f"{count} checkpoints of {format_bytes(int(full_bytes * options.scale))}",
        required=f"{count} checkpoints of {format_bytes(int(full_bytes))}",
    )


def _report(options: _RehearseOptions, size: _Size, terminal: Terminal) -> bool:
    """Check the tree, and print the verdict and the list; whether nothing but size and place is left."""
    results = check(options.folder, load_edition(EDITION))
    checked = next(result for result in results if _is_own(result, options))
    assessment = assess_rehearsal(checked.findings)
    assert assessment is not None
    needs = list(_list_needs(options, size, assessment))
    commands = list(_list_commands(options))
    document = {
        "folder": str(options.folder.absolute()),
        "result": checked.name,
        "scale": float(options.scale),
        "verdict": checked.verdict.value,
        "outcome": assessment.summary,
        "needs": needs,
        "commands": commands,
        "findings": [
            {"rule": finding.rule, "verdict": finding.verdict.value, "proof": finding.proof}
            for finding in assessment.findings
        ],
    }
    terminal.result(document, _view(checked, assessment, needs, commands, options))
    return not assessment.other


def _is_own(result: CheckedResult, options: _RehearseOptions) -> bool:
    """Whether this is the result that was rehearsed now; a folder may hold rehearsals of several."""
    division = options.target.rules.require_division()
    wanted = (division.value, options.system)
    return (result.division, result.system) == wanted and f"{result.workload}" in options.workload


def _list_needs(options: _RehearseOptions, size: _Size, assessment: RehearsalAssessment) -> Iterator[str]:
    """What a real submission needs that the rehearsal did not have."""
    from penstock.submission.authoring.description_draft import find_placeholders, rehearsed_picture

    yield f"size: {size.required} (rehearsed: {size.rehearsed})"
    if size.duration:
        yield f"time: {size.duration}"
    if assessment.excused["place"]:
        yield "place: results on another file system than the data"
    path = _description(options)
    placeholders = find_placeholders(path.read_text(encoding="utf-8"))
    if placeholders:
        yield f"description: {len(placeholders)} values in {path} ({name_some(placeholders, 3)})"
    picture = path.with_suffix(".pdf")
    if picture.read_bytes() == rehearsed_picture():
        yield f"picture: a drawing of the system as systems/{picture.name}"
    if assessment.excused["utilization"]:
        yield (
            "utilization: at least the minimum in each run; here the start of an epoch weighs more, and a "
            "larger --scale tells more"
        )
    for finding in assessment.other:
        yield f"{finding.rule}: {finding.proof}. {finding.fix}"


def _list_commands(options: _RehearseOptions) -> Iterator[str]:
    """The commands of the real submission."""
    target, tree = options.target, "~/results"
    division = f"--{target.rules.require_division().value}"
    is_named = options.system != _REHEARSED
    own = ["--submission", tree, "--system", options.system if is_named else "NAME", division]
    organisation = options.organisation if options.organisation != _REHEARSED else "ORGANIZATION"
    yield f"penstock submission init {organisation} {tree}"
    yield " ".join(["penstock submission describe", *own])
    is_model = options.workload in _limits().models
    verb, place = ("checkpointing", "--to") if is_model else ("training", "--data")
    words = [verb, options.workload, "--accelerator", options.accelerator]
    words += [word for setting in options.settings for word in ("--set", setting)]
    yield f"penstock submission run {shlex.join(words)} {place} {options.data or 'URI'} {' '.join(own)}"


def _view(
    checked: CheckedResult,
    assessment: RehearsalAssessment,
    needs: Sequence[str],
    commands: Sequence[str],
    options: _RehearseOptions,
) -> View:
    yield [(f"Rehearsal of {checked.workload}: {assessment.summary}", "bold")]
    for finding in assessment.findings:
        yield f"  {finding.rule}: {finding.proof}"
    yield "A real submission still needs:"
    yield from (f"  {need}" for need in needs)
    yield "Its commands, with the --ranks or --hosts of this one:"
    yield from (f"  {command}" for command in commands)
    yield f"Remove the rehearsal with: rm -r {shlex.quote(str(options.folder))}"
