"""`penstock storage probe`: the limits of a storage system, measured from here."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.cli.option_groups import PAGE, STORAGE, write_page
from penstock.cli.options import argument, command_line, option, refuse_ignored
from penstock.cli.parsers import FOLDER, SIZE, URI, choice, number, several, whole
from penstock.cli.rank_options import followed
from penstock.cli.run_reports import PAGES
from penstock.cli.terminal import Terminal, View, table
from penstock.cluster.comm import Comm
from penstock.environment import process_environment
from penstock.results.provenance import redact
from penstock.units import format_count

if TYPE_CHECKING:
    from penstock.bench.probe import ProbeResult
    from penstock.bench.probe.probe_run import Part


_KNEE_PANEL = "Loads up to the knee"
_TAKEN_BY = {
    ("--request", "--mix", "--depth", "--rates"): {"knee"},
    ("--blocks",): {"best"},
    ("--streams",): {"best", "metadata"},
    ("--size",): {"best", "knee"},
}
"""The parts of a probe that take each option."""


@followed
def probe(
    comm: Comm,
    terminal: Terminal,
    *,
    uri: str = argument(
        "URI", URI, "Storage: /path (buffered, then O_DIRECT), direct:///path, s3://bucket/prefix, ..."
    ),
    size_bytes: int = option(
        "--size",
        SIZE,
        "Bytes to transfer in each measurement, over all ranks (at least a block per stream).",
        default="2GiB",
    ),
    streams: tuple[int, ...] = option(
        "--streams",
        several(whole(0)),
        "Numbers of threads per rank to try, each thread with one block in flight.",
        default="1,8",
    ),
    block_bytes: tuple[int, ...] = option(
        "--blocks", several(SIZE), "Block sizes of sequential I/O to try.", default="1MiB,8MiB"
    ),
    parts: tuple[str, ...] = option(
        "--measure",
        several(choice("best", "knee", "metadata")),
        "What to measure: the highest rates (best), loads up to the knee (knee; with O_DIRECT if URI is a "
        "path), or the rates of creating, looking up, listing and deleting files (metadata).",
        default="best",
    ),
    request_bytes: int = option(
        "--request", SIZE, "Size of an operation.", default="128KiB", panel=_KNEE_PANEL
    ),
    read_percent: int = option(
        "--mix",
        whole(0, 100),
        "Percentage of operations that are reads; the rest are writes.",
        default="100",
        panel=_KNEE_PANEL,
    ),
    depth: int = option(
        "--depth", whole(1, 4096), "Maximum operations in flight per rank.", default="64", panel=_KNEE_PANEL
    ),
    rates: tuple[float, ...] | None = option(
        "--rates",
        several(number(1e-3, 1e7)),
        "Offered loads, in operations per second (default: search for the knee).",
        panel=_KNEE_PANEL,
    ),
    results: Path | None = option(
        "--results",
        FOLDER,
        "Create this run's directory below DIR, so that the run can be followed and its result is kept.",
    ),
    page: Path | None = PAGE,
    storage: tuple[tuple[str, str], ...] = STORAGE,
) -> None:
    """Measure the limits of the storage at URI, and clean up.

    Measures sequential writes (durable at the end), cold reads, random reads, small objects and fsync
    latency. Compare the figures of all other benchmarks with these limits. On slow storage, each measurement
    transfers less data, so that it takes at most about 20 s.

    With --measure knee, operations start on a fixed schedule, whether or not earlier ones have completed, and
    latency counts from the scheduled start. Throughput rises up to the knee; beyond it, waiting times grow.

    Examples:

      penstock storage probe /data

      penstock storage probe direct:///data --size 8GiB --streams 1,16 --json

      penstock storage probe /mnt/pfs --page pfs.html

      penstock storage probe /data --measure knee --request 4KiB --mix 70

      penstock storage probe /mnt/pfs --size 64GiB --results probes --watch

      penstock storage probe /mnt/pfs --measure best,knee,metadata --streams 1,8,32

      penstock storage probe s3://bucket/x -O client=minio -O part_bytes=16MiB --ranks 4
    """
    from penstock.bench.probe import ProbeRequest, probe_in_folder
    from penstock.bench.probe import probe as probe_storage
    from penstock.bench.probe.load_plan import LoadRequest
    from penstock.bench.probe.probe_page import make_probe_page
    from penstock.bench.recorded_run import RunSettings
    from penstock.storage import open_storage

    for names, takers in _TAKEN_BY.items():
        if not takers & {*parts}:
            refuse_ignored(names, f"only --measure {' or '.join(sorted(takers))} takes it")
    environment = process_environment()
    request = ProbeRequest(
        uri=uri,
        size_bytes=size_bytes,
        streams=streams,
        block_bytes=block_bytes,
        parts=tuple(cast("Part", part) for part in parts),
        load=LoadRequest(
            block_bytes=request_bytes,
            read_percent=read_percent,
            depth=depth,
            rates=rates,
        ),
    )
    open_storage(uri, environment, options=dict(storage), rank=comm.rank)  # before a run's folder is made
    measure = partial(probe_storage, request, environment=environment)
    if results is not None:
        settings = RunSettings(results=results, command=command_line(), environment=environment, pages=PAGES)
        measure = partial(probe_in_folder, settings, request)
    finished: list[ProbeResult] = []
    is_over = False
    try:
        with terminal.progress() as progress:
            measure(comm=comm, options=dict(storage), progress=progress, keep=finished.append)
        is_over = True
    finally:
        if finished:
            report = finished[-1]
            if not is_over:
                terminal.note("The probe did not finish; these are the parts that did.")
            terminal.notes(report.notes)
            document = {"command": redact(command_line()), **asdict(report)}
            terminal.result(document, view_probe(report))
    write_page(page, lambda: make_probe_page(report), terminal)


def view_probe(report: ProbeResult) -> View:
    """Show the measurements of a probe as text."""
    from penstock.bench.probe.load_run import load_rows
    from penstock.bench.probe.metadata_rates import metadata_rows
    from penstock.bench.probe.probe_page import HUGE_PAGES, describe_shape, say_feeds, say_knee, say_limit
    from penstock.bench.probe.probe_run import measurement_rows

    title = f"{report.uri} from {', '.join(report.hosts)}, {format_count(report.ranks, 'rank')}"
    if report.measurements:
        yield from table(title, measurement_rows(report.measurements))
    for load in report.loads:
        yield from table(f"{title}: {load.mode}, {describe_shape(load)}", load_rows(load))
        yield f"The knee: {say_knee(load)}. {say_limit(load)}"
    if report.metadata:
        yield from table(f"{title}: calls on files", metadata_rows(report.metadata))
    if report.measurements:
        yield f"{HUGE_PAGES}."
    if feeding := say_feeds(report):
        yield f"This storage {feeding}."
