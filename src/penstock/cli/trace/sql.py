"""`penstock trace sql`: a question in SQL."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.terminal import JsonFlag, Terminal, table
from penstock.cli.trace.opening import Dask, Files, RankPattern, Strict, Where, opened


def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="DuckDB's SQL over a table `events`.")],
    files: Files,
    *,
    where: Where = "",
    rank_pattern: RankPattern = None,
    dask: Dask = "",
    strict: Strict = False,
    as_json: JsonFlag = False,
) -> None:
    """Ask traces in SQL.

    Columns of `events`: ts_us, dur_us, end_us, op, name, cat, pid, tid, rank, host, path, size_bytes, offset,
    ret, epoch, step, args (JSON text), run, file.

    Examples:

      penstock trace sql "SELECT op, count(*), sum(dur_us) FROM events GROUP BY op" traces/*.pfw.gz

      penstock trace sql "SELECT max(end_us) - min(ts_us) AS span_us FROM events" run.events --json
    """
    from penstock.trace.questions.events_view import ask

    terminal = Terminal(as_json=as_json)
    with opened(files, terminal, where=where, strict=strict, rank_pattern=rank_pattern, dask=dask) as traces:
        answer = ask(traces.connection, query)
    terminal.result(answer.document(), table("", answer.texts()))
