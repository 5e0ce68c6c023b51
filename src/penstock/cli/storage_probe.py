"""`penstock storage probe`: what a storage system can do at best, from here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from penstock.cli.option_groups import BackendOptions, PageOption
from penstock.cli.options import argument, flag, group, option
from penstock.cli.parsers import SIZE, URI, number, several, whole
from penstock.cli.rank_options import ranked
from penstock.cli.terminal import Terminal, table
from penstock.cluster.comm import Comm
from penstock.environment import process_environment

if TYPE_CHECKING:
    from penstock.bench.probe import ProbeResult
    from penstock.reports.answer_page import AnswerPage


@dataclass(frozen=True, kw_only=True)
class _ProbeOptions:
    uri: str = argument(
        "URI", URI, "Storage: /path (buffered, then O_DIRECT), direct:///path, s3://bucket/prefix, ..."
    )
    size_bytes: int = option(
        "--size", SIZE, "Move this many bytes in each measurement, over all ranks.", default="2GiB"
    )
    streams: tuple[int, ...] = option(
        "--streams",
        several(whole(0)),
        "Measure with this many threads on each rank, each with one block in flight.",
        default="1,8",
    )
    block_bytes: tuple[int, ...] = option(
        "--blocks", several(SIZE), "Measure sequential I/O with blocks of these sizes.", default="1MiB,8MiB"
    )
    max_seconds: float = option(
        "--max-seconds",
        number(),
        "Shorten measurements that would take longer than this, in seconds.",
        default="20",
    )
    is_exact: bool = flag(
        "--exact", "Measure only these streams and blocks, and do not search for faster ones."
    )
    page: PageOption = group(PageOption)
    storage: BackendOptions = group(BackendOptions)


@ranked(_ProbeOptions, is_followed=True)
def probe(options: _ProbeOptions, comm: Comm, terminal: Terminal) -> None:
    """Measure the limits of the storage at URI, and clean up.

    Sequential writes (durable at the end), cold reads, random reads, small objects and fsync latency: the
    limits that all other measurements are compared with. More streams and larger blocks than those asked for
    are tried until none is faster.

    Examples:

      penstock storage probe /data

      penstock storage probe direct:///data --size 8GiB --streams 1,16 --json

      penstock storage probe /mnt/pfs --page pfs.html

      penstock storage probe s3://bucket/x -O client=minio -O part_bytes=16MiB --ranks 4
    """
    from penstock.bench import probe as storage_probe
    from penstock.bench.probe.probe_run import measurement_rows

    request = storage_probe.ProbeRequest(
        uri=options.uri,
        size_bytes=options.size_bytes,
        streams=options.streams,
        block_bytes=options.block_bytes,
        max_seconds=options.max_seconds,
        searches=not options.is_exact,
    )
    with terminal.progress() as progress:
        report = storage_probe.probe(
            request,
            comm=comm,
            environment=process_environment(),
            options=options.storage.values,
            progress=progress,
        )
    options.page.write(lambda: _draw(report), terminal)
    terminal.notes(report.notes)
    title = f"{options.uri} from {', '.join(report.hosts)}, {report.ranks} rank{'s' * (report.ranks > 1)}"
    terminal.result(asdict(report), table(title, measurement_rows(report.measurements)))


def _draw(report: ProbeResult) -> AnswerPage:
    from penstock.bench.probe.probe_page import make_probe_page

    return make_probe_page(report)
