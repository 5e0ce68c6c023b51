"""`penstock submission rehearse`: a whole submission at a small scale, and what a real one still needs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock import __version__
from penstock.cli.checkpoint_benchmark import CheckpointRunOptions, plan_model, run_checkpoint_benchmark
from penstock.cli.option_groups import (
    CLOSED_GATES,
    SKIPPED_GATES,
    STORAGE,
    DataOptions,
    WorkloadOptions,
)
from penstock.cli.options import argument, group, option, refuse_ignored, repeated
from penstock.cli.parsers import FOLDER, SCALE, SETTING, TEXT, URI, WORKLOAD
from penstock.cli.rank_options import ranked
from penstock.cli.submission_options import DivisionOptions, TreeOptions
from penstock.cli.submission_run import find_missing_checkpoints, make_training_result, require_valid_training
from penstock.cli.terminal import Terminal, View
from penstock.cli.training_benchmark import TrainingRunOptions
from penstock.cluster.comm import Comm
from penstock.cluster.gates.gate_model import Gate
from penstock.environment import process_environment
from penstock.errors import UsageError, name_some
from penstock.submission.authoring import owned_tree
from penstock.submission.authoring.owned_tree import HIDDEN
from penstock.submission.check import RehearsalAssessment, assess_rehearsal, check
from penstock.submission.edition import load_edition
from penstock.submission.rules.rule import Verdict
from penstock.units import format_bytes, format_seconds
from penstock.workload.mlperf_divisions import SubmissionDivision

EDITION: Final = "v3.0"
NOT_READY: Final = 1
_REHEARSED: Final = "rehearsal"
"""The name of a rehearsal's organization and system."""
_MOST_LOCAL_RANKS: Final = 8
"""The most ranks started by default: the accelerators of one host."""


def _usual_ranks(values: Mapping[str, Any]) -> int | None:
    """Return the model's number of ranks if one host usually has that many accelerators, else None."""
    model = load_edition(EDITION).checkpoints.models.get(values["workload"])
    is_small = model is not None and model.closed_processes <= _MOST_LOCAL_RANKS
    return model.closed_processes if model is not None and is_small else None


