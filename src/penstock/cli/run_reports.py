"""Benchmark runs as text for people: training, checkpoints, and the bytes that devices moved."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.cli.terminal import TextTable, View, bold, render_text
from penstock.errors import name_some
from penstock.results.run_folder import PAGE_FILE
from penstock.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from penstock.bench.checkpoint.checkpoint_result import CheckpointResult
    from penstock.bench.training.training_result import TrainingResult
    from penstock.reports.report import Report
    from penstock.results.counter_files import IoReconciliation

MAX_DEVICES_NAMED = 4


def _draw_probe(folder: Path) -> Report:
    from penstock.bench.probe.probe_page import make_probe_page
    from penstock.bench.probe.probe_run import read_probe

    return make_probe_page(read_probe(folder))


def _draw_cache(folder: Path) -> Report:
    from penstock.kvcache.cache_figures import read_cache_run
    from penstock.kvcache.cache_pages import make_run_page

    return make_run_page(read_cache_run(folder))


PAGES: Final = {"probe": _draw_probe, "kvcache": _draw_cache}
"""The function that builds a run's page, for each kind of run that neither trains nor writes checkpoints."""


def reconciliation_lines(reconciliations: Sequence[IoReconciliation]) -> Iterator[tuple[str, str]]:
    """Yield titles and lines that compare device with application bytes, and explain any difference."""
    for reconciliation in reconciliations:
        title = f"devices, {reconciliation.direction}"
        if reconciliation.delivered_bytes is None:
            yield title, f"not checked: {reconciliation.why}"
            continue
        names = sorted(reconciliation.by, key=lambda name: -reconciliation.by[name])
        devices = f", by {name_some(names, MAX_DEVICES_NAMED)}" if names else ""
        application = format_bytes(reconciliation.application_bytes)
        moved = f"{format_bytes(reconciliation.delivered_bytes)} for {application} of the application"
        yield title, f"{moved}{devices}"
        if reconciliation.verdict != "pass":
            verdict = "FLAGGED" if reconciliation.verdict == "fail" else reconciliation.verdict
            yield "", f"{verdict}: {reconciliation.why}"


def find_page(results_dir: str) -> Path | None:
    """Return the page in the folder of a run, or None if there is none."""
    page = Path(results_dir) / PAGE_FILE
    return page if page.is_file() else None


def reconciliation_notes(reconciliations: Sequence[IoReconciliation]) -> list[str]:
    """Return a sentence for each reason to believe that not all bytes came from storage."""
    return [
        f"Not all bytes came from storage: {reconciliation.why}"
        for reconciliation in reconciliations
        if reconciliation.verdict == "fail"
    ]


def capture_training_output(result: TrainingResult, remarks: Sequence[str]) -> tuple[str, str]:
    """Return the stdout and stderr of a training run's command, for the logs in its result directory."""
    notes = (*remarks, *result.stages.remarks)
    return render_text(view_training(result)), "".join(f"{note}\n" for note in notes)


def view_training(result: TrainingResult) -> View:
    """Show accelerator utilization by epoch, and the bottleneck."""
    from penstock.results.phase_figures import epoch_rows

    train, stages = result.train, result.stages
    accelerators = format_count(result.ranks, "accelerator")
    yield TextTable(f"{result.workload}, {accelerators}", epoch_rows(train.epochs))
    yield bold(f"  verdict   {result.verdict.upper()}")
    strict = f"{train.au_strict_percent.mean:.2f} %" if train.au_strict_percent else "-"
    yield f"  AU        {train.au_compat_percent.mean:.2f} % by DLIO's formula, {strict} strictly"
    yield (
        f"  read      {format_bytes(train.read_bytes)}, {format_rate(train.read_bytes_per_s)}, "
        f"{train.samples_per_s_strict:,.1f} samples/s"
    )
    for title, text in reconciliation_lines(stages.deliveries):
        yield f"  {title:<16}{text}"
    for note in train.notes:
        yield f"  note      {note}"
    if stages.ceiling is not None:
        excuse = "" if result.ceiling else ": does not count, the run exceeded it"
        yield f"  harness   AU {stages.ceiling['au_compat']:.2f} % on storage that costs nothing{excuse}"
    if train.verdict is not None:
        yield f"  limit     {train.verdict.bottleneck.value}"
        for sentence in train.verdict.evidence:
            yield f"            {sentence}"
    if (saved := stages.checkpoints) is not None:
        rate = f", {format_rate(saved['gib_per_s'] * 2**30)}" if saved["gib_per_s"] else ""
        yield (
            f"  saved     {format_count(saved['checkpoints'], 'checkpoint')} of "
            f"{format_bytes(saved['bytes_each'])}{rate}"
        )
    yield f"  results   {result.results_dir}"
    if page := find_page(result.results_dir):
        yield f"  page      {page}"
    if trace := stages.storage_options.get("trace"):
        yield f"  trace     {trace}"


def capture_checkpoint_output(result: CheckpointResult) -> tuple[str, str]:
    """Return the stdout and stderr of a checkpoint run's command, for the logs in its result directory."""
    notes = "".join(f"{sentence}\n" for sentence in checkpoint_warnings(result))
    return render_text(view_checkpoints(result)), notes


def checkpoint_warnings(result: CheckpointResult) -> list[str]:
    """Return a sentence for each reason to doubt the figures of this run."""
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


def view_checkpoints(result: CheckpointResult) -> View:
    """Show the throughput of each direction, and the bottleneck."""
    from penstock.bench.checkpoint.checkpoint_result import direction_rows

    title = f"{format_bytes(result.total_bytes)} a checkpoint of {result.model}, at {result.target}"
    yield TextTable(title, direction_rows(result))
    directions = (("write", result.write), ("read", result.read))
    held = ", ".join(f"{name} {figures['bottleneck']}" for name, figures in directions if figures)
    yield bold(f"Bottleneck: {held}")
    yield bold(f"Verdict: {result.verdict.upper()}")
    yield "  GiB/s: all bytes over all time; each: mean of checkpoints; content: making or verifying it"
    if full := result.full_seconds():
        took = " and ".join(f"{format_seconds(spent)} to {name[:-2]}" for name, spent in full.items())
        yield (
            f"  a whole checkpoint, {format_bytes(result.full_bytes)}, would take {took} at these rates "
            f"(extrapolated from files of {result.total_bytes / result.full_bytes:.2g} of their size)"
        )
    if result.gap_s is not None:
        yield f"  {result.gap_s:.1f} s between the last write and the first read"
    for title, text in reconciliation_lines(result.deliveries):
        yield f"  {title:<16}{text}"
    if result.earlier and (kept := result.earlier["kept_steps"]):
        command = f"penstock results show {shlex.quote(result.earlier['run_folder'])}"
        yield f"  kept {format_count(len(kept), 'checkpoint')} of an earlier run: `{command}`"
    yield f"  results: {result.results_dir}"
    if page := find_page(result.results_dir):
        yield f"  page: {page}"
    if trace := result.storage_options.get("trace"):
        yield f"  trace: {trace}"
