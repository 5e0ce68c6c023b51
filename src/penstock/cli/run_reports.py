"""Reports of benchmark runs for people: training, checkpoints, and the bytes on devices beside both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.cli.terminal import format_number, render_text, table
from penstock.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult, DirectionFigures
    from penstock.bench.training.training_result import TrainingResult
    from penstock.results.io_reconciliation import IoReconciliation
    from penstock.results.utilization import EpochRate
    from penstock.workflows.submission.result_draft import RunLogs

MAX_DEVICES_NAMED = 4


def reconciliation_lines(deliveries: Sequence[IoReconciliation]) -> Iterator[tuple[str, str]]:
    """Device bytes beside application bytes: a title and a line for each direction, and why one fails."""
    for delivery in deliveries:
        title = f"devices, {delivery.direction}"
        if delivery.delivered_bytes is None:
            yield title, f"not checked: {delivery.why}"
            continue
        names = sorted(delivery.by, key=lambda name: -delivery.by[name])
        more = f" and {len(names) - MAX_DEVICES_NAMED} more" if len(names) > MAX_DEVICES_NAMED else ""
        devices = ", ".join(names[:MAX_DEVICES_NAMED])
        application = format_bytes(delivery.application_bytes)
        moved = f"{format_bytes(delivery.delivered_bytes)} for {application} of the application"
        yield title, f"{moved}, by {devices}{more}" if devices else moved
        if delivery.verdict != "pass":
            yield "", f"{'FLAGGED' if delivery.verdict == 'fail' else delivery.verdict}: {delivery.why}"


def reconciliation_notes(deliveries: Sequence[IoReconciliation]) -> Iterator[str]:
    """Why figures are not the storage's alone, a sentence each."""
    for delivery in deliveries:
        if delivery.verdict == "fail":
            yield f"Not all bytes came from storage: {delivery.why}"


def capture_training_output(result: TrainingResult, remarks: Sequence[str]) -> RunLogs:
    """What the command prints of a training run, for the logs of its result directory."""
    from penstock.workflows.submission.result_draft import RunLogs

    notes = (*remarks, *result.stages.remarks)
    return RunLogs(
        stdout=render_text(lambda console: draw_training(console, result)),
        stderr="".join(f"{note}\n" for note in notes),
    )


def draw_training(console: Console, result: TrainingResult) -> None:
    """Draw accelerator utilization by epoch, and what limited it."""
    from rich.markup import escape

    train, ceiling = result.train, result.stages.ceiling
    accelerators = f"{result.ranks} accelerator{'s' * (result.ranks > 1)}"
    table(f"{escape(result.workload)}, {accelerators}", [_epoch_row(rate) for rate in train.epochs])(console)
    strict = f"{train.au_strict_percent.mean:.2f} %" if train.au_strict_percent else "-"
    console.print(f"  AU        {train.au_compat_percent.mean:.2f} % by DLIO's formula, {strict} strictly")
    console.print(
        f"  read      {format_bytes(train.read_bytes)}, {format_rate(train.read_bytes_per_s)}, "
        f"{train.samples_per_s_strict:,.1f} samples/s"
    )
    for title, line in reconciliation_lines(result.stages.deliveries):
        console.print(f"  {title:<16}{escape(line)}")
    for note in train.notes:
        console.print(f"  note      {escape(note)}")
    if ceiling is not None:
        console.print(f"  ceiling   AU {ceiling.au_compat_percent:.2f} % on storage that costs nothing")
    if train.verdict is not None:
        console.print(f"  limit     {train.verdict.bottleneck.value}")
        for sentence in train.verdict.evidence:
            console.print(f"            {escape(sentence)}")
    if (saved := result.stages.checkpoints) is not None:
        rate = f", {format_rate(saved.gib_per_s * 2**30)}" if saved.gib_per_s else ""
        console.print(
            f"  saved     {saved.checkpoints} checkpoints of {format_bytes(saved.bytes_each)}{rate}"
        )
    console.print(f"  results   {escape(result.results_dir)}")


def _epoch_row(rate: EpochRate) -> dict[str, str]:

    return {
        "epoch": str(rate.epoch),
        "AU": f"{rate.au_compat_percent:.2f} %",
        "AU strict": "-" if rate.au_strict_percent is None else f"{rate.au_strict_percent:.2f} %",
        "samples/s": f"{rate.samples_per_s_strict:,.1f}",
        "read": format_bytes(rate.read_bytes),
        "time": format_seconds(rate.elapsed_s),
    }


def capture_checkpoint_output(result: CheckpointResult) -> RunLogs:
    """What the command prints of a checkpoint run, for the logs of its result directory."""
    from penstock.workflows.submission.result_draft import RunLogs

    notes = "".join(f"{sentence}\n" for sentence in checkpoint_warnings(result))
    return RunLogs(stdout=render_text(lambda console: draw_checkpoints(console, result)), stderr=notes)


def checkpoint_warnings(result: CheckpointResult) -> list[str]:
    """Why figures of this run do not mean what they seem to, a sentence each."""
    warnings = [
        f"Checkpoint {measured.round.step}: {measured.phase.wrong_bytes} chunks do not hold the bytes that "
        f"were written, the first at byte {measured.wrong[0].offset:,} of {measured.wrong[0].key}"
        for measured in result.rounds
        if measured.phase.wrong_bytes
    ]
    cached = [measured.cold for measured in result.rounds if measured.is_from_memory and measured.cold]
    if cached:
        share = max(cold.resident_share for cold in cached)
        num_reads = sum(measured.round.direction == "read" for measured in result.rounds)
        warnings.append(
            f"{len(cached)} of {num_reads} reads came from the page cache: up to {share:.0%} of the bytes "
            "stayed in memory after cache eviction. They do not measure storage; direct:// bypasses the page "
            "cache"
        )
    return [*warnings, *reconciliation_notes(result.deliveries)]


def draw_checkpoints(console: Console, result: CheckpointResult) -> None:
    """Draw the throughput of each direction, and the bottleneck."""
    from penstock.bench.checkpoint.checkpoint_result import job_bottleneck

    rows = [
        _direction_row(name, figures)
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
    for title, line in reconciliation_lines(result.deliveries):
        console.print(f"  {title:<16}{line}", markup=False)
    console.print(f"  the record: {result.results_dir}", markup=False)


def _direction_row(name: str, figures: DirectionFigures) -> dict[str, str]:

    return {
        "": name,
        "bytes": format_bytes(figures.num_bytes),
        "took": format_seconds(figures.duration_s),
        "GiB/s": format_number(figures.gib_per_s, ".2f"),
        "each": format_number(figures.mean_gib_per_s, ".2f"),
        "content": format_number(figures.content_gib_per_s, ".2f"),
        "drain": format_seconds(figures.drain_s),
        "p99": f"{figures.p99_ms:.1f} ms",
    }
