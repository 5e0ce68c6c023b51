"""`penstock checkpoint run`: checkpoints written and read back, timed, and what held them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cli import values
from penstock.cli.checkpoint.asking import (
    CheckpointWords,
    entry_of,
    inspected,
    is_stopped,
    of_words,
    request_of,
)
from penstock.cli.delivery import delivery_lines, delivery_notes
from penstock.cli.gates import CLOSED_GATES
from penstock.cli.handing_in import Entry, drawn, open_session
from penstock.cli.ranks import ranked
from penstock.cli.terminal import Terminal, table
from penstock.cluster.comm import Comm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from penstock.bench.checkpoint.checkpoint_request import CheckpointRequest
    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult, DirectionFigures
    from penstock.workflows.submission.session import Said

WRONG_BYTES = 1


@ranked
@of_words
def run(comm: Comm, words: CheckpointWords, terminal: Terminal) -> int:
    """Write checkpoints of a model, then read them back, and tell how fast the storage took and gave them.

    A write ends when its last byte is durable; before a read, its files are dropped from memory on every
    node. Every byte read is verified. Checkpoints stay for `--writes 0` to read, but for `--remove`.

    Examples:

      penstock checkpoint run llama3-8b --to direct:///mnt/pfs/ckpt --results runs --ranks 8

      penstock checkpoint run llama3-8b --to ./ckpt --results runs --scale 0.01 --writes 2 --reads 2 --json

      penstock checkpoint run llama3-8b --to /mnt/ckpt --ranks 8 --closed --accelerator b200
      --submission ~/results --system fast
    """
    return carry_out_words(words, comm=comm, terminal=terminal)


def carry_out_words(words: CheckpointWords, *, comm: Comm, terminal: Terminal) -> int:
    """The run that the words ask for, and its leaf if it is handed in; the exit code."""
    request = request_of(words, comm=comm)
    entry = entry_of(words, request)
    request = inspected(request, words, comm=comm, terminal=terminal)
    if is_stopped(request):
        return CLOSED_GATES
    if entry is None:
        options = values.assignments("--option", words.option or ())
        result = perform(request, words.to, options, comm=comm, terminal=terminal)
    else:
        result = _hand_in(request, words, entry, comm=comm, terminal=terminal)
    terminal.result(result.document(), lambda console: draw(console, result))
    return 0 if result.is_right else WRONG_BYTES


def _hand_in(
    request: CheckpointRequest, words: CheckpointWords, entry: Entry, *, comm: Comm, terminal: Terminal
) -> CheckpointResult:
    from dataclasses import replace
    from functools import partial

    from penstock.storage import open_storage
    from penstock.submission.edition import load_edition
    from penstock.workflows.submission.checkpointing import CheckpointOnlooker, add_checkpoints

    for remark in request.remarks:
        terminal.note(remark)
    asked = replace(request, model=replace(request.model, workload=entry.located.workload))
    fsync = asked.model.workload.checkpoint.fsync
    options = {**durability(words.to, fsync=fsync), **values.assignments("--option", words.option or ())}
    with terminal.progress() as progress:
        result = add_checkpoints(
            open_session(entry, words.settings, comm=comm),
            asked,
            partial(open_storage, words.to, asked.environment, options=options, rank=comm.rank),
            accelerator=words.accelerator,
            edition=load_edition("v3.0"),
            comm=comm,
            onlooker=CheckpointOnlooker(progress=progress, note=terminal.note, tell=_said_of),
        )
    for sentence in shortcomings(result):
        terminal.note(sentence)
    return result


def _said_of(result: CheckpointResult) -> Said:
    """What the command prints of a run, for the logs of its leaf."""
    from penstock.workflows.submission.session import Said

    notes = "".join(f"{sentence}\n" for sentence in shortcomings(result))
    return Said(stdout=drawn(lambda console: draw(console, result)), stderr=notes)


def perform(
    request: CheckpointRequest, uri: str, options: Mapping[str, str], *, comm: Comm, terminal: Terminal
) -> CheckpointResult:
    """Say what the request's makers remarked, and carry it out."""
    for remark in request.remarks:
        terminal.note(remark)
    return carry_out(request, uri, options, comm=comm, terminal=terminal)