@partial(ranked, default_ranks=_usual_ranks)
def rehearse(
    comm: Comm,
    terminal: Terminal,
    *,
    workload: str = argument(
        "WORKLOAD", WORKLOAD, "Training workload (e.g. unet3d) or checkpointing model (e.g. llama3-8b)."
    ),
    folder: Path = argument("DIR", FOLDER, "New or empty directory, or a rehearsal to continue."),
    scale: Fraction = option(
        "--scale",
        SCALE,
        "Share of the data set's files, or of each checkpoint's bytes, to use.",
        default="0.001",
    ),
    accelerator: str = option(
        "--accelerator", TEXT, "Emulate this accelerator: b200 or mi355.", default="b200"
    ),
    data: str | None = option(
        "--data", URI, "Keep the data set or the checkpoints on this storage (default: DIR/.mlps/storage)."
    ),
    storage: tuple[tuple[str, str], ...] = STORAGE,
    settings: tuple[str, ...] = repeated(
        "--set", SETTING, "Override a setting of the training workload, e.g. reader.read_threads=8."
    ),
    rules: DivisionOptions = group(DivisionOptions),
    skipped_gates: tuple[Gate, ...] = SKIPPED_GATES,
) -> int:
    r"""Rehearse a whole submission in minutes: every step of a real one, at a small scale.

    Creates the tree, describes the system (with placeholders for what only you know), sizes and generates the
    data, executes all runs, writes the report, checks the tree, and lists what a real submission still needs.
    After Ctrl-C or a failure, run the same command again to continue. The results' metadata mark them as a
    rehearsal, so that no check calls them valid. Exits with 0 if they break only rules that a rehearsal
    cannot meet (size, utilization, results stored apart from the data), and with 1 otherwise.

    Examples:

      penstock submission rehearse retinanet ~/rehearsal

      penstock submission rehearse unet3d ~/rehearsal --scale 0.01 --data /mnt/data --hosts a:4,b:4

      penstock submission rehearse llama3-8b ~/rehearsal --scale 0.0005 --accelerator mi355 --json
    """
    if scale >= 1:
        raise UsageError(
            "A rehearsal is smaller than the real thing",
            where="--scale",
            fix="Name a share below 1, or use `penstock submission run`.",
        )
    limits = load_edition(EDITION).checkpoints
    is_checkpointing = workload in limits.models
    if is_checkpointing:
        refuse_ignored(("--set",), "it changes a training workload")
    division = rules.division or SubmissionDivision.CLOSED
    target = TreeOptions(
        tree=str(folder),
        system=_REHEARSED,
        rules=rules if rules.division else DivisionOptions(closed=True),
        rehearsed_at=scale,
    )
    place = data or str(folder.absolute() / HIDDEN / "storage" / workload)
    # In one folder, data and results cannot be separate; the final list says so.
    skips = skipped_gates if data else (*skipped_gates, Gate.APART)
    description = folder.absolute() / division.value / _REHEARSED / "systems" / f"{_REHEARSED}.yaml"
    data_options = DataOptions(uri=place, storage=storage)
    checkpoint_options = CheckpointRunOptions(
        model=workload,
        destination=place,
        storage=storage,
        results=target,
        writes=10,
        reads=10,
        skipped_gates=skips,
        accelerator=accelerator,
        scale=scale,
    )
    training_options = TrainingRunOptions(
        workload=WorkloadOptions(name=workload, accelerator=accelerator, settings=settings),
        data=data_options,
        results=target,
        skipped_gates=skips,
    )
    # Wrong usage is refused before anything is written.
    if is_checkpointing:
        plan_model(checkpoint_options, ranks=comm.size)
    else:
        require_valid_training(training_options, comm=comm, terminal=replace(terminal, speaks=False))
    data_options.opener(rank=comm.rank, is_traced=False)()
    _prepare_tree(folder, description, comm, terminal)
    if is_checkpointing:
        if any(find_missing_checkpoints(target, workload, comm=comm).values()):
            terminal.note("run: ten checkpoints are written, and ten read back")
            if run_checkpoint_benchmark(checkpoint_options, comm=comm, terminal=terminal) is None:
                return CLOSED_GATES
        full_bytes, count = limits.models[workload].architecture_gib * 2**30, limits.num_checkpoints
        sizes = [
            (
                f"size: {count} checkpoints of {format_bytes(int(full_bytes))} "
                f"(rehearsed: {count} checkpoints of {format_bytes(int(full_bytes * scale))})"
            )
        ]
    else:
        found = _rehearse_training(training_options, comm, terminal)
        if found is None:
            return CLOSED_GATES
        sizes = found
    is_ready = False
    if comm.rank == 0:
        checked = next(
            result
            for result in check(folder, load_edition(EDITION))  # a folder may hold several rehearsals
            if result.division == division.value and result.workload in workload
        )
        assessment = assess_rehearsal(checked.findings)
        assert assessment is not None
        needs = [*sizes, *_list_needs(description, assessment)]
        # Warnings break no rule, but these mean that the figures are not the storage's.
        needs += dict.fromkeys(
            f"reads: {finding.proof}. {finding.fix}"
            for finding in checked.findings
            if finding.rule == "reads.memory" and finding.verdict is Verdict.WARNING
        )
        own = f"--submission ~/results --system NAME --{division.value}"
        verb, option_name = ("checkpointing", "--to") if is_checkpointing else ("training", "--data")
        words = [verb, workload, "--accelerator", accelerator]
        words += [word for setting in settings for word in ("--set", setting)]
        commands = [
            "penstock submission init ORGANIZATION ~/results",
            f"penstock submission describe {own}",
            f"penstock submission run {shlex.join([*words, option_name, str(data or 'URI')])} {own}",
        ]
        document = {
            "folder": str(folder.absolute()),
            "result": checked.name,
            "scale": float(scale),
            "verdict": checked.verdict.value,
            "outcome": assessment.summary,
            "needs": needs,
            "commands": commands,
            "findings": [
                {"rule": finding.rule, "verdict": finding.verdict.value, "proof": finding.proof}
                for finding in assessment.findings
            ],
        }
        text: View = [
            [(f"Rehearsal of {checked.workload}: {assessment.summary}", "bold")],
            *(f"  {finding.rule}: {finding.proof}" for finding in assessment.findings),
            "A real submission still needs:",
            *(f"  {need}" for need in needs),
            "Its commands, with the --ranks or --hosts of this one:",
            *(f"  {command}" for command in commands),
            f"Remove the rehearsal with: rm -r {shlex.quote(str(folder))}",
        ]
        terminal.result(document, text)
        is_ready = not assessment.other
    return 0 if comm.broadcast(is_ready, awaiting="rank 0 to check the rehearsal") else NOT_READY


