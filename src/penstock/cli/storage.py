"""`penstock storage`: what a place that keeps bytes can do at best."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import values
from penstock.cli.ranks import ranked
from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cluster.comm import Comm

app = typer.Typer(no_args_is_help=True, help="What can this storage do at best, from here?")


@app.callback()
def storage() -> None:
    """Group the verbs of storage."""


_Uri = Annotated[
    str,
    typer.Argument(
        metavar="URI", help="/path (buffered, then O_DIRECT), direct:///path, s3://bucket/prefix, ..."
    ),
]
_Size = Annotated[
    str, typer.Option("--size", metavar="SIZE", help="Moved by each measurement, over all ranks.")
]
_Streams = Annotated[
    str, typer.Option("--streams", metavar="N,...", help="Threads a rank, one block in flight each.")
]
_Blocks = Annotated[str, typer.Option("--blocks", metavar="SIZE,...", help="Block sizes of sequential I/O.")]
_MaxSeconds = Annotated[
    float, typer.Option("--max-seconds", help="Shrink measurements that would take longer.")
]
_Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the storage; repeatable."),
]


@app.command()
@ranked
def probe(
    comm: Comm,
    uri: _Uri,
    *,
    size: _Size = "2GiB",
    streams: _Streams = "1,8",
    blocks: _Blocks = "1MiB,8MiB",
    max_seconds: _MaxSeconds = 20.0,
    option: _Options = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what the storage at URI can do at best, and clean up.

    Sequential writes (durable at the end), cold reads, random reads, small objects, fsync latency: the
    limits that everything else is compared with.

    Examples:

      penstock storage probe /data

      penstock storage probe direct:///data --size 8GiB --streams 1,16 --json

      penstock storage probe s3://bucket/x -o client=minio -o part_bytes=16MiB --ranks 4
    """
    from dataclasses import asdict

    from penstock.bench.probe import ProbeRequest
    from penstock.bench.probe import probe as run_probe
    from penstock.bench.probe.measurement import measurement_rows
    from penstock.environment import process_environment

    request = ProbeRequest(
        uri=uri,
        size_bytes=values.size("--size", size),
        streams=values.counts("--streams", streams),
        block_bytes=values.sizes("--blocks", blocks),
        max_seconds=max_seconds,
    )
    terminal = Terminal(as_json=as_json, speaks=comm.rank == 0)
    with terminal.progress() as progress:
        result = run_probe(
            request,
            comm=comm,
            environment=process_environment(),
            options=values.assignments("--option", option or ()),
            progress=progress,
        )
    for note in result.notes:
        terminal.note(note)
    title = f"{uri} from {', '.join(result.hosts)}, {result.ranks} rank{'s' * (result.ranks > 1)}"
    terminal.result(asdict(result), table(title, measurement_rows(result.measurements)))