def carry_out(
    request: CheckpointRequest, uri: str, options: Mapping[str, str], *, comm: Comm, terminal: Terminal
) -> CheckpointResult:
    """Run it on the storage at `uri`, saying on the way what people should know."""
    from functools import partial

    from penstock.bench.checkpoint.checkpoint_run import run_checkpoints
    from penstock.storage import open_storage

    told = {**durability(uri, fsync=request.model.workload.checkpoint.fsync), **options}
    with terminal.progress() as progress:
        result = run_checkpoints(
            request,
            partial(open_storage, uri, request.environment, options=told, rank=comm.rank),
            comm=comm,
            progress=progress,
            tell=terminal.note,
        )
    for sentence in shortcomings(result):
        terminal.note(sentence)
    return result


def durability(uri: str, *, fsync: bool) -> Mapping[str, str]:
    """The storage's option for it; an object service knows no other way than durable."""
    from penstock.storage.uri import FILE_SCHEMES, parse_uri

    return {"fsync": str(fsync).lower()} if parse_uri(uri).scheme in FILE_SCHEMES else {}


def shortcomings(result: CheckpointResult) -> list[str]:
    """What keeps figures of this run from being what they look like, a sentence each."""
    said = [
        f"Checkpoint {each.round.step}: {each.phase.wrong_bytes} chunks hold other bytes than were written, "
        f"the first at byte {each.wrong[0].offset:,} of {each.wrong[0].key}"
        for each in result.rounds
        if each.phase.wrong_bytes
    ]
    warm = [each.cold for each in result.rounds if each.is_from_memory and each.cold]
    if warm:
        share = max(cold.resident_share for cold in warm)
        num_reads = sum(each.round.direction == "read" for each in result.rounds)
        said.append(
            f"{len(warm)} of {num_reads} reads came from the page cache: up to {share:.0%} of the bytes "
            "stayed in memory after they were dropped. They count for no storage; direct:// reads past "
            "the page cache"
        )
    return [*said, *delivery_notes(result.deliveries)]


def draw(console: Console, result: CheckpointResult) -> None:
    """For people: what each direction reached, and what held it up."""
    from penstock.bench.checkpoint.checkpoint_result import job_bottleneck
    from penstock.units import format_bytes

    rows = [
        _row(name, figures)
        for name, figures in (("write", result.write), ("read", result.read))
        if figures is not None
    ]
    title = f"{format_bytes(result.total_bytes)} a checkpoint of {result.model}, at {result.target}"
    table(title, rows)(console)
    console.print(f"Bottleneck: {job_bottleneck(result.rounds)}", style="bold")
    console.print(
        "  GiB/s: all bytes over all time; each: mean of checkpoints; content: making or verifying it"
    )
    if result.gap_s is not None:
        console.print(f"  {result.gap_s:.1f} s between the last write and the first read", markup=False)
    for title, line in delivery_lines(result.deliveries):
        console.print(f"  {title:<16}{line}", markup=False)
    console.print(f"  the record: {result.results_dir}", markup=False)


def _row(name: str, figures: DirectionFigures) -> dict[str, str]:
    from penstock.units import format_bytes, format_seconds

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    return {
        "": name,
        "bytes": format_bytes(figures.num_bytes),
        "took": format_seconds(figures.duration_s),
        "GiB/s": rate(figures.gib_per_s),
        "each": rate(figures.mean_gib_per_s),
        "content": rate(figures.content_gib_per_s),
        "drain": format_seconds(figures.drain_s),
        "p99": f"{figures.p99_ms:.1f} ms",
    }