def _prepare_tree(folder: Path, description: Path, comm: Comm, terminal: Terminal) -> None:
    """Do the work of `init` and `describe`, keeping existing files unchanged. Collective."""
    from penstock.cluster.facts.collect_facts import collect_from_ranks
    from penstock.results.published_files import write_file, write_text
    from penstock.submission.authoring import description_draft

    now = datetime.now(UTC)
    facts = collect_from_ranks(comm, process_environment(), now=lambda: now)
    if comm.rank == 0:
        by = f"penstock {__version__}"
        tree = owned_tree.claim_tree(folder, _REHEARSED, now=now, by=by, is_rehearsal=True)
        terminal.note(f"init: {tree.root} {'is new' if tree.is_new else 'is continued'}")
        draft = description_draft.draft_description(facts, _REHEARSED)
        if len(facts.present) > 1:
            draft["system_under_test"]["solution"]["capabilities"]["multi_host"] = True
        if not description.exists():
            write_text(
                description.parent, description.name, description_draft.initial_text(draft, is_rehearsal=True)
            )
            terminal.note(f"describe: {description}, with placeholders")
        picture = description.with_suffix(".pdf")
        if not picture.exists():
            write_file(picture.parent, picture.name, description_draft.REHEARSED_PICTURE)
    comm.barrier(awaiting="rank 0 to prepare the tree")


def _rehearse_training(options: TrainingRunOptions, comm: Comm, terminal: Terminal) -> list[str] | None:
    """Make the result; return a real one's size and duration, or None if a closed gate stopped the run."""
    from penstock.dataset.generate import expected_bytes

    made = make_training_result(options, comm=comm, terminal=terminal)
    if made is None:
        return None
    dataset, required = made.workload.dataset, made.required_size
    num_samples = required.min_files * dataset.num_samples_per_file
    num_steps = num_samples // (made.workload.reader.batch_size * required.request.num_accelerators)
    # The longest valid time of a step: with longer steps, a run misses the minimum utilization.
    slowest = float(required.request.computation_s) / made.workload.metric.au
    run_s = num_steps * made.workload.train.epochs * slowest
    return [
        (
            f"size: {required.min_files:,} files, {format_bytes(required.dataset_bytes)} "
            f"(rehearsed: {dataset.num_files_train:,} files, {format_bytes(expected_bytes(dataset))})"
        ),
        f"time: {load_edition(EDITION).num_runs} runs of at most {format_seconds(run_s)} each",
    ]


def _list_needs(description: Path, assessment: RehearsalAssessment) -> Iterator[str]:
    """Yield whatever else a real submission needs."""
    from penstock.submission.authoring.description_draft import REHEARSED_PICTURE, find_placeholders

    if "place" in assessment.excuses:
        yield "place: results on a different file system from the data"
    if placeholders := find_placeholders(description.read_text(encoding="utf-8")):
        yield f"description: {len(placeholders)} values in {description} ({name_some(placeholders, 3)})"
    picture = description.with_suffix(".pdf")
    if picture.read_bytes() == REHEARSED_PICTURE:
        yield "picture: a drawing of the system as systems/NAME.pdf"
    if "utilization" in assessment.excuses:
        yield (
            "utilization: at least the minimum in each run; here the start of an epoch weighs more, and a "
            "larger --scale tells more"
        )
    for finding in assessment.other:
        yield f"{finding.rule}: {finding.proof}. {finding.fix}"
